"""pruned.json: which heads and neurons of which model a pruned one has."""

from pathlib import Path

from bertsmith.checkpoint.files import read_json, write_json
from bertsmith.errors import InputError
from bertsmith.settings import Record

PRUNED_FILE = "pruned.json"


class PrunedRecord(Record):
    """The units that stayed, by the numbers they had in the unpruned model."""

    by: str
    """What they were chosen by."""
    scope: str
    metric: str
    teacher_score: float
    """Of the unpruned model, on dev."""
    score: float
    heads_before: tuple[int, ...]
    """How many every layer had."""
    neurons_before: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]
    """The numbers of those that stayed, layer by layer, in the order they stand in now."""
    neurons: tuple[tuple[int, ...], ...]
    head_scores: tuple[tuple[float, ...], ...]
    """What every head was worth before the first cut."""


def write_pruned(record: PrunedRecord, folder: Path) -> None:
    """Puts the record beside a pruned model."""
    write_json(folder / PRUNED_FILE, record.plain())


def read_pruned(folder: Path) -> PrunedRecord:
    """The record of the pruned model in a folder."""
    path = folder / PRUNED_FILE
    if not path.is_file():
        raise InputError(f"{str(folder)!r} has no {PRUNED_FILE}, so its model was not pruned; use bertsmith shrink")
    return PrunedRecord.parse(read_json(path), source=str(path))
