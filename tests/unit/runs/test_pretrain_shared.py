"""Runs of networks with shared weights: resuming, compilation, and adaptive halting."""

import json
from pathlib import Path

import pytest

import bertsmith
from bertsmith.recipes import FILES
from bertsmith.training.trainer import Trainer

RECIPE = FILES["bert-tiny-cpu"]
SMALL = ["sequences.micro_tokens=256", "batch.tokens=512", "run.evaluate_batches=2", "run.log_every=1"]
SMALL += ["run.steps=8", "run.checkpoint_every=3", "run.evaluate_every=4"]
SIZE = "width=32,layers=3,heads=2,max_length=128,dropout=0.1"


def run(corpus: Path, out: Path, name: str, *changes: str) -> dict:
    network = [f"model.preset={name}", f"model.overrides={{{SIZE}}}"]
    return bertsmith.pretrain(RECIPE, data=corpus, out=out, set=[*SMALL, *network, *changes], device="cpu")


@pytest.mark.parametrize("name", ["albert-base", "universal-base"])
def test_resumed_run_equals_uninterrupted_run(
    name: str, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus_folder, tmp_path / "straight", name)
    step = Trainer._step

    def until_the_fifth(self: Trainer, *arguments: object) -> None:
        if self.progress.step == 5:
            raise KeyboardInterrupt
        step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", until_the_fifth)
        with pytest.raises(KeyboardInterrupt):
            run(corpus_folder, tmp_path / "run", name)
    bertsmith.pretrain(out=tmp_path / "run", resume=True, device="cpu")
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("run", "straight")]
    assert weights[0] == weights[1]
    blocks = bertsmith.load(tmp_path / "run").encoder.blocks
    assert blocks[0].mixer is blocks[2].mixer


@pytest.mark.slow
def test_ponder_cost_is_logged_and_falls(corpus_folder: Path, tmp_path: Path) -> None:
    metrics = run(corpus_folder, tmp_path / "run", "universal-base", "run.steps=40", "optimizer.learning_rate=4e-3")
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    costs = [row["ponder_loss"] for row in rows if row["kind"] == "training"]
    # N + R of three steps; the weight of 0.01 is in the loss
    assert all(1 < cost < 4 for cost in costs)
    row = rows[0]
    assert row["loss"] == pytest.approx(row["masked_tokens_loss"] + 0.01 * row["ponder_loss"])
    assert costs[-1] < costs[0]
    assert metrics["held_out"]["ponder_loss"] > 0
    assert 0 <= metrics["held_out"]["ponder_halted_early"] <= 1
    assert "ponder_accuracy" not in metrics["held_out"]


@pytest.mark.slow
def test_compiled_run_equals_eager_run(corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    real = torch.compile
    # aot_eager: the test checks the graphs, not the generated code
    monkeypatch.setattr(torch, "compile", lambda function, **settings: real(function, backend="aot_eager"))
    plain = run(corpus_folder, tmp_path / "plain", "universal-base", "run.steps=2")
    compiled = run(corpus_folder, tmp_path / "compiled", "universal-base", "run.steps=2", "run.compile=on")
    assert compiled["training_loss"] == pytest.approx(plain["training_loss"], rel=1e-3)
