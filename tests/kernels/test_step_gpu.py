"""Training steps on a GPU: recorded passes equal eager ones, dropout differs between steps, nothing synchronises."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_gpu import no_synchronisation
from torch import Tensor

from bertsmith.data.nested import tensors
from bertsmith.training.graphs import Graphed, RecordingError
from bertsmith.training.pretraining import PretrainSettings, make_trainer
from bertsmith.training.trainer import Trainer

pytestmark = pytest.mark.gpu
SIZE = {"width": 128, "layers": 2, "heads": 2, "max_length": 128, "dropout": 0.1}
MASKED = {"kind": "masked_lm"}
REPLACED = {"kind": "replaced_tokens"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert-base", MASKED),
    "bert word masks": ("bert-base", {"kind": "masked_lm", "masking": {"unit": "word"}}),
    "bert n-gram windows": ("bert-base", {"kind": "masked_lm", "masking": {"unit": "ngram", "draw": "windows"}}),
    "bert with_replacement": ("bert-base", {"kind": "masked_lm", "masking": {"draw": "with_replacement"}}),
    "bert causal": ("bert-base", {"kind": "causal_lm"}),
    "bert both": ("bert-base", {"kind": "masked_and_causal"}),
    "electra": ("electra-base", REPLACED),
    "convbert": ("convbert-base", REPLACED),
    "deberta-v3": ("deberta-v3-base", REPLACED),
    "deberta": ("deberta-base", MASKED),
    "performer": ("performer-base", MASKED),
    "modern": ("modern-base", MASKED),
}


def trainer_of(name: str, corpus: Path, out: Path, *, dropout: float = 0.1, **run: Any) -> Trainer:
    preset, objective = RUNS[name]
    out.mkdir()
    data = {
        "data": str(corpus),
        "model": {"preset": preset, "overrides": {**SIZE, "dropout": dropout}},
        "objective": objective,
        "sequences": {"length": 64, "micro_tokens": 2048},
        "batch": {"tokens": 4096},
        "optimizer": {"epsilon": 1e-3},  # with a small one, weights whose gradient is 0 up to rounding move randomly
        "run": {"steps": 6, "log_every": 6, "keep": 0, "evaluate_every": 10**6, **run},
    }
    return make_trainer(PretrainSettings.parse(data), out, device="cuda", show=False)


def weights_after(trainer: Trainer) -> list[Tensor]:
    trainer.run()
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.close(is_last=False)
    return weights


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_no_step_synchronises(
    name: str, compile: str, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilation changes nothing about synchronisation and takes minutes, so graphs record eager layers here."""
    monkeypatch.setattr("bertsmith.training.step.compile_layers", lambda model: None)
    trainer = trainer_of(name, corpus_folder, tmp_path / "run", compile=compile, steps=20)
    feed, meter = trainer.feed(), trainer.meter()
    for step in range(4):  # chooses kernels and records graphs
        trainer.rehearse(step, feed, meter)
    with no_synchronisation():
        for step in range(4, 8):
            trainer.rehearse(step, feed, meter)
    assert torch.isfinite(meter.gradient_norm)
    if compile == "graphs":
        assert trainer.train_step._recorded_pass is not None
        assert len(trainer.train_step._recorded_pass.recordings) == 1
    trainer.close(is_last=False)


