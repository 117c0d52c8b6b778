"""Notices of the health monitor; a run with non-finite values saves no checkpoint of them."""

import json
from pathlib import Path

import pytest
import torch
from helpers_runs import interrupted, rows, run

from bertsmith.errors import InputError
from bertsmith.training import health
from bertsmith.training.health import Baseline, HealthMonitor, non_finite_reason
from bertsmith.training.step import TrainStep


@pytest.fixture(autouse=True)
def check_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FIRST_STEP", 0)


def test_first_steps_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FIRST_STEP", 50)
    row = {"replaced_recall": 0.0, "replaced_share": 0.1, "generator_accuracy": 0.1, "generator_loss": 9.0}
    assert notices(HealthMonitor(60, 0, Baseline("generator", lambda: 6.0)), *[row] * 52) == [
        (51, "plateau"),
        (51, "recall"),
    ]


def notices(monitor: HealthMonitor, *given: dict) -> list[tuple[int, str]]:
    found = []
    for number, row in enumerate(given):
        found += monitor.examine({"kind": "training", "step": number + 1, "gradient_norm": 1.0, **row})
    assert all(row["kind"] == "notice" and row["text"] for row in found)
    return [(row["step"], row["name"]) for row in found]


def test_plateau_and_its_end_are_reported_once() -> None:
    calls = []
    baseline = Baseline("masked_tokens", lambda: calls.append(1) or 6.0)
    losses = [9.0] * 20 + [5.8] * 10 + [5.6, 5.9, 3.0, 5.9]
    monitor = HealthMonitor(100, 15, baseline)
    assert notices(monitor, *({"masked_tokens_loss": loss} for loss in losses[:15])) == []
    assert calls == []  # the level is computed on demand, since it reads the corpus
    monitor = HealthMonitor(100, 15, baseline)
    assert notices(monitor, *({"masked_tokens_loss": loss} for loss in losses)) == [
        (16, "plateau"),
        (31, "plateau_left"),
    ]
    assert notices(HealthMonitor(100, 5, baseline), *[{"masked_tokens_loss": 9.0}] * 11) == [(11, "plateau")]
    assert notices(HealthMonitor(100, 5, baseline), *[{"masked_tokens_loss": 5.6}] * 50) == []
    assert notices(HealthMonitor(100, 5, None), *[{"loss": 9.0}] * 50) == []


def test_low_recall_is_reported() -> None:
    row = {"replaced_recall": 0.001, "replaced_share": 0.08, "generator_accuracy": 0.31}
    monitor = HealthMonitor(10, 0, None)
    assert notices(monitor, *[row] * 4, {**row, "replaced_recall": 0.4}) == [(3, "recall"), (5, "recall_left")]
    text = HealthMonitor(10, 0, None).examine({"kind": "training", "step": 3, "gradient_norm": 1.0, **row})[0]["text"]
    for metric in ("0.1%", "8.0%", "31.0%"):
        assert metric in text


def test_every_gradient_explosion_is_reported() -> None:
    norms = [1.0, 50.0] + [1.0] * 10 + [9.0, 11.0, 12.0, 1.0, 30.0]
    assert notices(HealthMonitor(10, 0, None), *({"gradient_norm": norm} for norm in norms)) == [
        (14, "gradient"),
        (17, "gradient"),
    ]


def test_other_rows_give_no_notice() -> None:
    assert HealthMonitor(10, 0, None).examine({"kind": "held_out", "step": 9, "loss": 9.0}) == []
    assert non_finite_reason({"step": 3, "loss": float("inf"), "gradient_norm": 1.0}) == "the loss is inf after step 3"
    assert (
        non_finite_reason({"step": 3, "loss": 1.0, "gradient_norm": float("nan")})
        == "the gradient norm is nan after step 3"
    )
    assert non_finite_reason({"step": 3, "loss": 1.0}) is None


def break_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make a weight infinite after some optimiser steps, as an overflow would."""
    real, done = TrainStep.learn, []

    def learn(self: TrainStep, *arguments: object) -> None:
        if len(done) == step:
            with torch.no_grad():
                next(self.model.parameters()).fill_(float("inf"))
        done.append(1)
        real(self, *arguments)

    monkeypatch.setattr(TrainStep, "learn", learn)


@pytest.mark.parametrize("log_every", [1, 50])
def test_non_finite_run_stops_without_checkpoint(
    log_every: int, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check runs on every log row, and before every checkpoint."""
    break_after(monkeypatch, 6)
    with pytest.raises(InputError) as caught:
        run(corpus_folder, tmp_path / "run", "run.steps=20", f"run.log_every={log_every}", "run.checkpoint_every=4")
    text = str(caught.value)
    step = 7 if log_every == 1 else 8
    assert text.startswith(f"the loss is nan after step {step} with a learning rate of ")
    assert "; checkpoint step-00000004 is kept; start again with a lower optimizer.learning_rate" in text
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    last = (tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1]
    assert json.loads(last, parse_constant=lambda name: pytest.fail(name))["text"] == text


def test_notices_are_logged_printed_and_stored(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    changes = ["run.steps=12", "run.log_every=2", "run.checkpoint_every=5", "schedule.warmup=0.0"]
    metrics = run(corpus_folder, tmp_path / "run", *changes)
    assert [notice["step"] for notice in metrics["notices"]] == [2]
    assert "unigram level" in metrics["notices"][0]["text"]
    assert "unigram level" in " ".join(capsys.readouterr().err.split())
    # a resumed run does not repeat them
    interrupted(monkeypatch, corpus_folder, tmp_path / "resumed", 7, *changes)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "run")
