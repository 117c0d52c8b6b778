"""Position embeddings, norms under autocast, elastic and grouped layers."""

import math

import pytest
import torch

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.elementwise import Norm
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.linear import ElasticLinear, GroupedLinear, WeightSlice
from bertsmith.layers.mixers.kernels import _aligned_product
from bertsmith.layers.positions import SinusoidPositions
from bertsmith.models.build import build, rebuild
from bertsmith.models.published import preset


def test_sinusoids_match_the_formula() -> None:
    table = SinusoidPositions(50, 8).table
    for position in (0, 1, 49):
        for pair in range(4):
            angle = position / 10000 ** (2 * pair / 8)
            assert table[position, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert "table" not in SinusoidPositions(5, 8).state_dict()


def test_norm_output_stays_in_half_precision_under_autocast() -> None:
    norm = Norm(64, 1e-12)
    with torch.no_grad():
        norm.weight.normal_(1, 0.2)
        norm.bias.normal_(0, 0.2)
    hidden = torch.randn(10, 64) * 3 + 1
    exact = norm(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        half = norm(hidden.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() / exact.norm() < 8e-3
    expected = torch.nn.functional.layer_norm(hidden, (64,), norm.weight, norm.bias, 1e-12)
    assert torch.equal(exact, expected)


def test_elastic_linear_with_output_parts() -> None:
    layer = ElasticLinear(6, 24, units_out=4, parts=3)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(24.0)[:, None].expand(24, 6))
        layer.bias.copy_(torch.arange(24.0))
    weight, bias = layer.prefix(None, 2)
    # the first two of four units of two rows, in each of three parts
    assert bias.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]
    assert weight[:, 0].tolist() == bias.tolist()
    layer.reorder(units_out=torch.tensor([3, 0, 1, 2]))
    assert layer.bias.tolist()[:8] == [6, 7, 0, 1, 2, 3, 4, 5]
    full, _ = layer.prefix(None, None)
    assert full.data_ptr() == layer.weight.data_ptr(), "the whole layer must not be copied"
    with pytest.raises(ValueError, match="do not divide"):
        ElasticLinear(6, 10, units_out=4)


def test_elastic_linear_with_input_parts() -> None:
    layer = ElasticLinear(12, 2, units_in=3, parts_in=2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(12.0).expand(2, 12))
        layer.bias.zero_()
    # the first of three units of two columns, in each of two parts
    assert layer.prefix(1, None)[0][0].tolist() == [0, 1, 6, 7]
    layer.reorder(units_in=torch.tensor([2, 0, 1]))
    assert layer.weight[0].tolist() == [4, 5, 0, 1, 2, 3, 10, 11, 6, 7, 8, 9]
    small = layer.extract(keep_in=2)
    assert (small.inputs, small.units_in, small.parts_in) == (8, 2, 2)
    assert small.weight[0].tolist() == [4, 5, 0, 1, 10, 11, 6, 7]
    with pytest.raises(ValueError, match="do not divide"):
        ElasticLinear(9, 2, units_in=3, parts_in=2)


def test_grouped_linear_is_block_diagonal() -> None:
    layer = GroupedLinear(6, 4, groups=2)
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    dense = torch.block_diag(*layer.weight)  # (inputs, outputs)
    hidden = torch.randn(2, 5, 6)
    torch.testing.assert_close(layer(hidden), hidden @ dense + layer.bias)
    # the first two of three inputs and the first of two outputs, in each group
    kept = hidden[..., [0, 1, 3, 4]]
    expected = kept @ dense[[0, 1, 3, 4]][:, [0, 2]] + layer.bias[[0, 2]]
    torch.testing.assert_close(layer(kept, WeightSlice(4, 2)), expected)
    torch.testing.assert_close(layer.extract(keep_in=4, keep_out=2)(kept), expected)
    with pytest.raises(ValueError, match="do not divide into 4 groups"):
        GroupedLinear(6, 4, groups=4)


def test_reordered_neurons_stay_in_their_group() -> None:
    layer = FeedForwardConfig(neurons=6, groups=2).build(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
        layer.expand.bias.copy_(torch.arange(6.0))
    hidden, context = torch.randn(3, 4), ForwardContext(SequenceLayout.full(1, 3))
    before = layer(hidden, context)
    layer.reorder(torch.tensor([5, 2, 0, 3, 1, 4]))
    assert layer.expand.bias.tolist() == [2, 0, 1, 5, 3, 4]
    torch.testing.assert_close(layer(hidden, context), before)


def test_groups_must_divide_width_and_neurons() -> None:
    for config, width, match in (
        (FeedForwardConfig(neurons=6, groups=4), 8, "neurons 6 is not a multiple of groups 4"),
        (FeedForwardConfig(neurons=8, groups=4), 6, "width 6 is not a multiple of groups 4"),
    ):
        with pytest.raises(ValueError, match=match):
            config.check(width)
    assert FeedForwardConfig(neurons=8, groups=4).flops(8) * 4 == FeedForwardConfig(neurons=8).flops(8)


def test_depthwise_kernels_are_initialised_with_std_one_over_kernel_size() -> None:
    model = build(preset("convbert-small", layers=1, vocabulary=100), seed=0)
    mixer = model.encoder.blocks[0].mixer
    assert mixer.span.depthwise.abs().max() <= 2 / 9
    # a normal distribution truncated at two std has 0.88 of its std
    assert mixer.span.depthwise.std().item() == pytest.approx(0.88 / 9, rel=0.03)
    assert mixer.span.pointwise.weight.abs().max() <= 0.04
    again = build(preset("convbert-small", layers=1, vocabulary=100), seed=0)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    free = build(preset("convbert-small", layers=1, vocabulary=100, kernel_from="depthwise"), seed=0)
    assert free.encoder.blocks[0].mixer.kernel.table.weight.std().item() == pytest.approx(0.88 / 9, rel=0.05)


def test_rebuild_keeps_weights_or_raises() -> None:
    model = build(preset("bert-tiny", vocabulary=50), seed=0).double().eval()
    tokens = torch.randint(0, 50, (2, 7))
    layers = tuple(layer.model_copy(update={"dropout": 0.5}) for layer in model.config.encoder.layers)
    config = model.config.model_copy(update={"encoder": model.config.encoder.model_copy(update={"layers": layers})})
    other = rebuild(model, config)
    assert torch.equal(other(tokens), model(tokens))
    assert other.encoder.blocks[0].dropout.rate == 0.5
    with pytest.raises(InputError, match="weights of this model do not fit the config: size mismatch for"):
        rebuild(model, preset("bert-tiny", vocabulary=51))


def test_layout_pads_and_unpads() -> None:
    layout = SequenceLayout.packed(torch.tensor([0, 3, 4, 9, 9], dtype=torch.int32), 5)
    hidden = torch.randn(9, 2)
    rows, padded = layout.pad(hidden)
    assert rows.shape == (4, 5, 2)
    assert padded.is_token.sum(-1).tolist() == [3, 1, 5, 0]
    assert torch.equal(rows[padded.is_token], hidden)
    assert torch.equal(layout.unpad(rows, hidden), hidden)
    assert layout.positions(hidden).tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert layout.sequence_index(hidden).tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert torch.equal(layout.first_tokens(hidden)[:3], hidden[[0, 3, 4]])


@pytest.mark.parametrize("outputs", [18, 24, 1])
def test_aligned_product_equals_the_linear_layer(outputs: int) -> None:
    source, layer = torch.randn(5, 16), torch.nn.Linear(16, outputs)
    expected, actual = layer(source), _aligned_product(source, layer.weight, layer.bias)
    torch.testing.assert_close(actual, expected)
    assert actual.stride(0) % 8 == 0
    gradients = [torch.autograd.grad(out.square().sum(), list(layer.parameters())) for out in (actual, expected)]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(_aligned_product(source, layer.weight, None), source @ layer.weight.T)
