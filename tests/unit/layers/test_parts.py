"""Single parts: positions, norms under autocast, elastic layers."""

import math

import pytest
import torch

from bertsmith.batches.layout import SequenceLayout
from bertsmith.layers.elastic import ElasticLinear
from bertsmith.layers.norm import Norm
from bertsmith.layers.positions import SinusoidPositions


def test_sinusoids_are_the_formula() -> None:
    table = SinusoidPositions(50, 8).table
    for place in (0, 1, 49):
        for pair in range(4):
            angle = place / 10000 ** (2 * pair / 8)
            assert table[place, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[place, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert "table" not in SinusoidPositions(5, 8).state_dict()


def test_norm_keeps_the_stream_in_half_precision() -> None:
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


def test_elastic_parts_and_units() -> None:
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