@pytest.mark.parametrize("name", ["bert", "electra", "convbert", "deberta-v3", "performer"])
def test_recorded_run_equals_eager_run(
    name: str, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout: a replay draws the numbers of the eager pass; with two micro-batches: replays add gradients."""
    monkeypatch.setattr("bertsmith.training.step.compile_layers", lambda model: None)
    # "on" without compiled layers is eager, but has the shapes of graphs
    runs = {
        mode: trainer_of(name, corpus_folder, tmp_path / mode, compile=mode, precision="float32")
        for mode in ("on", "graphs")
    }
    eager, recorded = (weights_after(trainer) for trainer in runs.values())
    for one, other in zip(eager, recorded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)


def test_recorded_run_with_compiled_layers_learns_as_eager_run(corpus_folder: Path, tmp_path: Path) -> None:
    losses = {}
    for mode in ("off", "graphs"):
        trainer = trainer_of("bert", corpus_folder, tmp_path / mode, dropout=0.0, compile=mode, steps=12)
        trainer.run()
        losses[mode] = trainer.log.of_kind("training")[-1]["loss"]
        trainer.close(is_last=False)
    assert losses["graphs"] == pytest.approx(losses["off"], rel=2e-3)


def test_replays_draw_dropout_from_the_seed() -> None:
    dropout = Graphed(lambda values: torch.dropout(values, 0.5, train=True))
    ones = torch.ones(4096, device="cuda")

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return dropout(ones).clone()

    eager = [draw(seed) for seed in (1, 2)]
    replayed = [draw(seed) for seed in (1, 2, 1)]
    assert len(dropout.recordings) == 1
    assert all(torch.equal(*pair) for pair in zip(eager, replayed[:2], strict=True))
    assert torch.equal(replayed[0], replayed[2])
    assert not torch.equal(replayed[0], replayed[1])
    torch.manual_seed(1)
    first, second = dropout(ones).clone(), dropout(ones).clone()  # the generator advances
    assert torch.equal(first, replayed[0])
    assert not torch.equal(first, second)


def test_failed_recording_leaves_dropout_working() -> None:
    """A function that synchronises cannot be recorded; afterwards eager dropout and other recordings work."""

    def reads(values: Tensor) -> Tensor:
        dropped = torch.dropout(values, 0.5, train=True)
        return dropped * float(dropped.sum())

    graphed, ones = Graphed(reads), torch.ones(1024, device="cuda")
    stream = torch.cuda.current_stream()
    for _ in range(2):
        graphed(ones)
    torch.manual_seed(0)
    expected = torch.dropout(ones, 0.5, train=True)
    torch.manual_seed(0)
    with pytest.raises(RecordingError):
        graphed(ones)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.dropout(ones, 0.5, train=True), expected)
    other = Graphed(lambda values: torch.dropout(values, 0.5, train=True))
    for _ in range(4):
        torch.manual_seed(0)
        assert torch.equal(other(ones), expected)


def test_automatic_run_continues_after_a_failed_recording(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertsmith.training.step.compile_layers", lambda model: None)
    trainer = trainer_of("bert", corpus_folder, tmp_path / "run", compile="auto", steps=1000)
    assert trainer.train_step.mode == "graphs"
    forward = trainer.train_step._forward_backward

    def reads(part: Any, totals: dict[str, Tensor]) -> Any:
        sums = forward(part, totals)
        float(next(iter(sums.values())).loss)
        return sums

    trainer.train_step._recorded_pass = Graphed(reads)
    feed, meter = trainer.feed(), trainer.meter()
    for step in range(4):
        trainer.rehearse(step, feed, meter)
    assert torch.isfinite(meter.gradient_norm)
    assert trainer.train_step.mode == "on"
    choice, fall_back = trainer.train_step.notices
    assert '("graphs")' in choice
    assert '("on"), because "graphs" failed' in fall_back
    trainer.close(is_last=False)


def test_resumed_run_equals_uninterrupted_run(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertsmith.training.step.compile_layers", lambda model: None)
    whole = weights_after(trainer_of("bert", corpus_folder, tmp_path / "whole", compile="graphs", keep=1))
    trainer = trainer_of("bert", corpus_folder, tmp_path / "resumed", compile="graphs", keep=1, checkpoint_every=3)
    feed, meter = trainer.feed(), trainer.meter()
    for step in range(3):
        trainer.rehearse(step, feed, meter)
    trainer.save()
    trainer.close(is_last=False)
    again = PretrainSettings.parse(trainer.settings or {})  # the same settings
    resumed = make_trainer(again, tmp_path / "resumed", device="cuda", show=False, resume=True)
    resumed.run(resume=True)
    for one, other in zip(whole, resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    resumed.close(is_last=False)


def test_batch_and_its_recorded_form_have_the_same_padding(corpus_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of("electra", corpus_folder, tmp_path / "run", compile="graphs")
    data = trainer.data.phases[0]
    objective, prepare = trainer.train_step.objective, trainer.train_step.prepare
    for number, plan in zip(range(5), data.plan.one_epoch(), strict=False):
        batch = data.reader[plan].batch
        # the third call and later ones are replays
        recorded, eager = prepare(batch, 7), objective.prepare(batch.to("cuda"), 7)
        for one, other in zip(tensors(recorded), tensors(eager), strict=True):
            assert torch.equal(one, other), number
    assert trainer.train_step._recorded_prepare is not None
    assert len(trainer.train_step._recorded_prepare.recordings) == 1
    trainer.close(is_last=False)
