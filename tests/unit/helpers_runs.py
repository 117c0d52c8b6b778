"""Run, interrupt and compare small pre-trainings in this process."""

import json
from pathlib import Path

import pytest

import bertsmith
from bertsmith.recipes import FILES
from bertsmith.training.trainer import Trainer

RECIPE = FILES["bert-tiny-cpu"]
SMALL = ["sequences.micro_tokens=256", "sequences.length=32", "batch.tokens=512", "run.evaluate_batches=2"]
SMALL += ["model.overrides={width=16,layers=1,heads=2,max_length=64,dropout=0.1}"]
TIMES = ("seconds", "tokens_per_second", "data_wait")


def run(corpus: Path, out: Path, *changes: str, **more: object) -> dict:
    return bertsmith.pretrain(RECIPE, data=corpus, out=out, set=[*SMALL, *changes], device="cpu", **more)


def interrupted(monkeypatch: pytest.MonkeyPatch, corpus: Path, out: Path, at: int, *changes: str) -> None:
    """Interrupt a run before step `at`, without saving, and resume it."""
    real = Trainer._step

    def step_or_interrupt(self: Trainer, *arguments: object) -> None:
        if self.progress.step == at:
            raise KeyboardInterrupt
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step_or_interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(corpus, out, *changes)
    bertsmith.pretrain(out=out, resume=True, device="cpu")


def rows(out: Path, after: int = 0) -> list[dict]:
    """Read the log without timings; with `after`, only later steps, without notices, which are logged once per run."""
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [
        {name: row[name] for name in row if name not in TIMES}
        for row in log
        if row["step"] > after and not (after and row["kind"] == "notice")
    ]


def assert_same(one: Path, other: Path, after: int = 0) -> None:
    assert rows(one, after) == rows(other, after)
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
