"""Open the splits of --data, hold out dev rows, and recognise the task from the columns."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.data.random import shuffled
from bertsmith.errors import InputError, nearest
from bertsmith.tasks import TASKS
from bertsmith.tasks.base import Task
from bertsmith.tasks.glue import GLUE, glue_settings, official_file, read_glue
from bertsmith.tasks.texts import text_columns
from bertsmith.text.hub import named_rows
from bertsmith.text.readers import SPLIT_NAMES
from bertsmith.text.rows import Table, read_number, table_of
from bertsmith.text.table_files import json_table
from bertsmith.text.tables import ROW_NAMES, Splits, folder_splits, open_splits


class Tables(NamedTuple):
    """Rows for training and for evaluation."""

    train: Table
    dev: Table
    notices: tuple[str, ...] = ()
    """Messages about the data, shown before training."""


class GlueSplits(Splits):
    """A folder with the official files of a GLUE task."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, split: str) -> Table | None:
        file = official_file(self.folder, split)
        return None if file is None else read_glue(file, self.folder.name)

    def missing(self, split: str) -> InputError:
        available = sorted(path.stem for path in self.folder.glob("*.tsv"))
        return InputError(f"--data {str(self.folder)!r} has no {split}.tsv; {nearest(split, available)}")


class JsonSplits(Splits):
    """Files of JSON: arrays of rows, or official SQuAD files such as train-v1.1.json; a folder of them, or one file."""

    def __init__(self, path: Path, file_is: str) -> None:
        self.path, self.file_is = path, file_is

    def find(self, split: str) -> Table | None:
        if self.path.is_file():
            return json_table(self.path) if split == self.file_is else None
        names = SPLIT_NAMES.get(split, (split,))
        files = sorted(file for name in names for file in self.path.glob(f"{name}*.json"))
        if len(files) > 1:
            listed = " and ".join(file.name for file in files)
            raise InputError(f"--data {str(self.path)!r} has {listed} for one split; keep one of them")
        return json_table(files[0]) if files else None

    def missing(self, split: str) -> InputError:
        return InputError(f"--data {str(self.path)!r} has no {split} split, such as {split}-v1.1.json")


def task_splits(data: str | Path, *, file_is: str = "train") -> Splits:
    """Open the splits of --data; a single file is the split `file_is`."""
    path = Path(data)
    is_json = path.suffix.lower() == ".json" and path.is_file()
    if is_json or (path.is_dir() and not folder_splits(path) and any(path.glob("*.json"))):
        return JsonSplits(path, file_is)
    is_glue = path.name in GLUE and path.is_dir()
    return GlueSplits(path) if is_glue and any(path.glob("*.tsv")) else open_splits(data, file_is=file_is)


HELD_OUT_RATIO = 10  # hold out one row in ten …
MAX_HELD_OUT = 2000  # … up to this number of rows
_SEED = 0  # fixed, so that runs with different seeds are evaluated on the same rows


