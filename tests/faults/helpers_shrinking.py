"""A tiny elastic training, as a function and as a command, for tests that interrupt it."""

import json
import sys
from pathlib import Path
from typing import Any

from helpers_finetuning import ROWS, write_task
from helpers_training import losses

import bertsmith
from bertsmith.models.attach_heads import with_task_head
from bertsmith.tasks.predictor import TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer

SMALL = ["grid.widths=[1.0, 0.5]", "grid.depths=[1.0, 0.5]", "batch.examples=8", "run.epochs=1", "run.log_every=1"]
SMALL += ["run.evaluations=2", "importance.examples=16", "optimizer.learning_rate=1e-3"]
STEPS = 5  # per stage


def write_folders(folder: Path, dropout: float = 0.1) -> tuple[Path, Path]:
    """Write a model with task.json, as after fine-tuning, and its data: 37 training rows, 16 dev rows."""
    data = write_task(folder / "data", train=37)
    tokenizer = learn_tokenizer([text for text, _ in ROWS], "wordpiece", 120, progress=False)
    sizes = {"width": 16, "heads": 2, "layers": 2, "max_length": 32, "init_std": 0.3, "dropout": dropout}
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, **sizes), seed=0)
    model.tokenizer = tokenizer
    record = TaskRecord.parse(
        {"task": {"kind": "classification", "labels": ["bad", "good"]}, "sequences": {"length": 16}}
    )
    head = record.task.head(model.config).changed(dropout=dropout)
    bertsmith.save(with_task_head(model, head, seed=0), folder / "model")
    write_task_record(record, folder / "model")
    return folder / "model", data


def run_shrink(folders: tuple[Path, Path], out: Path, *changes: str, **more: Any) -> dict[str, Any]:
    """Run an elastic training and return its result."""
    model, data = folders
    return bertsmith.shrink(model, data=str(data), out=out, set=[*SMALL, *changes], device="cpu", **more)


def shrink_command(folders: tuple[Path, Path] | None, out: Path, *changes: str) -> list[str]:
    """Return the command line of the same run; without folders, the command that resumes it."""
    arguments = [sys.executable, "-m", "bertsmith", "shrink", "--out", str(out), "--device", "cpu"]
    if folders is None:
        return [*arguments, "--resume"]
    arguments += [str(folders[0]), "--data", str(folders[1])]
    return arguments + [word for change in (*SMALL, *changes) for word in ("--set", change)]


def metrics(path: Path) -> dict[str, Any]:
    """Return a JSON file without values that depend on the machine."""
    plain = json.loads(path.read_text())
    plain["grid"] = [{name: value for name, value in row.items() if name != "latency_ms"} for row in plain["grid"]]
    return {name: value for name, value in plain.items() if name != "seconds"}


def assert_same(out: Path, uninterrupted: Path, stages: tuple[str, ...] = ("width", "depth")) -> None:
    """Assert bitwise equal weights, equal metrics and logs, and no leftover files."""
    for name in ("model.safetensors", "task.json", "config.json"):
        assert (out / name).read_bytes() == (uninterrupted / name).read_bytes(), name
    for name in ("result.json", "elastic.json"):
        assert metrics(out / name) == metrics(uninterrupted / name), name
    for stage in stages:
        assert losses(out / stage) == losses(uninterrupted / stage)
        assert sorted(path.name for path in (out / stage).iterdir()) == ["log.jsonl"]
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in uninterrupted.iterdir())
