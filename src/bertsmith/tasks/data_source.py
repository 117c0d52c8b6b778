"""The parts of what --data names, the official files of GLUE and SQuAD among them."""

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
from bertsmith.text.rows import Table, read_number, table_of
from bertsmith.text.table_files import squad_table
from bertsmith.text.tables import ROW_NAMES, SPLIT_NAMES, Splits, folder_splits, open_splits


class Tables(NamedTuple):
    """The rows to train on and to evaluate on."""

    train: Table
    dev: Table
    notices: tuple[str, ...] = ()
    """Sentences about them."""


class GlueSplits(Splits):
    """An official folder of GLUE."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, split: str) -> Table | None:
        file = official_file(self.folder, split)
        return None if file is None else read_glue(file, self.folder.name)

    def missing(self, split: str) -> InputError:
        there = sorted(path.stem for path in self.folder.glob("*.tsv"))
        return InputError(f"--data {str(self.folder)!r} has no {split}.tsv; {nearest(split, there)}")


class SquadSplits(Splits):
    """SQuAD's own files, such as train-v1.1.json: those of a folder, or one of them."""

    def __init__(self, path: Path, file_is: str) -> None:
        self.path, self.file_is = path, file_is

    def find(self, split: str) -> Table | None:
        if self.path.is_file():
            return squad_table(self.path) if split == self.file_is else None
        names = SPLIT_NAMES.get(split, (split,))
        found = sorted(file for name in names for file in self.path.glob(f"{name}*.json"))
        if len(found) > 1:
            listed = " and ".join(file.name for file in found)
            raise InputError(f"--data {str(self.path)!r} has {listed} for one part; keep one of them")
        return squad_table(found[0]) if found else None

    def missing(self, split: str) -> InputError:
        return InputError(f"--data {str(self.path)!r} has no {split} part, such as {split}-v1.1.json")


def task_splits(data: str | Path, *, file_is: str = "train") -> Splits:
    """The parts of what --data names; a single file is the part `file_is`."""
    path = Path(data)
    is_json = path.suffix.lower() == ".json" and path.is_file()
    if is_json or (path.is_dir() and not folder_splits(path) and any(path.glob("*.json"))):
        return SquadSplits(path, file_is)
    is_glue = path.name in GLUE and path.is_dir()
    return GlueSplits(path) if is_glue and any(path.glob("*.tsv")) else open_splits(data, file_is=file_is)


SHARE = 10  # one row in so many
MOST = 2000
_SEED = 0  # the same rows whatever the seed of the run, so that runs can be compared


