"""Small pre-training runs: precision, trackers, checkpoints, a corpus without a held-out split."""

from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.data.build_corpus import build_corpus
from bertsmith.errors import InputError
from bertsmith.recipes import FILES
from bertsmith.text.tokenizer import Tokenizer

RECIPE = FILES["bert-tiny-cpu"]
SMALL = ["sequences.micro_tokens=256", "batch.tokens=512", "run.evaluate_batches=2", "run.log_every=1"]
SMALL += ["model.overrides={width=32,layers=1,heads=2,max_length=128}"]


def run(corpus: Path, out: Path, *changes: str) -> dict:
    return bertsmith.pretrain(RECIPE, data=corpus, out=out, set=[*SMALL, *changes], device="cpu")


def test_precisions_in_one_process(corpus_folder: Path, tmp_path: Path) -> None:
    full = run(corpus_folder, tmp_path / "full", "run.steps=4")
    half = run(corpus_folder, tmp_path / "half", "run.steps=4", "run.precision=bfloat16")
    assert half["training_loss"] != full["training_loss"]
    assert half["training_loss"] == pytest.approx(full["training_loss"], rel=0.02)
    assert bertsmith.load(tmp_path / "half").encoder.embedding.token_table.dtype.itemsize == 4


def test_loss_falls_below_the_unigram_level(corpus_folder: Path, tmp_path: Path) -> None:
    metrics = run(corpus_folder, tmp_path / "run", "run.steps=100", "optimizer.learning_rate=4e-3")
    assert metrics["held_out"]["masked_tokens_loss"] < metrics["unigram_level"] - 0.1


def test_mask_decoder_is_trained_and_saved(corpus_folder: Path, tmp_path: Path) -> None:
    metrics = run(
        corpus_folder,
        tmp_path / "run",
        "run.steps=60",
        "optimizer.learning_rate=4e-3",
        "model.preset=deberta-base",
        "model.overrides={width=32,layers=2,heads=2,max_length=128,span=64}",
    )
    assert metrics["held_out"]["masked_tokens_loss"] < metrics["unigram_level"]
    model = bertsmith.load(tmp_path / "run")
    assert [head.kind for head in model.config.heads] == ["masked_tokens", "mask_decoder"]
    assert model.config.heads[0].epsilon == 1e-7
    assert len(model.fill_mask("the smith forges an iron [MASK].", top_k=3)[0]) == 3


def test_last_two_and_best_checkpoints_are_kept(corpus_folder: Path, tmp_path: Path) -> None:
    run(corpus_folder, tmp_path / "run", "run.steps=9", "run.checkpoint_every=1", "run.evaluate_every=4")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names[-2:] == ["step-00000008", "step-00000009"]
    assert len(names) <= 3


def test_corpus_without_held_out_split(texts: Path, corpus_folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    build_corpus([texts / "stories.txt"], Tokenizer.load(corpus_folder), corpus, held_out=0.0, workers=1)
    metrics = run(corpus, tmp_path / "run", "run.steps=2")
    assert "held_out" not in metrics
    assert (tmp_path / "run" / "report.html").exists()


def test_trackers_receive_the_log(corpus_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(corpus_folder, tmp_path / "run", "run.steps=2", "run.track=['tensorboard']")
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


def test_deterministic_run_is_recorded_and_restores_the_mode(corpus_folder: Path, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(False)
    plain = run(corpus_folder, tmp_path / "plain", "run.steps=2")
    fixed = run(corpus_folder, tmp_path / "fixed", "run.steps=2", "run.deterministic=true")
    assert not torch.are_deterministic_algorithms_enabled()
    assert fixed["training_loss"] == plain["training_loss"]
    assert "deterministic = true" in (tmp_path / "fixed" / "recipe.toml").read_text()


def test_graphs_need_a_gpu(corpus_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'run.compile is "graphs", which needs a GPU'):
        run(corpus_folder, tmp_path / "run", "run.steps=2", "run.compile=graphs")


@pytest.mark.parametrize("compile", ["on", "whole"])
def test_compiled_run_equals_eager_run(
    compile: str, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.compile
    # aot_eager: the test checks the graphs, not the generated code
    monkeypatch.setattr(torch, "compile", lambda function, **settings: real(function, backend="aot_eager"))
    plain = run(corpus_folder, tmp_path / "plain", "run.steps=3")
    compiled = run(corpus_folder, tmp_path / "compiled", "run.steps=3", f"run.compile={compile}")
    assert compiled["training_loss"] == pytest.approx(plain["training_loss"], rel=1e-4)
