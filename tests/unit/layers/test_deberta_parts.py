"""Parts of DeBERTa besides its attention: convolution branch, relative table, biases by part, heads."""

import pytest
import torch
from torch.nn.functional import conv1d, gelu, layer_norm

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.block import BranchConfig
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.linear import ElasticLinear, WeightSlice
from bertsmith.layers.positions import RelativeConfig
from bertsmith.models.config import EncoderConfig
from bertsmith.models.heads import PoolerConfig, ReplacedTokensConfig

WIDTH = 6


def randomised(part: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_()
    return part.double().eval()


def layouts(lengths: list[int], max_length: int) -> tuple[SequenceLayout, SequenceLayout]:
    is_token = torch.arange(max_length) < torch.tensor(lengths)[:, None]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return SequenceLayout.padded(is_token), SequenceLayout.packed(starts, max(lengths))


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_branch_convolves_within_each_sequence(kernel_size: int) -> None:
    branch = randomised(BranchConfig(kernel_size=kernel_size, dropout=0.0).build(WIDTH))
    lengths = [4, 1, 7]
    padded, packed = layouts(lengths, 9)
    layer_input, layer_output = (torch.randn(3, 9, WIDTH, dtype=torch.float64) for _ in range(2))
    kernel = branch.weight.unflatten(1, (kernel_size, WIDTH)).transpose(1, 2)
    expected = []
    for row, (x, y) in zip(lengths, zip(layer_input, layer_output, strict=True), strict=True):
        added = conv1d(x[:row].T[None], kernel, branch.bias, padding=kernel_size // 2)[0].T
        expected.append(layer_norm(y[:row] + gelu(added), (WIDTH,), branch.norm.weight, branch.norm.bias, 1e-7))
    rows = branch(layer_input, layer_output, ForwardContext(padded))
    torch.testing.assert_close(rows[padded.is_token], torch.cat(expected), rtol=0, atol=1e-12)
    run = branch(layer_input[padded.is_token], layer_output[padded.is_token], ForwardContext(packed))
    torch.testing.assert_close(run, torch.cat(expected), rtol=0, atol=1e-12)


def test_branch_dropout_precedes_the_activation() -> None:
    """gelu(dropout(x)): outputs are 0 or gelu(2x), never 2·gelu(x)."""
    branch = randomised(BranchConfig(dropout=0.5).build(WIDTH)).train()
    branch.norm = torch.nn.Identity()
    layer_input, context = torch.randn(1, 4, WIDTH, dtype=torch.float64), ForwardContext(SequenceLayout.full(1, 4))
    kernel = branch.weight.unflatten(1, (3, WIDTH)).transpose(1, 2)
    clean = conv1d(layer_input.transpose(1, 2), kernel, branch.bias, padding=1).transpose(1, 2)
    noisy = branch(layer_input, torch.zeros_like(layer_input), context)
    is_kept = noisy != 0
    assert 0 < is_kept.sum() < is_kept.numel()
    torch.testing.assert_close(noisy[is_kept], gelu(2 * clean)[is_kept])


def test_bias_applies_to_biased_parts_only() -> None:
    layer = randomised(ElasticLinear(5, 12, units_out=2, parts=3, bias=(True, False, True)))
    assert layer.bias.shape == (8,)
    hidden = torch.randn(3, 5, dtype=torch.float64)
    whole = torch.nn.functional.linear(hidden, layer.weight)
    whole[:, :4] += layer.bias[:4]
    whole[:, 8:] += layer.bias[4:]
    torch.testing.assert_close(layer(hidden), whole)
    torch.testing.assert_close(layer(hidden, WeightSlice(parts=slice(1, 3))), whole[:, 4:])
    first_units = whole.unflatten(1, (3, 2, 2))[:, :, :1].flatten(1)
    torch.testing.assert_close(layer(hidden, WeightSlice(keep_out=1)), first_units)
    small = layer.extract(keep_out=1)
    assert small.bias.shape == (4,)
    torch.testing.assert_close(small(hidden), first_units)
    layer.reorder(units_out=torch.tensor([1, 0]))
    torch.testing.assert_close(layer(hidden), whole.unflatten(1, (3, 2, 2)).flip(2).flatten(1))


def test_invalid_deberta_settings_raise() -> None:
    with pytest.raises(InputError, match=r"span is 8 and max_distance 5; allowed: .* max_distance of 6 or more"):
        RelativeConfig.parse({"span": 8, "max_distance": 5})
    encoder = bertsmith.preset("deberta-v3-xsmall").encoder.plain()
    del encoder["relative"]
    with pytest.raises(InputError, match="mixer reads relative positions; set relative"):
        EncoderConfig.parse(encoder)
    with pytest.raises(InputError, match="kernel_size is 4; allowed: odd numbers"):
        BranchConfig.parse({"kernel_size": 4})


def test_replaced_tokens_head_adds_the_first_token() -> None:
    head = randomised(ReplacedTokensConfig(adds_first=True).build(WIDTH, WIDTH, 9))
    padded, packed = layouts([4, 1, 6], 7)
    hidden = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    z = layer_norm(hidden + hidden[:, :1], (WIDTH,), head.norm.weight, head.norm.bias, 1e-7)
    expected = (gelu(z @ head.transform.weight.T + head.transform.bias) @ head.score.weight.T + head.score.bias)[..., 0]
    torch.testing.assert_close(head(hidden, padded), expected)
    torch.testing.assert_close(head(hidden[padded.is_token], packed), expected[padded.is_token])
    with pytest.raises(InputError, match="pass it the layout"):
        head(hidden)


def test_pooler_applies_its_activation() -> None:
    pooler = randomised(PoolerConfig(activation="gelu").build(WIDTH, WIDTH, 9))
    first = torch.randn(2, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(pooler(first), gelu(first @ pooler.project.weight.T + pooler.project.bias))
