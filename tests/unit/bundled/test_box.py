"""The model in the box as it is shipped: its files, what they hold, and that it does what its page says."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.bundled import FOLDERS, NAMES
from bertsmith.checkpoint.files import read_tensors
from bertsmith.models.model import Model
from bertsmith.toml import read_toml
from bertsmith.training.pretraining import PretrainSettings

FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md", "recipe.toml"}
LIMIT = 30_000_000  # bytes
TEXTS = ["A man is playing a guitar.", "Someone plays the guitar.", "The committee rejected the new tax law."]


@pytest.fixture(scope="module")
def folder() -> Path:
    assert "small" in NAMES
    return FOLDERS["small"]


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return bertsmith.load("small")


def test_the_wheel_takes_all_of_it(folder: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]["bertsmith.bundled"]
    for one in FOLDERS.values():
        paths = [path for path in one.rglob("*") if path.is_file()]
        missed = [path for path in paths if not any(fnmatch(f"{one.name}/{path.name}", glob) for glob in globs)]
        assert missed == [path for path in paths if path.parent != one] == []
    assert {path.name for path in folder.iterdir()} == FILES


def test_it_is_small_and_in_half_precision(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LIMIT
    tensors = read_tensors(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_card_and_recipe_are_there(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert all(word in card.lower() for word in ("corpus", "licen", "limits", "seed"))
    settings = PretrainSettings.parse(read_toml(folder / "recipe.toml"), source="recipe.toml")
    # told so that anyone can run it: a corpus is given on the command line
    assert settings.data is None or not Path(settings.data).is_absolute()


def test_tokenizer_generator_and_heads_fit(model: Model) -> None:
    tokenizer = model.require_tokenizer()
    rows = model.config.encoder.vocabulary
    assert tokenizer.size <= rows < tokenizer.size + 128
    assert tokenizer.encode_plain(["Paris"]) == tokenizer.encode_plain(["paris"])
    assert model.generator is not None
    assert model.generator.config.encoder.vocabulary == rows
    assert "masked_tokens" in model.generator.heads
    assert "replaced_tokens" in model.heads
    assert model.config.encoder.embedding.max_length >= 512


def test_texts_become_vectors_that_tell_them_apart(model: Model) -> None:
    vectors = torch.nn.functional.normalize(model.encode(TEXTS))
    assert vectors.shape[0] == 3
    assert vectors.isfinite().all()
    alike = vectors @ vectors.T
    assert alike[0, 1] > max(alike[0, 2], alike[1, 2])


def test_masks_are_filled_with_words(model: Model) -> None:
    (best,) = model.fill_mask("He was born in the [MASK] of 1950.")
    assert len(best) == 5
    assert best[0][1] > 0.02  # weights that learned nothing give every piece alike
    assert not {piece for piece, _ in best} & {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}


def test_loading_changes_no_bit(folder: Path, model: Model, tmp_path: Path) -> None:
    again = bertsmith.load("small")
    assert torch.equal(again.encode(TEXTS), model.encode(TEXTS))
    bertsmith.save(again, tmp_path / "copy", precision="float16")
    kept, copied = (read_tensors(one / "model.safetensors") for one in (folder, tmp_path / "copy"))
    assert kept.keys() == copied.keys()
    assert all(torch.equal(kept[name], copied[name]) for name in kept)


def test_sub_networks_come_out_of_it(model: Model) -> None:
    half = bertsmith.Subnet(width=0.5, depth=0.5)
    small = bertsmith.load("small", subnet=half)
    assert len(small.config.encoder.layers) == len(model.config.encoder.layers) // 2
    torch.testing.assert_close(small.encode(TEXTS), model.encode(TEXTS, subnet=half), rtol=1e-4, atol=1e-5)
