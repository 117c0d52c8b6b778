"""Runs of replaced-token detection: resuming, and the written folders."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from choosing import slow_unless
from helpers_training import losses
from safetensors.torch import load_file

import bertsmith
from bertsmith.cli import main
from bertsmith.training.trainer import Trainer

RECIPE = """
[sequences]
length = 32
micro_tokens = 256

[objective]
kind = "replaced_tokens"

[batch]
tokens = 512

[optimizer]
learning_rate = 3e-3

[run]
steps = 20
log_every = 1
evaluate_every = 10
checkpoint_every = 10
evaluate_batches = 2
"""
SIZE = "width=32,layers=2,heads=2,max_length=32,dropout=0.1"
ELECTRA = ("model.preset=electra-small", f"model.overrides={{{SIZE},embedding_width=16}}")


@dataclass(frozen=True)
class Case:
    """Changes of a run to the recipe."""

    changes: tuple[str, ...]
    is_disentangled: bool = False


CASES = {
    "full, one": Case((*ELECTRA, "generator.sharing=full")),
    "full, two, random features": Case(
        (
            "objective.optimizers=two",
            "model.preset=performer-small",
            f"model.overrides={{{SIZE},features=8,redraw_every=3}}",
        )
    ),
    "disentangled, two": Case(
        (
            "generator.sharing=gradient_disentangled",
            "objective.optimizers=two",
            "objective.generator_rate=0.5",
            "model.preset=deberta-v3-small",
            f"model.overrides={{{SIZE},span=8,max_distance=16}}",
        ),
        is_disentangled=True,
    ),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path


def run(recipe: Path, corpus: Path, out: Path, *changes: str) -> dict:
    return bertsmith.pretrain(recipe, data=corpus, out=out, set=list(changes), device="cpu")


@pytest.mark.parametrize("name", slow_unless(("disentangled, two",), CASES))
def test_resumed_run_equals_uninterrupted_run(
    name: str, recipe: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, step = CASES[name], Trainer._step
    straight, resumed = tmp_path / "straight", tmp_path / "run"
    metrics = run(recipe, corpus_folder, straight, *case.changes)

    def until_the_twelfth(self: Trainer, *arguments: object) -> None:
        if self.progress.step == 12:
            raise KeyboardInterrupt
        step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", until_the_twelfth)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, corpus_folder, resumed, *case.changes)
    bertsmith.pretrain(out=resumed, resume=True, device="cpu")
    for file in ("model.safetensors", "optimizer.safetensors"):
        last = [folder / "checkpoints" / "step-00000020" / file for folder in (straight, resumed)]
        assert last[0].read_bytes() == last[1].read_bytes(), file
    assert (straight / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    assert losses(straight) == losses(resumed)

    # including weights and moments of the generator
    moments = load_file(straight / "checkpoints" / "step-00000020" / "optimizer.safetensors")
    assert any(key.startswith("generator.") for key in moments)
    assert metrics["generator_parameters"] > 0
    check_folder(resumed, case)


def check_folder(folder: Path, case: Case) -> None:
    """Check that a run's folder and its checkpoints load as folded models that can be used and trained further."""
    checkpoint = folder / "checkpoints" / "step-00000020"
    tensors = load_file(checkpoint / "model.safetensors")
    model, other = bertsmith.load(folder), bertsmith.load(checkpoint)
    assert model.config == other.config
    assert model.config.encoder.embedding.table == "own"
    expected = tensors["encoder.embedding.token_table"]
    if case.is_disentangled:
        assert expected.abs().max() > 0, "the difference has not moved"
        expected = expected + tensors["generator.encoder.embedding.token_table"]
    for loaded in (model, other):
        assert torch.equal(loaded.encoder.embedding.token_table, expected)
    shares = model.generator.encoder.embedding.token_table is model.encoder.embedding.token_table
    assert shares != case.is_disentangled
    (guesses,) = model.fill_mask("the smith forges an iron [MASK].", top_k=3)
    assert len(guesses) == 3
    assert model.encode(["the smith"]).shape == (1, 32)


def test_corpus_without_held_out_split_gives_a_report(recipe: Path, texts: Path, tmp_path: Path) -> None:
    bertsmith.tokenizer([texts], out=tmp_path / "tokenizer", vocabulary=160)
    bertsmith.corpus([texts], tokenizer=tmp_path / "tokenizer", out=tmp_path / "corpus", held_out=0.0, workers=1)
    size = "model.overrides={width=32,layers=1,heads=2,embedding_width=16,max_length=32}"
    metrics = run(recipe, tmp_path / "corpus", tmp_path / "run", "run.steps=2", "model.preset=electra-small", size)
    assert "held_out" not in metrics
    assert "Generator loss" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_encoder_learns_to_detect_replacements(recipe: Path, corpus_folder: Path, tmp_path: Path) -> None:
    changes = ["run.steps=100", "run.evaluate_every=100", "optimizer.learning_rate=6e-3", "generator.width=1.0"]
    size = "width=32,layers=2,heads=2,embedding_width=32,max_length=32,dropout=0.0,init_std=0.1"
    changes += ["model.preset=electra-small", f"model.overrides={{{size}}}"]
    metrics = run(recipe, corpus_folder, tmp_path / "run", *changes, "run.evaluate_batches=8")
    held_out = metrics["held_out"]
    assert metrics["token_term"] == "generator"
    assert held_out["generator_loss"] < metrics["unigram_level"] - 0.1
    # better than predicting the base rate of replacements
    share = held_out["replaced_share"]
    assert 0.05 < share < 0.16
    assert held_out["replaced_loss"] < -share * math.log(share) - (1 - share) * math.log(1 - share) - 0.005
    assert all(0 <= held_out[f"replaced_{name}"] <= 1 for name in ("accuracy", "recall", "precision"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(rows[0]["generator_loss"] + 50 * rows[0]["replaced_loss"])
    assert "Replaced-token detection" in (tmp_path / "run" / "report.html").read_text()


def test_run_continues_from_a_folder_with_its_generator(recipe: Path, corpus_folder: Path, tmp_path: Path) -> None:
    change = "generator.sharing=gradient_disentangled"
    run(recipe, corpus_folder, tmp_path / "first", *ELECTRA, change, "run.steps=3")
    plain = bertsmith.load(tmp_path / "first")
    further = (f"model.folder={tmp_path / 'first'}", change, "run.steps=1", "optimizer.learning_rate=1e-9")
    run(recipe, corpus_folder, tmp_path / "second", *further)
    model = bertsmith.load(tmp_path / "second")
    assert model.config == plain.config
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_export_writes_encoder_and_generator(
    recipe: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(recipe, corpus_folder, tmp_path / "run", *ELECTRA, "run.steps=1")
    capsys.readouterr()
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "encoder")])
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "generator"), "--part", "generator"])
    assert "heads: masked_tokens" in capsys.readouterr().out
    assert [head.kind for head in bertsmith.load(tmp_path / "encoder").config.heads] == ["replaced_tokens"]
    assert bertsmith.load(tmp_path / "generator").fill_mask("the smith forges [MASK].", top_k=1)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "encoder"), "--out", str(tmp_path / "none"), "--part", "generator"])
    assert "part is 'generator', but this model has none; allowed: 'encoder'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
