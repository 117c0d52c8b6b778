"""The bundled model: its files and their content, embeddings, mask filling and sub-networks."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.bundled import FOLDERS, NAMES
from bertsmith.checkpoint.files import read_tensors
from bertsmith.models.build import rebuild
from bertsmith.models.heads import MaskDecoderConfig
from bertsmith.models.model import Model
from bertsmith.toml import read_toml
from bertsmith.training.pretraining import PretrainSettings

FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md", "recipe.toml"}
FILES |= {"seal.json"}
MAX_BYTES = 30_000_000
TEXTS = ["A man is playing a guitar.", "Someone plays the guitar.", "The committee rejected the new tax law."]


@pytest.fixture(scope="module")
def folder() -> Path:
    assert "small" in NAMES
    return FOLDERS["small"]


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return bertsmith.load("small")


def test_package_data_includes_all_files(folder: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]["bertsmith.bundled"]
    for bundled in FOLDERS.values():
        paths = [path for path in bundled.rglob("*") if path.is_file()]
        missed = [path for path in paths if not any(fnmatch(f"{bundled.name}/{path.name}", glob) for glob in globs)]
        assert missed == [path for path in paths if path.parent != bundled] == []
    assert {path.name for path in folder.iterdir()} == FILES


def test_weights_are_small_and_in_half_precision(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    tensors = read_tensors(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_model_card_and_recipe_exist(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert all(word in card.lower() for word in ("corpus", "teacher", "licen", "limitations", "seed"))
    settings = PretrainSettings.parse(read_toml(folder / "recipe.toml"), source="recipe.toml")
    # the recipe must run on any machine: --data gives the corpus
    assert settings.data is None or not Path(settings.data).is_absolute()


def test_tokenizer_generator_and_heads_are_consistent(model: Model) -> None:
    tokenizer = model.require_tokenizer()
    rows = model.config.encoder.vocabulary
    assert tokenizer.size <= rows < tokenizer.size + 128
    assert tokenizer.encode_plain(["Paris"]) == tokenizer.encode_plain(["paris"])
    assert model.generator is not None
    assert model.generator.config.encoder.vocabulary == rows
    assert "masked_tokens" in model.generator.heads
    assert "replaced_tokens" in model.heads
    assert model.config.encoder.embedding.max_length >= 512


def test_similar_texts_have_similar_embeddings(model: Model) -> None:
    vectors = torch.nn.functional.normalize(model.encode(TEXTS))
    assert vectors.shape[0] == 3
    assert vectors.isfinite().all()
    similarity = vectors @ vectors.T
    assert similarity[0, 1] > max(similarity[0, 2], similarity[1, 2])


def test_masks_are_filled_with_words(model: Model) -> None:
    (best,) = model.fill_mask("He was born in the [MASK] of 1950.")
    assert len(best) == 5
    assert best[0][1] > 0.02  # untrained weights give all tokens similar probabilities
    assert not {token for token, _ in best} & {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}


def test_mask_decoder_runs_as_it_was_trained(model: Model) -> None:
    """The generator was trained with keys and values that are not normalised; the norm raises its loss."""
    generator = model.generator
    assert generator is not None
    (decoder,) = (head for head in generator.config.heads if isinstance(head, MaskDecoderConfig))
    assert not decoder.normalises_memory
    assert generator.config.encoder.layers[-1].norm.placement == "pre"
    (best,) = model.fill_mask("The capital of France is [MASK].")
    heads = tuple(
        head.changed(normalises_memory=True) if head.kind == "mask_decoder" else head for head in generator.config.heads
    )
    changed = rebuild(generator, generator.config.changed(heads=heads)).eval()
    changed.tokenizer = model.tokenizer
    (other,) = changed.fill_mask("The capital of France is [MASK].")
    assert [probability for _, probability in best] != pytest.approx([probability for _, probability in other], rel=0.1)


def test_loading_and_saving_is_bit_exact(folder: Path, model: Model, tmp_path: Path) -> None:
    again = bertsmith.load("small")
    assert torch.equal(again.encode(TEXTS), model.encode(TEXTS))
    bertsmith.save(again, tmp_path / "copy", precision="float16")
    original, copied = (read_tensors(path / "model.safetensors") for path in (folder, tmp_path / "copy"))
    assert original.keys() == copied.keys()
    assert all(torch.equal(original[name], copied[name]) for name in original)


def test_sub_network_can_be_extracted(model: Model) -> None:
    half = bertsmith.Subnet(width=0.5, depth=0.5)
    small = bertsmith.load("small", subnet=half)
    assert len(small.config.encoder.layers) == len(model.config.encoder.layers) // 2
    torch.testing.assert_close(small.encode(TEXTS), model.encode(TEXTS, subnet=half), rtol=1e-4, atol=1e-5)