def held_out(task: Task[Any], table: Table, why: str) -> tuple[Table, Table, str]:
    """The rows that are trained on, those held out, and a sentence about it that begins with why.

    Labels keep their shares where every row has one; the only row of a label stays in training.
    """
    labels = _labels(task, table)
    order = shuffled(len(table), _SEED)
    if labels is not None:
        counts = Counter(labels)
        order = np.array([index for index in order if counts[labels[index]] > 1], dtype=np.int64)
        order = order[np.argsort([labels[index] for index in order], kind="stable")]
    count = min(MOST, max(1, len(table) // SHARE))
    if len(order) < 2:
        sentence = f"{why} and too few rows to hold any out: the score is that of the training rows themselves"
        return table, table, sentence
    # of rows in the order of their labels every so-manieth: each label gives its share
    positions = (np.arange(min(count, len(order) // 2)) + 0.5) * len(order) / min(count, len(order) // 2)
    chosen = np.sort(order[positions.astype(np.int64)])
    rest = np.setdiff1d(np.arange(len(table)), chosen)
    how = "at random" if labels is None else "with each label's share"
    rows = "1 row is" if len(chosen) == 1 else f"{len(chosen):,} rows are"
    sentence = f"{why}: {rows} held out of {len(table):,}, {how}, and not trained on"
    return table.take(rest.tolist()), table.take(chosen.tolist()), sentence


def _labels(task: Task[Any], table: Table) -> list[str] | None:
    """The label of every row, if each has one and they repeat."""
    column = getattr(task, "label", None)
    if not isinstance(column, str) or not hasattr(task, "labels"):
        return None
    values = [row.get(column) for row in table]
    if not all(isinstance(value, str | int) for value in values):
        return None
    names = [str(value) for value in values]
    return names if len(set(names)) <= len(names) // 2 or len(names) < SHARE else None


_LOOKED_AT = 1000  # rows that a kind of task is found out from


def recognise(
    table: Table,
    kind: str | None,
    columns: Sequence[str],
    given: Mapping[str, Any],
    data: str | None = None,
    *,
    notices: list[str] | None = None,
) -> dict[str, Any]:
    """The settings of the task: what was given, then what the rows and the name of the data show.

    `columns` are of the form role=name, such as label=stars. What a person should know of the choice goes to `notices`.
    """
    kind = kind or given.get("kind")
    if kind is not None and kind not in TASKS:
        raise InputError(f"--task is {kind!r}; {nearest(kind, TASKS)}")
    named = named_columns(columns, None if kind is None else TASKS[kind])
    for role, name in named.items():
        if name not in table.columns:
            raise InputError(
                f"--column {role}={name}: {table.name} has no column {name!r}; {nearest(name, table.columns)}"
            )
    sample = sample_row(table)
    # a column of another name is looked at under the name of its role
    row = {**sample, **{role: sample[name] for role, name in named.items()}}
    kinds = TASKS if kind is None else {kind: TASKS[kind]}
    fitting = {name: found for name, task in kinds.items() if (found := task.find_columns(row)) is not None}
    fitting = {name: found for name, found in fitting.items() if set(named) <= set(roles_of(TASKS[name]))}
    if fitting:
        chosen, found = next(iter(fitting.items()))
        if len(fitting) > 1 and notices is not None:
            others = " or ".join(name for name in fitting if name != chosen)
            notices.append(f"the columns fit {chosen} and also {others}; {chosen} is taken: --task names another")
        # a column that was named for one part plays no other
        kept = {role: name for role, name in found.items() if role in named or name not in named.values()}
        return {"kind": chosen, **kept, **glue_settings(data, chosen), **given, **named}
    if kind is not None:
        # what is right may be written in another way than usual, such as numbers in a .csv file; texts are as ever
        field = TASKS[kind].model_fields.get("text")  # without a default the task looks for it itself
        is_usual = field is not None and field.default is not None and "text" not in {**given, **named}
        found = {**(text_columns(row) or {} if is_usual else {}), **glue_settings(data, kind), **given, **named}
        _check_inputs(table, kind, found)
        return {"kind": kind, **found}
    raise InputError(_unknown(table, sample))


def named_columns(columns: Sequence[str], task: type[Task[Any]] | None = None) -> dict[str, str]:
    """Columns by role, from texts of the form role=name; roles that the task (any, if None) has not are refused."""
    found: dict[str, str] = {}
    allowed = roles_of(task) if task is not None else [role for kind in TASKS.values() for role in roles_of(kind)]
    where = "any task" if task is None else f"a task of kind {task.model_fields['kind'].default}"
    for text in columns:
        role, equals, name = (split.strip() for split in text.partition("="))
        if not equals or not role or not name:
            raise InputError(f"--column {text!r} is not of the form role=name, such as label=stars")
        if role not in allowed:
            raise InputError(
                f"--column {text!r}: {role!r} is no part a column plays in {where}; "
                f"{nearest(role, allowed)} (all: {', '.join(dict.fromkeys(allowed))})"
            )
        if role in found:
            raise InputError(f"--column names {role!r} twice, {found[role]!r} and {name!r}; name it once")
        found[role] = name
    return found


def roles_of(task: type[Task[Any]]) -> list[str]:
    """The fields of a kind of task that name columns: those it reads, then those with what is right."""
    return [*task.roles, *task.target_roles]


def sample_row(table: Table) -> dict[str, Any]:
    """One row that stands for many: in each column a value that shows its kind.

    A column with any number that is not whole is one of such numbers; where the first rows have nothing, a later one
    counts. Texts that all read as numbers (.csv and .tsv know no others) are taken as numbers.
    """
    sample: dict[str, Any] = {}
    rows = table.rows[:_LOOKED_AT]
    for column in table.columns:
        values = [row[column] for row in rows if row.get(column) is not None]
        sample[column] = _typical(values) if values else None
    return sample


def _typical(values: Sequence[Any]) -> Any:
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
    """Says which column a kind of task lacks that it was told to be."""
    for role in TASKS[kind].roles:
        name = settings.get(role, TASKS[kind].model_fields[role].default)
        if isinstance(name, str) and name not in table.columns:
            raise InputError(
                f"{table.name} has no column {name!r} for the {role} of {kind}; its columns are "
                f"{', '.join(table.columns)}: name one with --column {role}=…"
            )


def _unknown(table: Table, sample: Mapping[str, Any]) -> str:
    said = [name for name in sample if name not in ROW_NAMES]
    if len(said) == 2 and all(isinstance(sample[name], str) for name in said):
        return (
            f"{table.name} has two columns of texts, {said[0]} and {said[1]}, and nothing else, as a translation has; "
            "that needs a MODEL with a decoder, such as the preset transformer-small: for another task name its "
            "kind with --task and its columns with --column"
        )
    return (
        f"{table.name} has the columns {', '.join(table.columns)}, which no kind of task is known by; name one with "
        f"--task ({', '.join(TASKS)}) and its columns with --column, such as --column label=stars"
    )


def read_rows(rows: Any, name: str) -> Table:
    """Rows given in Python as a table: mappings; tuples of one text or two and a label; a pandas or datasets table."""
    rows = _plain_rows(rows, name)
    if not rows:
        raise InputError(f"{name} is empty; give at least one row")
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
    """The rows of a list, of a pandas DataFrame or of a datasets.Dataset."""
    if isinstance(rows, str | Mapping):
        raise InputError(
            f"{name} is a {type(rows).__name__}; allowed: a list of rows, a DataFrame or a Dataset "
            "(of a file or a folder give the name as data)"
        )
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        records: list[dict[str, Any]] = rows.to_dict("records")
        return [{str(key): _plain_cell(value) for key, value in row.items()} for row in records]
    if hasattr(rows, "column_names") and hasattr(rows, "features"):
        return named_rows(rows)
    return list(rows)


def _plain_cell(value: Any) -> Any:
    """A cell of a DataFrame without pandas' and numpy's own types: lists, and None where it has nothing."""
    if (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value.tolist() if hasattr(value, "tolist") else value
