"""What is said of a run by the rows of its log, and that nothing broken is kept."""

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
def from_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FIRST_STEP", 0)


def test_nothing_is_expected_of_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FIRST_STEP", 50)
    row = {"replaced_recall": 0.0, "replaced_share": 0.1, "generator_accuracy": 0.1, "generator_loss": 9.0}
    assert said(HealthMonitor(60, 0, Baseline("generator", lambda: 6.0)), *[row] * 52) == [
        (51, "plateau"),
        (51, "recall"),
    ]


def said(watch: HealthMonitor, *given: dict) -> list[tuple[int, str]]:
    found = []
    for number, row in enumerate(given):
        found += watch.examine({"kind": "training", "step": number + 1, "gradient_norm": 1.0, **row})
    assert all(row["kind"] == "notice" and row["text"] for row in found)
    return [(row["step"], row["name"]) for row in found]


def test_the_plateau_is_said_once_and_its_end_once() -> None:
    asked = []
    baseline = Baseline("masked_tokens", lambda: asked.append(1) or 6.0)
    losses = [9.0] * 20 + [5.8] * 10 + [5.6, 5.9, 3.0, 5.9]
    watch = HealthMonitor(100, 15, baseline)
    assert said(watch, *({"masked_tokens_loss": loss} for loss in losses[:15])) == []
    assert asked == []  # reading the corpus costs time, so not before it is needed
    watch = HealthMonitor(100, 15, baseline)
    assert said(watch, *({"masked_tokens_loss": loss} for loss in losses)) == [(16, "plateau"), (31, "plateau_left")]
    assert said(HealthMonitor(100, 5, baseline), *[{"masked_tokens_loss": 9.0}] * 11) == [(11, "plateau")]
    assert said(HealthMonitor(100, 5, baseline), *[{"masked_tokens_loss": 5.6}] * 50) == []
    assert said(HealthMonitor(100, 5, None), *[{"loss": 9.0}] * 50) == []


def test_an_encoder_that_finds_nothing_is_said() -> None:
    row = {"replaced_recall": 0.001, "replaced_share": 0.08, "generator_accuracy": 0.31}
    watch = HealthMonitor(10, 0, None)
    assert said(watch, *[row] * 4, {**row, "replaced_recall": 0.4}) == [(3, "recall"), (5, "recall_left")]
    text = HealthMonitor(10, 0, None).examine({"kind": "training", "step": 3, "gradient_norm": 1.0, **row})[0]["text"]
    for figure in ("0.1%", "8.0%", "31.0%"):
        assert figure in text


def test_a_gradient_that_explodes_is_said_each_time() -> None:
    norms = [1.0, 50.0] + [1.0] * 10 + [9.0, 11.0, 12.0, 1.0, 30.0]
    assert said(HealthMonitor(10, 0, None), *({"gradient_norm": norm} for norm in norms)) == [
        (14, "gradient"),
        (17, "gradient"),
    ]


def test_rows_of_other_kinds_say_nothing() -> None:
    assert HealthMonitor(10, 0, None).examine({"kind": "held_out", "step": 9, "loss": 9.0}) == []
    assert non_finite_reason({"step": 3, "loss": float("inf"), "gradient_norm": 1.0}) == "the loss is inf after step 3"
    assert (
        non_finite_reason({"step": 3, "loss": 1.0, "gradient_norm": float("nan")})
        == "the gradient norm is nan after step 3"
    )
    assert non_finite_reason({"step": 3, "loss": 1.0}) is None


def broken_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Makes a weight infinite after some optimiser steps, as an overflow would."""
    real, done = TrainStep.learn, []

    def learn(self: TrainStep, *arguments: object) -> None:
        if len(done) == step:
            with torch.no_grad():
                next(self.model.parameters()).fill_(float("inf"))
        done.append(1)
        real(self, *arguments)

    monkeypatch.setattr(TrainStep, "learn", learn)


@pytest.mark.parametrize("log_every", [1, 50])
def test_a_run_that_breaks_stops_and_saves_nothing_broken(
    log_every: int, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows at every step the row tells; with rare ones the checkpoint, which would have come first."""
    broken_after(monkeypatch, 6)
    with pytest.raises(InputError) as caught:
        run(corpus_folder, tmp_path / "run", "run.steps=20", f"run.log_every={log_every}", "run.checkpoint_every=4")
    text = str(caught.value)
    step = 7 if log_every == 1 else 8
    assert text.startswith(f"the loss is nan after step {step} with a learning rate of ")
    assert "; checkpoint step-00000004 is kept; start again with a lower optimizer.learning_rate" in text
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    last = (tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1]
    assert json.loads(last, parse_constant=lambda name: pytest.fail(name))["text"] == text


def test_notices_are_logged_shown_and_kept(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    changes = ["run.steps=12", "run.log_every=2", "run.checkpoint_every=5", "schedule.warmup=0.0"]
    metrics = run(corpus_folder, tmp_path / "run", *changes)
    assert [notice["step"] for notice in metrics["notices"]] == [2]
    assert "unigram level" in metrics["notices"][0]["text"]
    assert "unigram level" in " ".join(capsys.readouterr().err.split())
    # a run that resumes has said it already
    interrupted(monkeypatch, corpus_folder, tmp_path / "resumed", 7, *changes)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "run")
