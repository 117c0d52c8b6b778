"""Runs of encoders that recompute layers in the backward pass: reversible layers and equilibria."""

import json
from pathlib import Path

import pytest

import bertsmith
from bertsmith import InputError
from bertsmith.recipes import FILES
from bertsmith.training.trainer import Trainer

RECIPE = FILES["bert-tiny-cpu"]
SMALL = ["sequences.micro_tokens=256", "batch.tokens=512", "run.evaluate_batches=1", "run.log_every=1"]
SMALL += ["run.steps=5", "run.checkpoint_every=2", "run.evaluate_every=5"]
SIZE = "width=16,layers=2,heads=2,max_length=128,dropout=0.1"
ENCODERS = {
    "reversible": 'placement="pre",reversible=true',
    "equilibrium": "equilibrium={steps=6,backward_steps=6,unrolled_until=2,unrolled_steps=2,jacobian_weight=0.1,"
    "jacobian_share=0.5}",
}


def run(corpus: Path, out: Path, kind: str, *changes: str) -> dict:
    network = ["model.preset=bert-tiny", f"model.overrides={{{SIZE},{ENCODERS[kind]}}}"]
    return bertsmith.pretrain(RECIPE, data=corpus, out=out, set=[*SMALL, *network, *changes], device="cpu")


@pytest.mark.parametrize("kind", ENCODERS)
def test_resumed_run_equals_uninterrupted_run(
    kind: str, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = run(corpus_folder, tmp_path / "straight", kind)
    step = Trainer._step

    def until_the_fourth(self: Trainer, *arguments: object) -> None:
        if self.progress.step == 3:
            raise KeyboardInterrupt
        step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", until_the_fourth)
        with pytest.raises(KeyboardInterrupt):
            run(corpus_folder, tmp_path / "run", kind)
    bertsmith.pretrain(out=tmp_path / "run", resume=True, device="cpu")
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("run", "straight")]
    assert weights[0] == weights[1]
    if kind == "equilibrium":
        rows = [json.loads(line) for line in (tmp_path / "straight" / "log.jsonl").read_text().splitlines()]
        training = [row for row in rows if row["kind"] == "training"]
        assert [row["jacobian_iterations"] for row in training[:2]] == [2, 2]  # unrolled
        assert all(2 < row["jacobian_iterations"] <= 6 for row in training[2:])
        assert all(0 < row["jacobian_residual"] < 0.5 for row in training)
        assert any(row["jacobian_loss"] > 0 for row in training[2:])
        assert metrics["held_out"]["jacobian_loss"] == 0
        assert metrics["held_out"]["jacobian_residual"] > 0


@pytest.mark.parametrize("kind", ENCODERS)
def test_compiled_steps_are_refused(kind: str, corpus_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.compile is 'on' and the encoder is reversible or an equilibrium"):
        run(corpus_folder, tmp_path / "run", kind, "run.compile=on")
