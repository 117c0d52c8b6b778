"""ConvBERT against `transformers`, in float64, on tiny random models: hidden states, losses, gradients, weights."""

from pathlib import Path

import pytest
import torch
from theirs import TINY as COMMON
from theirs import assert_gradients_equal, batch, compare_masked_losses, make, ours, there_and_back
from transformers import ConvBertForMaskedLM, ConvBertModel

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.models.build import rebuild
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model

TINY = {**COMMON, "embedding_size": 24, "pad_token_id": 0}
VARIANTS = {
    "plain": {},
    "groups": {"num_groups": 2},
    "narrow embedding": {"embedding_size": 12},
    "groups, narrow embedding, 3 taps": {"num_groups": 2, "embedding_size": 12, "conv_kernel_size": 3},
    "13 taps": {"conv_kernel_size": 13},
    "ratio 4": {"num_attention_heads": 8, "head_ratio": 4, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "ratio 1": {"head_ratio": 1},
    "fewer heads than the ratio": {"num_attention_heads": 1},
}
EQUAL = [([5, 5], 5), ([11, 11, 11], 11), ([1], 1)]
PADDED = [([5, 2], 5), ([9, 1, 4], 11)]
every_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=list(VARIANTS))


def with_padding_leak(model: Model) -> Model:
    """Let the model's convolutions read padding, as the reference does."""
    encoder = model.config.encoder
    mixer = encoder.layers[0].mixer.model_copy(update={"legacy_padding": True})
    layers = tuple(layer.model_copy(update={"mixer": mixer}) for layer in encoder.layers)
    config = model.config.model_copy(update={"encoder": encoder.model_copy(update={"layers": layers})})
    return rebuild(model, config)


def layer_states(model: Model, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    layout = SequenceLayout.padded(inputs["attention_mask"].bool())
    return model.encoder.run(
        EncoderInputs(inputs["input_ids"], layout, inputs["token_type_ids"]), Want(all_hidden_states=True)
    ).hidden_states


@every_variant
@pytest.mark.parametrize(("lengths", "length"), [*EQUAL, *PADDED])
def test_hidden_states_and_gradients_equal_theirs(
    changes: dict, lengths: list[int], length: int, tmp_path: Path
) -> None:
    theirs = make(ConvBertModel, 0, TINY | changes)
    model = ours(theirs, tmp_path)
    if min(lengths) < length:
        model = with_padding_leak(model)
    inputs = batch(lengths, length, filled=True)
    expected = theirs(**inputs, output_hidden_states=True)
    for mine, reference in zip(layer_states(model, inputs), expected.hidden_states, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-10)
    weights = torch.randn_like(expected.last_hidden_state)
    (expected.last_hidden_state * weights).sum().backward()
    (model(**inputs) * weights).sum().backward()
    assert_gradients_equal(model, theirs)


@every_variant
def test_masked_token_loss_and_gradients_equal_theirs(changes: dict, tmp_path: Path) -> None:
    theirs = make(ConvBertForMaskedLM, 1, TINY | changes)
    compare_masked_losses(ours(theirs, tmp_path), theirs, batch([7, 7], 7))


def test_imported_model_ignores_padding(tmp_path: Path) -> None:
    theirs = make(ConvBertModel, 2, TINY)
    model, inputs = ours(theirs, tmp_path), batch([9, 4], 9, filled=True)
    alone = theirs(**{name: tensor[1:, :4] for name, tensor in inputs.items()}).last_hidden_state
    torch.testing.assert_close(model(**inputs)[1:, :4], alone, rtol=0, atol=1e-10)
    assert (theirs(**inputs).last_hidden_state[1:, :4] - alone).abs().max() > 0.1
    assert (with_padding_leak(model)(**inputs)[1:, :4] - alone).abs().max() > 0.1


@every_variant
@pytest.mark.parametrize("kind", [ConvBertModel, ConvBertForMaskedLM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_survive_import_and_export(changes: dict, kind: type, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = make(kind, 3, TINY | changes)
    back = there_and_back(theirs, dtype, tmp_path)
    assert back.config.pad_token_id == 0
    inputs = batch([6, 6], 6)
    torch.testing.assert_close(back(**inputs)[0], theirs(**inputs)[0], rtol=0, atol=1e-5)


def test_discriminator_survives_export_and_import(tmp_path: Path) -> None:
    sizes = {"width": 24, "layers": 2, "heads": 4, "vocabulary": 67, "max_length": 20, "embedding_width": 12}
    model = bertsmith.build(bertsmith.preset("convbert-medium-small", **sizes), seed=0).eval()
    bertsmith.export(model, tmp_path / "hf")
    back = bertsmith.load(tmp_path / "hf")
    inputs = batch([6, 3], 6, filled=True)
    for one, other in zip(model.parameters(), back.parameters(), strict=True):
        assert torch.equal(one, other)
    scores = [m.head("replaced_tokens")(m(**inputs)) for m in (model, back)]
    assert torch.equal(*scores)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("convbert-small-generator", {}, "its heads do not fill its width"),
        ("convbert-small", {"ratio": 4}, "its heads do not fill its width"),
        ("convbert-small", {"kernel_from": "token"}, "kernel_from is 'token' and would be read back as 'span'"),
        ("convbert-small", {"kernel_from": "none"}, "kernel_from is 'none' and would be read back as 'span'"),
    ],
)
def test_model_without_counterpart_is_not_exported(name: str, changes: dict, reason: str, tmp_path: Path) -> None:
    model = bertsmith.build(bertsmith.preset(name, layers=1, vocabulary=67, **changes))
    with pytest.raises(InputError, match=reason):
        bertsmith.export(model, tmp_path / "hf", native="always")


def test_even_kernel_size_raises(tmp_path: Path) -> None:
    theirs = make(ConvBertModel, 4, TINY | {"conv_kernel_size": 8})
    with pytest.raises(InputError, match="kernel_size is 8; allowed: odd numbers"):
        ours(theirs, tmp_path)
