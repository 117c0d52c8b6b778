"""Fine-tuning a folder or a preset with sparse attention weights: the override, its record, and what is refused."""

from pathlib import Path

import pytest
import torch
from helpers_finetune import SMALL, write_task

import bertsmith
from bertsmith.checkpoint.hf.writing import native_export
from bertsmith.checkpoint.source import ModelSource
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.mixers.sparse import SparseConfig
from bertsmith.models.build import build, rebuild
from bertsmith.models.convert import with_sparse_attention
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.toml import read_toml


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


@pytest.fixture(scope="module")
def folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned model with softmax attention."""
    out = tmp_path_factory.mktemp("run") / "dense"
    bertsmith.finetune("bert-tiny", data=data, out=out, set=SMALL, device="cpu")
    return out


def tuned(folder: Path, data: Path, out: Path, *changes: str) -> Model:
    settings = [setting for setting in SMALL[1:] if not setting.startswith("tokenizer.")]
    bertsmith.finetune(folder, data=data, out=out, set=[*settings, *changes], device="cpu")
    return bertsmith.load(out)


def attention_map(model: Model) -> torch.Tensor:
    tokens = torch.randint(5, 100, (4, 12), generator=torch.Generator().manual_seed(0))
    output = model.eval().run(EncoderInputs(tokens, SequenceLayout.full(4, 12)), Want(maps=True))
    return output.maps[0]["attention"]


def test_folder_is_fine_tuned_with_sparse_weights(folder: Path, data: Path, tmp_path: Path) -> None:
    model = tuned(folder, data, tmp_path / "run", 'model.overrides.sparse={kind="sparsemax",sparsity=0.9}')
    assert model.config.encoder.layers[0].mixer.sparse == SparseConfig(sparsity=0.9)
    assert read_toml(tmp_path / "run" / "recipe.toml")["model"]["overrides"] == {
        "sparse": {"kind": "sparsemax", "sparsity": 0.9}
    }
    weights = attention_map(model)
    assert (weights == 0).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 2, 12))


def test_learned_alpha_is_trained_and_saved(folder: Path, data: Path, tmp_path: Path) -> None:
    model = tuned(folder, data, tmp_path / "run", "model.overrides.sparse=entmax", "optimizer.learning_rate=1e-2")
    logits = model.encoder.blocks[0].mixer.sparse.alpha_logits
    assert logits.shape == (2,)
    assert (logits != 0).all()
    # resumed with its own config, the α stays
    again = ModelSource(folder=str(tmp_path / "run")).load()
    torch.testing.assert_close(again.encoder.blocks[0].mixer.sparse.alpha_logits, logits)


def test_preset_takes_sparse_weights() -> None:
    source = ModelSource.parse({"preset": "deberta-v3-xsmall", "overrides": {"layers": 2, "sparse": "entmax15"}})
    config = source.config(500)
    assert {layer.mixer.sparse for layer in config.encoder.layers} == {SparseConfig(kind="entmax15")}


def test_rebuild_keeps_all_other_weights() -> None:
    model = build(preset("convbert-small", width=16, heads=4, layers=2, vocabulary=50, embedding_width=8), seed=0)
    learned = rebuild(model, with_sparse_attention(model.config, SparseConfig(kind="entmax")))
    added = learned.state_dict().keys() - model.state_dict().keys()
    assert added == {f"encoder.blocks.{layer}.mixer.sparse.alpha_logits" for layer in range(2)}
    assert all((learned.state_dict()[name] == 0).all() for name in added)
    back = rebuild(learned, with_sparse_attention(learned.config, None))
    assert back.config == model.config
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_native_hugging_face_export_is_refused() -> None:
    config = preset("bert-tiny", vocabulary=50, layers=1)
    model = build(with_sparse_attention(config, SparseConfig()), seed=0)
    with pytest.raises(InputError, match=r"mixer\.sparse is given and would be read back as None"):
        native_export(model)


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        ({"kind": "sparsmax"}, "kind is 'sparsmax': input should be 'sparsemax', 'entmax15' or 'entmax'"),
        ({"sparsity": 1.0}, "sparsity"),
        ({"kind": "entmax15", "sparsity": 0.5}, "sparsity is 0.5 with kind 'entmax15'; allowed: with kind 'sparsemax'"),
        ({"alpha": 1.2}, "alpha is 1.2 with kind 'sparsemax'; allowed: with kind 'entmax'"),
        ({"kind": "entmax", "alpha": 1.0}, "alpha"),
        (3, "overrides.sparse is 3; allowed: a name such as 'sparsemax', or a table"),
    ],
)
def test_wrong_settings_raise(sparse: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelSource.parse({"preset": "bert-tiny", "overrides": {"sparse": sparse}})


def test_models_without_softmax_attention_refuse() -> None:
    source = ModelSource.parse({"preset": "dynamicconv-base", "overrides": {"sparse": "sparsemax"}})
    with pytest.raises(InputError, match="sparse is given, but the mixers are of kind dynamic_conv; allowed: full"):
        source.config(50)
