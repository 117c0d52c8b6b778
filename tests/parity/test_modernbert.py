"""ModernBERT against `transformers`, in float64: hidden states, losses, gradients, import and export."""

import json
from pathlib import Path

import pytest
import torch
from theirs import VOCABULARY, batch, compare_masked_losses, make, ours, there_and_back
from transformers import ModernBertForMaskedLM, ModernBertModel

import bertsmith
from bertsmith import InputError, SequenceLayout
from bertsmith.models.encoder import EncoderInputs, Want

SETTINGS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
    "local_attention": 6,
    "initializer_range": 0.3,
    **{f"{role}_token_id": 0 for role in ("pad", "bos", "eos", "cls", "sep")},
}
OTHER = {
    "hidden_activation": "silu",
    "norm_eps": 1e-3,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 50.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
    },
}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make their rotary embedding and loss, which are always float32, follow the dtype of the model."""
    rounded = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else rounded(self))


@pytest.mark.parametrize(("lengths", "length"), [([5, 5], 5), ([19, 1, 12], 19), ([3, 7, 7, 2], 8)])
@pytest.mark.parametrize("changes", [{}, OTHER], ids=["as released", "other"])
def test_hidden_states_equal_theirs(changes: dict, lengths: list[int], length: int, tmp_path: Path) -> None:
    theirs = make(ModernBertModel, 0, SETTINGS | changes)
    model, inputs = ours(theirs, tmp_path), batch(lengths, length)
    del inputs["token_type_ids"]
    real = inputs["attention_mask"].bool()
    expected = theirs(**inputs, output_hidden_states=True)
    torch.testing.assert_close(model(**inputs)[real], expected.last_hidden_state[real], rtol=0, atol=1e-10)
    layers = model.encoder.run(
        EncoderInputs(inputs["input_ids"], SequenceLayout.padded(real)), Want(all_hidden_states=True)
    ).hidden_states
    for mine, reference in zip(layers[:-1], expected.hidden_states, strict=False):
        torch.testing.assert_close(mine[real], reference[real], rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, OTHER], ids=["as released", "other"])
def test_losses_and_gradients_equal_theirs(changes: dict, tmp_path: Path) -> None:
    theirs = make(ModernBertForMaskedLM, 2, SETTINGS | changes)
    compare_masked_losses(ours(theirs, tmp_path), theirs, batch([19, 1, 12], 19))


@pytest.mark.parametrize("kind", [ModernBertModel, ModernBertForMaskedLM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("changes", [{}, OTHER], ids=["as released", "other"])
def test_weights_survive_import_and_export(kind: type, changes: dict, dtype: torch.dtype, tmp_path: Path) -> None:
    there_and_back(make(kind, 5, SETTINGS | changes), dtype, tmp_path)


def test_exported_preset_is_their_model(tmp_path: Path) -> None:
    size = {"width": 24, "layers": 4, "heads": 2, "neurons": 30, "vocabulary": VOCABULARY, "window": 3}
    model = bertsmith.build(bertsmith.preset("modern-small", **size), seed=0).double().eval()
    bertsmith.export(model, tmp_path / "hf")
    theirs = ModernBertForMaskedLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    ids = torch.randint(0, VOCABULARY, (2, 12))
    scores = model.head("masked_tokens")(model(ids), model.token_table)
    torch.testing.assert_close(scores, theirs(ids).logits, rtol=0, atol=1e-10)


def test_old_config_keys_are_read(tmp_path: Path) -> None:
    theirs = make(ModernBertModel, 0, SETTINGS)
    expected = ours(theirs, tmp_path).config
    data = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_types", "rope_parameters"):
        del data[name]
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(data | old))
    assert bertsmith.load(tmp_path).config == expected
    (tmp_path / "config.json").write_text(json.dumps(data | {"global_attn_every_n_layers": 2}))
    assert bertsmith.load(tmp_path).config.encoder.layers[2].mixer.window is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_bias": True}, "norm_bias is True; allowed: False"),
        ({"mlp_dropout": 0.1}, r"mlp_dropout is 0\.1; allowed: 0\.0"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*; allowed: 4 times 'full_attention' or"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type is 'yarn'; allowed: 'default'"),
    ],
)
def test_unsupported_config_raises(change: dict, message: str, tmp_path: Path) -> None:
    make(ModernBertModel, 0, SETTINGS).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | change))
    with pytest.raises(InputError, match=message):
        bertsmith.load(tmp_path)
