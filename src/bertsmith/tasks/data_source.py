"""The parts of what --data names, the official files of GLUE and SQuAD among them."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.data.random import shuffled
from bertsmith.errors import InputError, nearest
from bertsmith.tasks.base import Task
from bertsmith.tasks.glue import GLUE, official_file, read_glue
from bertsmith.text.rows import Table
from bertsmith.text.table_files import squad_table
from bertsmith.text.tables import SPLIT_NAMES, Splits, folder_splits, open_splits


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

    def find(self, part: str) -> Table | None:
        file = official_file(self.folder, part)
        return None if file is None else read_glue(file, self.folder.name)

    def missing(self, part: str) -> InputError:
        there = sorted(path.stem for path in self.folder.glob("*.tsv"))
        return InputError(f"--data {str(self.folder)!r} has no {part}.tsv; {nearest(part, there)}")


class SquadSplits(Splits):
    """SQuAD's own files, such as train-v1.1.json: those of a folder, or one of them."""

    def __init__(self, path: Path, file_is: str) -> None:
        self.path, self.file_is = path, file_is

    def find(self, part: str) -> Table | None:
        if self.path.is_file():
            return squad_table(self.path) if part == self.file_is else None
        names = SPLIT_NAMES.get(part, (part,))
        found = sorted(file for name in names for file in self.path.glob(f"{name}*.json"))
        if len(found) > 1:
            listed = " and ".join(file.name for file in found)
            raise InputError(f"--data {str(self.path)!r} has {listed} for one part; keep one of them")
        return squad_table(found[0]) if found else None

    def missing(self, part: str) -> InputError:
        return InputError(f"--data {str(self.path)!r} has no {part} part, such as {part}-v1.1.json")


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
    places = (np.arange(min(count, len(order) // 2)) + 0.5) * len(order) / min(count, len(order) // 2)
    chosen = np.sort(order[places.astype(np.int64)])
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
