"""Shared steps of `evaluate` and `predict`: read the task record, load the predictor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.answers.sequences import Answer
from bertsmith.checkpoint.store import read_config
from bertsmith.data.devices import device_type
from bertsmith.data.inference import InferencePrecision
from bertsmith.data.pairs import PairConfig
from bertsmith.engines.artefact import open_runner
from bertsmith.errors import InputError
from bertsmith.files import read_json
from bertsmith.tasks.data_source import parse_columns
from bertsmith.tasks.predictor import Predictor, TaskRecord, has_task_record, read_task_record
from bertsmith.tasks.translation import PairTask, Translation
from bertsmith.text.rows import Table
from bertsmith.text.tables import ROW_NAMES

MAX_PAIR_LENGTH = 512
"""Maximum tokens of a source or target if the model has no task.json."""


def read_task(model: Path, columns: Sequence[str], **search: float | None) -> TaskRecord:
    """Read the task record of a model; `columns` (role=name) and `search` (decoding options) override parts of it.

    A model with a decoder and no task.json gets the default translation task.
    """
    record = read_task_record(model) if has_task_record(model) else _translation_record(model)
    task = record.task
    changes: dict[str, Any] = dict(parse_columns(columns, type(task)))
    options = {name: value for name, value in search.items() if value is not None}
    if isinstance(task, Translation) and changes:
        changes = {"source": None, "target": None, **changes}
    if isinstance(task, PairTask) and isinstance(record.sequences, PairConfig):
        method = task.generation.method if search.get("beam") is None else "beam"
        plain = {**task.generation.plain(), "method": method, **options}
        changes["generation"] = type(task.generation).parse(plain, source="flags")
    elif options:
        flag = next(iter(options)).replace("_", "-")
        raise InputError(
            f"--{flag} is only for models with a decoder, but the model is an encoder for {task.kind}; omit it"
        )
    return record.changed(task=task.changed(**changes))


def _translation_record(model: Path) -> TaskRecord:
    """Return the default task record of an encoder-decoder without task.json."""
    path = model / "config.json"
    config = read_config(model) if path.is_file() and "bertsmith" in read_json(path) else None
    if config is None or config.decoder is None:
        return read_task_record(model)  # raises: the model was not fine-tuned
    length = min(MAX_PAIR_LENGTH, config.encoder.embedding.max_length, config.decoder.embedding.max_length)
    return TaskRecord(task=Translation(), sequences=PairConfig(length=length, micro_tokens=8192))


def open_predictor(model: Path, record: TaskRecord, device: str, precision: InferencePrecision) -> Predictor:
    """Load a model and return its predictor."""
    device_type(device)  # raises InputError if the device is not available
    return Predictor(open_runner(model, device=device), record, precision=precision)


def layers_used(predictor: Predictor) -> tuple[float | None, int | None]:
    """Return the mean number of layers used for the last answers and the total, or (None, None) without early exits."""
    used, config = predictor.mean_layers, predictor.model.config
    return (None, None) if used is None else (used, len((config.decoder or config.encoder).layers))


def name_rows(table: Table, answers: Sequence[Answer]) -> list[Mapping[str, Any]]:
    """Return the answers, each with the identifier column of its row (id, idx …) first, if there is one."""
    return [
        {**{name: row[name] for name in ROW_NAMES if name in row}, **answer}
        for row, answer in zip(table, answers, strict=True)
    ]


def existing_path(data: str | None) -> Path | None:
    """Return the path of the data, or None for a data set on the hub."""
    return Path(data) if data is not None and Path(data).exists() else None
