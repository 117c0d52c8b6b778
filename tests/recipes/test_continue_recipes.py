"""Recipes that continue from a folder take two steps from a tiny one: transformers' or, with a generator, our own."""

import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*torch.jit.script")  # raised by third-party code at import
    from transformers import AutoModel, BertConfig, BertForMaskedLM, DebertaV2Config, DebertaV2ForMaskedLM

import bertsmith
from bertsmith.cli import main
from bertsmith.models.generator import attach, generator_of
from bertsmith.recipes import RECIPE_FILES
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.toml import read_toml

RECIPES = [path for path in sorted((RECIPE_FILES).glob("*.toml")) if "folder" in read_toml(path).get("model", {})]
SMALL = ["sequences.length=64", "sequences.micro_tokens=256", "batch.tokens=512", "run.steps=2"]
SMALL += ["run.evaluate_batches=1", "run.workers=0", "run.log_every=1"]
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DEBERTA = {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
DEBERTA |= {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0}


@pytest.fixture(scope="module")
def folders(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home, tokenizer = tmp_path_factory.mktemp("folders"), Tokenizer.load(corpus_folder)
    size = {"vocab_size": tokenizer.size, **TINY}
    BertForMaskedLM(BertConfig(**size)).save_pretrained(home / "bert")
    DebertaV2ForMaskedLM(DebertaV2Config(**size, **DEBERTA)).save_pretrained(home / "deberta")
    for name in ("bert", "deberta"):
        tokenizer.save(home / name)
    config = bertsmith.preset("convbert-small", vocabulary=tokenizer.size, width=32, layers=2, heads=4, max_length=64)
    small = attach(bertsmith.build(config, seed=0), bertsmith.build(generator_of(config, width=0.5), seed=1), "full")
    small.tokenizer = tokenizer
    bertsmith.save(small, home / "small")
    return {f"continue-{name}": home / name.removesuffix("-v3") for name in ("bert", "deberta-v3", "small")}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_takes_two_steps(
    path: Path, folders: dict[str, Path], corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    changes = [*SMALL, f"model.folder={folders[path.stem]}"]
    if "generator" in read_toml(path):
        changes.append("generator.overrides={width=32,layers=1,heads=2,span=16}")
    flags = [word for change in changes for word in ("--set", change)]
    main(["pretrain", str(path), "--explain", *flags])
    assert "parameters" in capsys.readouterr().out
    metrics = bertsmith.pretrain(path, data=corpus_folder, out=tmp_path / "run", set=changes, device="cpu")
    assert metrics["steps"] == 2
    # the recipe beside the result reproduces the run
    again = bertsmith.pretrain(tmp_path / "run" / "recipe.toml", out=tmp_path / "again", device="cpu")
    assert again["training_loss"] == metrics["training_loss"]
    bertsmith.export(bertsmith.load(tmp_path / "run"), tmp_path / "hf")
    assert AutoModel.from_pretrained(tmp_path / "hf").config.vocab_size == Tokenizer.load(corpus_folder).size


def test_both_stages_of_the_bundled_model_take_two_steps(corpus_folder: Path, tmp_path: Path) -> None:
    sizes = [f"model.overrides.{size}" for size in ("layers=2", "width=48", "heads=4", "neurons=32")]
    first = bertsmith.pretrain(
        "small/masked", data=corpus_folder, out=tmp_path / "masked", set=[*SMALL, *sizes], device="cpu"
    )
    start = f"model.folder={tmp_path / 'masked'}"
    changes = [*SMALL, start, "phases=[{begin=0.5,length=128}]"]
    second = bertsmith.pretrain("small/replaced", data=corpus_folder, out=tmp_path / "small", set=changes, device="cpu")
    assert first["steps"] == second["steps"] == 2
    model = bertsmith.load(tmp_path / "small")
    assert model.config.encoder.embedding.types == 0  # [SEP] alone separates segments
    assert len(model.fill_mask("the [MASK] forges")[0]) == 5
    remark = bertsmith.export(model, tmp_path / "native", part="encoder")
    assert type(AutoModel.from_pretrained(tmp_path / "native")).__name__ == "ModernBertModel", remark
