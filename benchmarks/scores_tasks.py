"""Tasks of scores.py: folders, metrics and settings, and one run on a task."""

import functools
import gc
import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError
from bertsmith.text.rows import Table
from bertsmith.text.tables import read_split
from side_by_side import Run

COMMON: dict[str, Any] = {
    "batch.examples": 32,
    "encoder.layer_decay": 0.8,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.clip": 1.0,
    "optimizer.epsilon": 1e-6,
    "optimizer.learning_rate": 3e-4,
    "optimizer.weight_decay": 0.01,
    "run.choose": "last",
    "run.epochs": 3.0,
    "schedule.kind": "linear",
    "schedule.warmup": 0.1,
    "sequences.length": 128,
}
"""ELECTRA-small's fine-tuning (Clark et al. 2020, table 7 and their code), the default of all tasks."""

FRESH: dict[str, Any] = {"encoder.layer_decay": 1.0, "optimizer.learning_rate": 5e-4}
"""Overrides for random weights, whose lowest layers have as much to learn as the highest."""


@dataclass(frozen=True)
class ScoredTask:
    """One column of the table."""

    folder: str
    """Folder below --data."""
    metrics: tuple[str, ...]
    """Metrics in the table; the first one selects the learning rate and enters the mean over tasks."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Overrides of the common settings."""


TASKS = {
    "CoLA": ScoredTask("glue/CoLA", ("matthews",)),
    "SST-2": ScoredTask("glue/SST-2", ("accuracy",)),
    "MRPC": ScoredTask("glue/MRPC", ("f1", "accuracy"), {"task.both_orders": True}),
    "STS-B": ScoredTask("glue/STS-B", ("pearson", "spearman"), {"run.epochs": 10.0, "task.both_orders": True}),
    "RTE": ScoredTask("glue/RTE", ("accuracy",), {"run.epochs": 10.0}),
    "WNLI": ScoredTask("glue/WNLI", ("accuracy",)),
    "SNLI": ScoredTask("pairs/snli", ("accuracy",)),
    "SICK": ScoredTask("pairs/sick", ("accuracy",)),
    "quora": ScoredTask("pairs/quora", ("accuracy", "f1")),
    "BoolQ": ScoredTask("boolq", ("accuracy",), {"sequences.length": 256}),
    "SQuAD": ScoredTask(
        "squad/v1.1", ("f1", "exact"), {"run.epochs": 2.0, "sequences.length": 384, "task.stride": 128}
    ),
}

# no evaluations, checkpoints or detailed logs
LEAN = ["run.evaluations=0", "run.keep=0", "run.log_every=100"]


@functools.cache
def rows_of(folder: str, part: str, rows: int | None) -> Table:
    """Return a split of a task, or a fixed sample of its rows; cached per process."""
    table = read_split(folder, part)
    if rows is None or rows >= len(table):
        return table
    order = list(range(len(table)))
    random.Random(0).shuffle(order)
    return table.take(order[:rows])


def cost_of(folder: str, rows: int | None, epochs: float) -> float:
    """Estimate the duration of a run by the characters it reads."""
    return epochs * sum(len(str(row)) for row in rows_of(folder, "train", rows))


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Format settings by path as --set arguments."""
    return [f"{path}={json.dumps(value)}" for path, value in settings.items()]


def finetuned(run: Run) -> dict[str, Any]:
    """Fine-tune once and return the metrics on dev with the weights of the last step."""
    import torch

    from bertsmith.runs.finetune import IN_MEMORY, complete_settings, read_settings
    from bertsmith.tasks.degenerate import has_constant_answers
    from bertsmith.toml import override
    from bertsmith.training.finetuning import make_finetuning, read_data

    record, paths = run.record, run.paths
    start = fresh_model(paths["model"], record["seed"]) if record["weights"] == "random" else None
    plain: dict[str, Any] = {
        "data": paths["data"],
        "model": paths["model"] if start is None else IN_MEMORY,
    }
    plain = override(plain, [*LEAN, *flags(record["settings"]), f"run.seed={record['seed']}"])
    parts = [rows_of(paths["data"], part, record[f"{part}_rows"]) for part in ("train", "dev")]
    settings, tables = read_settings(plain, None, [], *parts, source="settings")  # type: ignore[arg-type]
    data = read_data(complete_settings(settings, plain, tables, start).settings, *tables)
    device = paths["device"]
    with tempfile.TemporaryDirectory(prefix="scores-") as folder:
        out = Path(folder) / "run"
        out.mkdir()
        made = make_finetuning(data, out, start=start, device=device, show=False)
        made.trainer.evaluator = None  # the evaluation below equals result.json, in float32
        progress = made.trainer.run()
        if not made.trainer.is_finished:
            raise InputError(f"stopped after step {progress.step}: no metrics")
        evaluation, answers = made.evaluate()
    is_degenerate = has_constant_answers(data.settings.task, data.dev, answers)
    metrics = {
        "metrics": {name: round(value, 4) for name, value in evaluation.metrics.items()},
        "is_degenerate": is_degenerate,
        "steps": progress.step,
        "tokens": progress.tokens,
        "training_seconds": round(progress.seconds, 2),
        "device": made.trainer.train_step.device.type,
    }
    made.trainer.close(is_last=False)
    del made
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # for the other processes
    shown = " ".join(f"{name} {metrics['metrics'][name]:.2f}" for name in TASKS[record["task"]].metrics)
    return {**metrics, "message": shown + (", constant prediction" if is_degenerate else "")}


def fresh_model(folder: str, seed: int) -> Any:
    """Return the network of a folder with random weights, and its tokenizer."""
    import bertsmith

    model = bertsmith.load(folder)
    fresh = bertsmith.build(model.config, seed=seed)
    fresh.tokenizer = model.require_tokenizer()
    return fresh
