"""Small runs with next-token objectives: loss, resuming and the written model."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.recipes import FILES
from bertsmith.toml import to_toml

RECIPE = FILES["bert-tiny-cpu"]
SMALL = ["sequences.length=32", "sequences.micro_tokens=256", "batch.tokens=512", "run.evaluate_batches=2"]
SMALL += ["run.log_every=1", "optimizer.learning_rate=4e-3", "run.checkpoint_every=10", "run.evaluate_every=10"]
WIDTHS = "width=32,heads=2,max_length=32"
BERT = [f"model.overrides={{{WIDTHS},layers=1,dropout=0.1}}"]
DEBERTA = ["model.preset=deberta-v2-xlarge", f"model.overrides={{{WIDTHS},layers=2,span=16,max_distance=30}}"]
CAUSAL, JOINT = 'objective={kind="causal_lm"}', 'objective={kind="masked_and_causal",causal_weight=0.5}'


def run(corpus: Path, out: Path, *changes: str) -> dict:
    return bertsmith.pretrain(RECIPE, data=corpus, out=out, set=[*SMALL, *changes], device="cpu")


def rows(out: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


def is_causal(model: Model) -> bool:
    tokens = torch.randint(5, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    before, changed = model.eval()(tokens), tokens.clone()
    changed[0, 6:] = 7
    return torch.allclose(model(changed)[:, :6], before[:, :6], atol=1e-6)


@pytest.mark.slow
def test_causal_bert_is_trained_and_saved(corpus_folder: Path, tmp_path: Path) -> None:
    metrics = run(corpus_folder, tmp_path / "run", "run.steps=60", CAUSAL, *BERT)
    assert metrics["token_term"] == "next_token"
    assert metrics["held_out"]["next_token_loss"] < metrics["unigram_level"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "next tokens accuracy" in page
    assert "masked tokens" not in page.replace("masked_tokens", "")
    model = bertsmith.load(tmp_path / "run")
    assert model.config.family == "bert"
    assert [layer.mixer.is_causal for layer in model.config.encoder.layers] == [True]
    assert [head.kind for head in model.config.heads] == ["masked_tokens"]
    assert is_causal(model)
    # continued, and from the folder of a bidirectional model
    changes = ["run.steps=1", CAUSAL, f'model={{folder="{tmp_path / "run"}"}}']
    more = run(corpus_folder, tmp_path / "more", *changes)
    assert more["training_loss"] < rows(tmp_path / "run", "training")[0]["loss"] - 1
    run(corpus_folder, tmp_path / "masked", "run.steps=1", *BERT)
    run(corpus_folder, tmp_path / "turned", "run.steps=1", CAUSAL, f'model={{folder="{tmp_path / "masked"}"}}')
    assert not is_causal(bertsmith.load(tmp_path / "masked"))
    assert is_causal(bertsmith.load(tmp_path / "turned"))


@pytest.mark.slow
def test_masked_and_causal_deberta_learns_both_and_resumes(corpus_folder: Path, tmp_path: Path) -> None:
    straight, out = tmp_path / "straight", tmp_path / "resumed"
    metrics = run(corpus_folder, straight, "run.steps=20", JOINT, *DEBERTA)
    held_out = rows(straight, "held_out")
    for term in ("masked_tokens", "next_token"):
        assert held_out[-1][f"{term}_loss"] < held_out[0][f"{term}_loss"] < 5.0
    assert held_out[-1]["loss"] == pytest.approx(
        held_out[-1]["masked_tokens_loss"] + 0.5 * held_out[-1]["next_token_loss"]
    )
    assert metrics["token_term"] == "masked_tokens"
    model = bertsmith.load(straight)
    assert not is_causal(model)
    assert {head.kind for head in model.config.heads} == {"masked_tokens", "mask_decoder"}
    assert len(model.fill_mask("the smith forges an iron [MASK].", top_k=3)[0]) == 3

    shutil.copytree(straight, out)
    for name in ("result.json", "model.safetensors"):
        (out / name).unlink()
    shutil.rmtree(out / "checkpoints" / "step-00000020")
    bertsmith.pretrain(out=out, resume=True, device="cpu")
    for kind in ("training", "held_out"):
        losses = [[(row["step"], row["loss"]) for row in rows(folder, kind)] for folder in (out, straight)]
        assert losses[0] == losses[1]
    assert (out / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_network_that_cannot_be_causal_raises_before_writing(corpus_folder: Path, tmp_path: Path) -> None:
    network = bertsmith.preset("bert-tiny", width=32, layers=1, heads=2, max_length=32)
    network = network.changed(heads=bertsmith.preset("deberta-base").heads)
    settings = {"model": {"network": network.plain()}, "sequences": {"length": 32}}
    recipe = tmp_path / "recipe.toml"
    for kind in ("causal_lm", "masked_and_causal"):
        recipe.write_text(to_toml({**settings, "objective": {"kind": kind}}))
        for more in ({"explain": True}, {"data": corpus_folder, "out": tmp_path / "run"}):
            with pytest.raises(InputError, match="a causal mask_decoder needs a last mixer that reads the positions"):
                bertsmith.pretrain(recipe, **more)
    assert not (tmp_path / "run").exists()


def test_explain_counts_both_passes(capsys: pytest.CaptureFixture[str]) -> None:
    def explain(*changes: str) -> dict:
        return bertsmith.pretrain(RECIPE, set=list(changes), explain=True)

    joint, causal, masked = (
        explain(JOINT),
        explain(CAUSAL),
        explain('objective={kind="masked_lm",masking={rate=0.15}}'),
    )
    flops = [float(found["training FLOPs per token"]) for found in (joint, causal, masked)]
    assert flops[0] == pytest.approx(flops[1] + flops[2], rel=1e-3)
    capsys.readouterr()
