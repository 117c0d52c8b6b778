"""Fake quantisation against the formulas, ranges by width, and the straight-through gradient."""

import pytest
import torch
from torch import Tensor, nn

from bertsmith.errors import InputError
from bertsmith.layers.linear import ElasticLinear, WeightSlice
from bertsmith.layers.quantised import QuantisationConfig, QuantisedLinear, Ranges, WeightRounding, fake_quantise


def by_the_formula(values: list[float], threshold: float, bits: int) -> list[float]:
    """Return q / S for q = clamp(round(x · S), -M, M), S = M / threshold."""
    top = 2 ** (bits - 1) - 1
    scale = top / threshold
    return [max(-top, min(top, round(value * scale))) / scale for value in values]


def layer(**options: object) -> ElasticLinear:
    quantised = ElasticLinear(6, 24, units_out=4, parts=3, **options).double()
    nn.init.normal_(quantised.weight)
    if quantised.bias is not None:
        nn.init.normal_(quantised.bias)
    return quantised


def quantised_layer(plain: ElasticLinear, **settings: object) -> QuantisedLinear:
    return QuantisedLinear(plain, QuantisationConfig(**settings), 8, rounds_outputs=True).double()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fake_quantise_matches_the_formula(bits: int) -> None:
    values = torch.randn(300, dtype=torch.float64)
    expected = by_the_formula(values.tolist(), 1.7, bits)
    actual = fake_quantise(values, torch.tensor(1.7, dtype=torch.float64), bits)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14)
    assert len(actual.unique()) <= 2**bits - 1


def test_gradient_is_straight_through_inside_and_outside_the_range() -> None:
    values = torch.tensor([-3.0, -0.4, 0.0, 0.7, 5.0], requires_grad=True)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    (fake_quantise(values, torch.tensor(1.0), 4) * weights).sum().backward()
    assert torch.equal(values.grad, weights)


@pytest.mark.parametrize(("ranges", "groups"), [("matrix", 1), ("row", 10), ("group", 3)])
def test_weight_ranges_by_matrix_row_and_group(ranges: str, groups: int) -> None:
    rows = torch.randn(10, 4, dtype=torch.float64)
    rounding = WeightRounding(QuantisationConfig(weight_ranges=ranges, groups=3), 4)
    members = [[row for row in range(10) if row * groups // 10 == group] for group in range(groups)]
    for members_of_group in members:
        largest = rows[members_of_group].abs().max().item()
        expected = by_the_formula(rows[members_of_group].flatten().tolist(), largest, 4)
        torch.testing.assert_close(
            rounding(rows)[members_of_group].flatten().tolist(), expected, rtol=1e-14, atol=1e-14
        )


def test_quantised_layer_matches_the_formula() -> None:
    plain = layer(bias=(True, False, True))
    quantised, decay = quantised_layer(plain, decay=0.9), 0.9
    threshold, outputs = 0.0, [0.0, 0.0, 0.0]
    for batch in range(3):
        hidden = torch.randn(5, 6, dtype=torch.float64) * (batch + 1)
        actual = quantised(hidden)
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
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert quantised.entering is not None
    frozen = quantised.entering.limits.clone()
    quantised.eval()(hidden * 100)
    assert torch.equal(quantised.entering.limits, frozen)


def _formula(values: Tensor, threshold: float) -> Tensor:
    actual = by_the_formula(values.detach().flatten().tolist(), threshold, 8)
    return torch.tensor(actual, dtype=torch.float64).view_as(values)


def test_every_width_has_its_own_range() -> None:
    quantised = quantised_layer(layer())
    for keep, size in ((None, 1.0), (2, 10.0)):
        quantised(torch.full((1, 6), size, dtype=torch.float64), WeightSlice(keep_out=keep))
    assert quantised.entering is not None
    limits = [quantised.entering.effective_limits(0, keep).item() for keep in (None, 4, 2, 3)]
    assert limits == [1.0, 1.0, 10.0, 1.0]  # 3 was never measured, so it uses the range of the whole layer
    small = quantised.extract(keep_out=2)
    assert small.entering is not None
    assert small.entering.effective_limits(0).item() == 10.0
    assert small.entering.limits.shape == (4, 1, 3)


def test_separately_computed_parts_have_their_own_ranges() -> None:
    quantised = quantised_layer(layer())
    quantised(torch.ones(1, 6, dtype=torch.float64))
    quantised(torch.full((1, 6), 7.0, dtype=torch.float64), WeightSlice(parts=slice(1, None)))
    assert quantised.entering is not None
    assert quantised.leaving is not None
    assert quantised.entering.limits[:, 0, -1].tolist() == [1.0, 0.0, 7.0, 0.0]
    assert [row.tolist() for row in quantised.leaving.limits[:, :, -1] > 0] == [
        [True] * 3,
        [False] * 3,
        [False, True, True],
        [False] * 3,
    ]


def test_values_without_a_range_stay_unchanged() -> None:
    ranges, values = Ranges(1, 1, 0, 8, 0.9).eval(), torch.randn(4, 3)
    assert torch.equal(ranges(values), values)
    assert torch.equal(ranges.limits, torch.zeros(1, 1, 1))


def test_ranges_stay_float32_in_half_precision_models() -> None:
    ranges = Ranges(1, 1, 0, 8, 0.9)
    ranges(torch.tensor([[1.2345678]]))
    before = ranges.limits.clone()
    assert torch.equal(ranges.bfloat16().limits, before)
    assert ranges(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_invalid_bits_raise() -> None:
    with pytest.raises(InputError, match="layer_bits has 9; allowed: 2 to 8"):
        QuantisationConfig.parse({"layer_bits": [4, 9]})
