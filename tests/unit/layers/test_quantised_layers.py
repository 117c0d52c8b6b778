"""Rounding against the formulas written out, ranges by width, and the gradient that goes straight through."""

import pytest
import torch
from torch import Tensor, nn

from bertsmith.errors import InputError
from bertsmith.layers.linear import ElasticLinear, WeightSlice
from bertsmith.layers.quantised import QuantisationConfig, QuantisedLinear, Ranges, WeightRounding, fake_quantise


def by_the_formula(values: list[float], threshold: float, bits: int) -> list[float]:
    """q = clamp(round(x · S), -M, M) with S = M / threshold, and what it stands for, q / S."""
    top = 2 ** (bits - 1) - 1
    scale = top / threshold
    return [max(-top, min(top, round(value * scale))) / scale for value in values]


def layer(**options: object) -> ElasticLinear:
    made = ElasticLinear(6, 24, units_out=4, parts=3, **options).double()
    nn.init.normal_(made.weight)
    if made.bias is not None:
        nn.init.normal_(made.bias)
    return made


def quantised_layer(plain: ElasticLinear, **settings: object) -> QuantisedLinear:
    return QuantisedLinear(plain, QuantisationConfig(**settings), 8, rounds_outputs=True).double()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_is_the_formula(bits: int) -> None:
    values = torch.randn(300, dtype=torch.float64)
    expected = by_the_formula(values.tolist(), 1.7, bits)
    found = fake_quantise(values, torch.tensor(1.7, dtype=torch.float64), bits)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14)
    assert len(found.unique()) <= 2**bits - 1


def test_the_gradient_goes_straight_through_inside_and_outside_of_the_range() -> None:
    values = torch.tensor([-3.0, -0.4, 0.0, 0.7, 5.0], requires_grad=True)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    (fake_quantise(values, torch.tensor(1.0), 4) * weights).sum().backward()
    assert torch.equal(values.grad, weights)


@pytest.mark.parametrize(("ranges", "stretches"), [("matrix", 1), ("row", 10), ("group", 3)])
def test_the_ranges_of_weights(ranges: str, stretches: int) -> None:
    rows = torch.randn(10, 4, dtype=torch.float64)
    rounding = WeightRounding(QuantisationConfig(weight_ranges=ranges, groups=3), 4)
    members = [[row for row in range(10) if row * stretches // 10 == stretch] for stretch in range(stretches)]
    for rows_of_it in members:
        largest = rows[rows_of_it].abs().max().item()
        expected = by_the_formula(rows[rows_of_it].flatten().tolist(), largest, 4)
        torch.testing.assert_close(rounding(rows)[rows_of_it].flatten().tolist(), expected, rtol=1e-14, atol=1e-14)


def test_a_layer_is_its_formula() -> None:
    plain = layer(bias=(True, False, True))
    made, decay = quantised_layer(plain, decay=0.9), 0.9
    threshold, outputs = 0.0, [0.0, 0.0, 0.0]
    for batch in range(3):
        hidden = torch.randn(5, 6, dtype=torch.float64) * (batch + 1)
        found = made(hidden)
        largest = hidden.abs().max().item()
        threshold = largest if batch == 0 else decay * threshold + (1 - decay) * largest
        entered = _formula(hidden, threshold)
        weight = _formula(plain.weight.detach(), plain.weight.abs().max().item())
        bias = torch.cat([plain.bias[:8], torch.zeros(8, dtype=torch.float64), plain.bias[8:]])
        parts = (entered @ weight.T + bias).chunk(3, dim=-1)
        for number, part in enumerate(parts):
            own = part.abs().max().item()
            outputs[number] = own if batch == 0 else decay * outputs[number] + (1 - decay) * own
        expected = torch.cat([_formula(part, limit) for part, limit in zip(parts, outputs, strict=True)], dim=-1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert made.entering is not None
    frozen = made.entering.limits.clone()
    made.eval()(hidden * 100)
    assert torch.equal(made.entering.limits, frozen)


def _formula(values: Tensor, threshold: float) -> Tensor:
    found = by_the_formula(values.detach().flatten().tolist(), threshold, 8)
    return torch.tensor(found, dtype=torch.float64).view_as(values)


def test_every_width_has_a_range_of_its_own() -> None:
    made = quantised_layer(layer())
    for kept, size in ((None, 1.0), (2, 10.0)):
        made(torch.full((1, 6), size, dtype=torch.float64), WeightSlice(keep_out=kept))
    assert made.entering is not None
    limits = [made.entering.effective_limits(0, kept).item() for kept in (None, 4, 2, 3)]
    assert limits == [1.0, 1.0, 10.0, 1.0]  # 3 was never seen: the whole layer's
    small = made.extract(keep_out=2)
    assert small.entering is not None
    assert small.entering.effective_limits(0).item() == 10.0
    assert small.entering.limits.shape == (4, 1, 3)


def test_parts_that_are_asked_for_alone_have_ranges_of_their_own() -> None:
    made = quantised_layer(layer())
    made(torch.ones(1, 6, dtype=torch.float64))
    made(torch.full((1, 6), 7.0, dtype=torch.float64), WeightSlice(parts=slice(1, None)))
    assert made.entering is not None
    assert made.leaving is not None
    assert made.entering.limits[:, 0, -1].tolist() == [1.0, 0.0, 7.0, 0.0]
    assert [row.tolist() for row in made.leaving.limits[:, :, -1] > 0] == [
        [True] * 3,
        [False] * 3,
        [False, True, True],
        [False] * 3,
    ]


def test_without_a_range_nothing_is_rounded() -> None:
    ranges, values = Ranges(1, 1, 0, 8, 0.9).eval(), torch.randn(4, 3)
    assert torch.equal(ranges(values), values)
    assert torch.equal(ranges.limits, torch.zeros(1, 1, 1))


def test_ranges_stay_whole_in_half_precision() -> None:
    ranges = Ranges(1, 1, 0, 8, 0.9)
    ranges(torch.tensor([[1.2345678]]))
    before = ranges.limits.clone()
    assert torch.equal(ranges.bfloat16().limits, before)
    assert ranges(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_bits_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="layer_bits has 9; allowed: 2 to 8"):
        QuantisationConfig.parse({"layer_bits": [4, 9]})
