"""Random features in training: redrawn every few steps, and bitwise equal in a resumed run."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

import bertsmith
from bertsmith.models.model import Model
from bertsmith.recipes import FILES

RECIPE = FILES["bert-tiny-cpu"]
SMALL = ["sequences.micro_tokens=256", "batch.tokens=512", "run.evaluate_batches=2", "run.log_every=1"]
SMALL += ["model.preset=performer-small", "run.steps=18", "run.evaluate_every=18", "run.checkpoint_every=9"]
SMALL += ["model.overrides={width=32,layers=2,heads=2,max_length=128,features=24,redraw_every=3}"]


def matrix(folder: Path, layer: int = 0) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[f"encoder.blocks.{layer}.mixer.projection"]


def losses(out: Path) -> list[str]:
    return [line.split('"seconds"')[0] for line in (out / "log.jsonl").read_text().splitlines()]


def test_resumed_run_redraws_the_same_features(corpus_folder: Path, tmp_path: Path, monkeypatch) -> None:
    moments: list[int] = []
    redraw_features = Model.redraw_features

    def counted(model: Model, step: int, seed: int) -> None:
        moments.append(step)
        redraw_features(model, step, seed)

    monkeypatch.setattr(Model, "redraw_features", counted)
    straight, out = tmp_path / "straight", tmp_path / "resumed"
    bertsmith.pretrain(RECIPE, data=corpus_folder, out=straight, set=SMALL, device="cpu")
    assert moments == list(range(18))  # once per step, although a step has two micro-batches
    assert not torch.equal(matrix(straight / "checkpoints" / "step-00000009"), matrix(straight))
    shutil.copytree(straight, out)
    for name in ("result.json", "model.safetensors"):
        (out / name).unlink()
    shutil.rmtree(out / "checkpoints" / "step-00000018")
    bertsmith.pretrain(out=out, resume=True, device="cpu")
    assert moments[18:] == list(range(9, 18))
    assert losses(out) == losses(straight)
    assert (out / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_averaged_model_has_the_last_features(corpus_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    changes = ["run.steps=6", "run.checkpoint_every=3", "run.average_last=2"]
    bertsmith.pretrain(RECIPE, data=corpus_folder, out=out, set=[*SMALL, *changes], device="cpu")
    first, last = (out / "checkpoints" / f"step-0000000{step}" for step in (3, 6))
    assert not torch.equal(matrix(first), matrix(last))
    assert torch.equal(matrix(out), matrix(last))
    tables = [load_file(folder / "model.safetensors")["encoder.embedding.token_table"] for folder in (first, last, out)]
    torch.testing.assert_close((tables[0] + tables[1]) / 2, tables[2])