def hold_out(task: Task[Any], table: Table, reason: str) -> tuple[Table, Table, str]:
    """Split a table into rows to train on and rows to evaluate on; return them and a message that starts with `reason`.

    The split is stratified if every row has a label; the only row of a label stays in training.
    """
    labels = _labels(task, table)
    order = shuffled(len(table), _SEED)
    if labels is not None:
        counts = Counter(labels)
        order = np.array([index for index in order if counts[labels[index]] > 1], dtype=np.int64)
        order = order[np.argsort([labels[index] for index in order], kind="stable")]
    if len(order) < 2:
        notice = f"{reason} and there are too few rows to hold any out: the score is measured on the training rows"
        return table, table, notice
    count = min(MAX_HELD_OUT, max(1, len(table) // HELD_OUT_RATIO), len(order) // 2)
    # take every n-th row after sorting by label, which keeps the share of each label
    positions = (np.arange(count) + 0.5) * len(order) / count
    chosen = np.sort(order[positions.astype(np.int64)])
    rest = np.setdiff1d(np.arange(len(table)), chosen)
    how = "at random" if labels is None else "stratified by label"
    rows = "1 row is" if len(chosen) == 1 else f"{len(chosen):,} rows are"
    notice = f"{reason}: {rows} held out of {len(table):,} for evaluation, {how}, and not trained on"
    return table.take(rest.tolist()), table.take(chosen.tolist()), notice


def _labels(task: Task[Any], table: Table) -> list[str] | None:
    """Return the label of every row; None if a row has none or most labels occur once."""
    column = getattr(task, "label", None)
    if not isinstance(column, str) or not hasattr(task, "labels"):
        return None
    values = [row.get(column) for row in table]
    if not all(isinstance(value, str | int) for value in values):
        return None
    names = [str(value) for value in values]
    return names if len(set(names)) <= len(names) // 2 or len(names) < HELD_OUT_RATIO else None


_SAMPLED_ROWS = 1000  # rows from which the type of a column is inferred


def recognise(
    table: Table,
    kind: str | None,
    columns: Sequence[str],
    settings: Mapping[str, Any],
    data: str | None = None,
    *,
    notices: list[str] | None = None,
) -> dict[str, Any]:
    """Return the settings of the task: `settings`, completed from the columns of the table and the name of the data.

    `columns` are of the form role=name, such as label=stars. An ambiguous choice is reported in `notices`.
    """
    kind = kind or settings.get("kind")
    if kind is not None and kind not in TASKS:
        raise InputError(f"--task is {kind!r}; {nearest(kind, TASKS)}")
    named = parse_columns(columns, None if kind is None else TASKS[kind])
    for role, name in named.items():
        if name not in table.columns:
            raise InputError(
                f"--column {role}={name}: {table.name} has no column {name!r}; {nearest(name, table.columns)}"
            )
    sample = sample_row(table)
    # make renamed columns available under the name of their role
    row = {**sample, **{role: sample[name] for role, name in named.items()}}
    kinds = TASKS if kind is None else {kind: TASKS[kind]}
    matches = {name: found for name, task in kinds.items() if (found := task.find_columns(row)) is not None}
    matches = {name: found for name, found in matches.items() if set(named) <= set(column_roles(TASKS[name]))}
    if matches:
        chosen, found = next(iter(matches.items()))
        if len(matches) > 1 and notices is not None:
            others = " or ".join(name for name in matches if name != chosen)
            notices.append(f"the columns match {chosen} and also {others}; using {chosen}: set --task to change it")
        # a column named with --column has only the role it was named for
        inferred = {role: name for role, name in found.items() if role in named or name not in named.values()}
        return {"kind": chosen, **inferred, **glue_settings(data, chosen), **settings, **named}
    if kind is not None:
        # the targets do not match, e.g. numbers stored as text in a .csv file; infer the text columns only
        field = TASKS[kind].model_fields.get("text")  # a task without a default for `text` infers it in resolve()
        infers_text = field is not None and field.default is not None and "text" not in {**settings, **named}
        found = {**(text_columns(row) or {} if infers_text else {}), **glue_settings(data, kind), **settings, **named}
        _check_inputs(table, kind, found)
        return {"kind": kind, **found}
    raise InputError(_unknown_task(table, sample))


def parse_columns(columns: Sequence[str], task: type[Task[Any]] | None = None) -> dict[str, str]:
    """Parse columns of the form role=name; raise InputError for roles that the task (any task, if None) lacks."""
    names: dict[str, str] = {}
    allowed = column_roles(task) if task is not None else [r for kind in TASKS.values() for r in column_roles(kind)]
    where = "any task" if task is None else f"a task of kind {task.model_fields['kind'].default}"
    for text in columns:
        role, equals, name = (part.strip() for part in text.partition("="))
        if not equals or not role or not name:
            raise InputError(f"--column {text!r} is not of the form role=name, such as label=stars")
        if role not in allowed:
            raise InputError(
                f"--column {text!r}: {role!r} is not a column role of {where}; "
                f"{nearest(role, allowed)} (all: {', '.join(dict.fromkeys(allowed))})"
            )
        if role in names:
            raise InputError(f"--column names {role!r} twice, {names[role]!r} and {name!r}; name it once")
        names[role] = name
    return names


def column_roles(task: type[Task[Any]]) -> list[str]:
    """Return the fields of a kind of task that name columns: inputs, then targets."""
    return [*task.roles, *task.target_roles]


def sample_row(table: Table) -> dict[str, Any]:
    """Return a row with one representative value per column, from which its type can be inferred.

    A column with any float is a column of floats. Empty cells are skipped. Strings that all parse as numbers (.csv and
    .tsv have no other type) count as numbers.
    """
    sample: dict[str, Any] = {}
    rows = table.rows[:_SAMPLED_ROWS]
    for column in table.columns:
        values = [row[column] for row in rows if row.get(column) is not None]
        sample[column] = _representative(values) if values else None
    return sample


def _representative(values: Sequence[Any]) -> Any:
    first = next((value for value in values if value not in ("", [], {})), values[0])
    if isinstance(first, str) and all(isinstance(value, str) for value in values):
        numbers = [read_number(value) for value in values]
        if all(number is not None for number in numbers):
            is_whole = all(value.strip().removeprefix("-").isdecimal() for value in values)
            return first if is_whole else numbers[0]
    if isinstance(first, int) and not isinstance(first, bool):
        return next((value for value in values if isinstance(value, float)), first)
    return first


def _check_inputs(table: Table, kind: str, settings: Mapping[str, Any]) -> None:
    """Raise InputError if an input column of a task is missing."""
    for role in TASKS[kind].roles:
        name = settings.get(role, TASKS[kind].model_fields[role].default)
        if isinstance(name, str) and name not in table.columns:
            raise InputError(
                f"{table.name} has no column {name!r} for the {role} of {kind}; its columns are "
                f"{', '.join(table.columns)}: select one with --column {role}=…"
            )


def _unknown_task(table: Table, sample: Mapping[str, Any]) -> str:
    names = [name for name in sample if name not in ROW_NAMES]
    if len(names) == 2 and all(isinstance(sample[name], str) for name in names):
        return (
            f"{table.name} has exactly two text columns, {names[0]} and {names[1]}, which looks like translation; "
            "translation needs a MODEL with a decoder, such as the preset transformer-small. For another task, set its "
            "kind with --task and its columns with --column"
        )
    return (
        f"{table.name} has the columns {', '.join(table.columns)}, which match no kind of task; set the kind with "
        f"--task ({', '.join(TASKS)}) and its columns with --column, such as --column label=stars"
    )


def read_rows(rows: Any, name: str) -> Table:
    """Return rows passed in Python as a table.

    Rows are mappings, tuples (text, label) or (text, text, label), a pandas DataFrame or a datasets.Dataset.
    """
    rows = _plain_rows(rows, name)
    if not rows:
        raise InputError(f"{name} is empty; pass at least one row")
    if all(isinstance(row, Mapping) for row in rows):
        return table_of(rows, name)
    names = {2: ("text", "label"), 3: ("sentence1", "sentence2", "label")}
    for index, row in enumerate(rows):
        if not isinstance(row, tuple | list) or len(row) != len(rows[0]) or len(row) not in names:
            raise InputError(
                f"{name}[{index}] is {row!r}; allowed: mappings, or tuples (text, label) or (text, text, label)"
            )
    return table_of([dict(zip(names[len(row)], row, strict=True)) for row in rows], name)


def _plain_rows(rows: Any, name: str) -> list[Any]:
    """Return the rows of a list, a pandas DataFrame or a datasets.Dataset."""
    if isinstance(rows, str | Mapping):
        raise InputError(
            f"{name} is a {type(rows).__name__}; allowed: a list of rows, a DataFrame or a Dataset "
            "(pass the name of a file or folder as data)"
        )
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        records: list[dict[str, Any]] = rows.to_dict("records")
        return [{str(key): _plain_cell(value) for key, value in row.items()} for row in records]
    if hasattr(rows, "column_names") and hasattr(rows, "features"):
        return named_rows(rows)
    return list(rows)


def _plain_cell(value: Any) -> Any:
    """Convert a cell of a DataFrame to plain Python types; missing values become None."""
    if (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value.tolist() if hasattr(value, "tolist") else value
