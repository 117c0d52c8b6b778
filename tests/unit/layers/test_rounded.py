"""Affine rounding, norms and softmax whose parts are rounded, and the values that count for their ranges."""

import pytest
import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import Norm
from bertsmith.layers.quantised import QuantisationConfig, Ranges, WeightRounding, fake_quantise
from bertsmith.layers.rounded import RoundedEmbedding, RoundedNorm, RoundedSoftmax
from bertsmith.ops.attention import attention, attention_map

CONFIG = QuantisationConfig(places="all", form="affine", clamps_gradient=True, decay=0.9, weight_ranges="row")


def affine(values: Tensor, low: float, high: float, bits: int) -> Tensor:
    step = (high - low) / (2**bits - 1)
    return torch.tensor(
        [round((max(low, min(high, value)) - low) / step) * step + low for value in values.flatten().tolist()],
        dtype=values.dtype,
    ).view_as(values)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("bits", [2, 6, 8])
def test_affine_rounding_matches_the_formula(bits: int) -> None:
    values = torch.randn(300, dtype=torch.float64)
    found = fake_quantise(values, scalar(1.1), bits, scalar(-0.6))
    torch.testing.assert_close(found, affine(values, -0.6, 1.1, bits), rtol=0, atol=1e-14)
    assert len(found.unique()) <= 2**bits
    assert fake_quantise(scalar(7.0), scalar(2.0), bits, scalar(2.0)) == 7.0  # an empty range


def test_affine_rounding_from_zero_keeps_zero_exactly() -> None:
    values = torch.cat([torch.zeros(3), torch.rand(50)])
    assert torch.equal(fake_quantise(values, torch.tensor(0.777), 6, torch.tensor(0.0))[:3], torch.zeros(3))
    ranges = Ranges.of(CONFIG, is_positive=True)
    ranges(values[None] + 0.2)
    assert ranges.limits.item() == pytest.approx(values.max().item() + 0.2)
    assert ranges.lows is not None
    assert not ranges.lows.any()  # although the smallest value was 0.2
    assert torch.equal(ranges.eval()(torch.zeros(1, 4)), torch.zeros(1, 4))


@pytest.mark.parametrize("low", [None, -0.5])
def test_gradient_is_zero_outside_the_range(low: float | None) -> None:
    values = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.7, 1.0, 5.0], requires_grad=True)
    weights = torch.arange(1.0, 8.0)
    lowest = None if low is None else torch.tensor(low)
    (fake_quantise(values, torch.tensor(1.0), 4, lowest, clamps_gradient=True) * weights).sum().backward()
    is_inside = (values.detach() >= (-1.0 if low is None else low)) & (values.detach() <= 1.0)
    assert torch.equal(values.grad, torch.where(is_inside, weights, 0.0))
    values.grad = None
    unmeasured = torch.tensor(0.0)
    fake_quantise(values, unmeasured, 4, None if low is None else unmeasured, clamps_gradient=True).sum().backward()
    assert torch.equal(values.grad, torch.ones(7))


def test_ranges_are_moving_averages_of_minimum_and_maximum() -> None:
    ranges, high, low = Ranges.of(CONFIG).double(), 0.0, 0.0
    for batch in range(3):
        values = torch.randn(5, 4, dtype=torch.float64) * (batch + 1) + batch
        found = ranges(values)
        share = 0.1 if batch else 1.0
        high, low = (old + share * (float(new) - old) for old, new in ((high, values.max()), (low, values.min())))
        torch.testing.assert_close(found, affine(values, low, high, 8), rtol=0, atol=1e-12)
    frozen = [ranges.limits.clone(), ranges.lows.clone()]
    ranges.eval()(values * 100)
    assert torch.equal(ranges.limits, frozen[0])
    assert torch.equal(ranges.lows, frozen[1])
    assert ranges.bfloat16().lows.dtype == torch.float64


def test_affine_weights_have_a_range_per_row() -> None:
    rows = torch.randn(6, 5, dtype=torch.float64) + 3
    found = WeightRounding(CONFIG, 4)(rows)
    for row, rounded in zip(rows, found, strict=True):
        torch.testing.assert_close(rounded, affine(row, row.min().item(), row.max().item(), 4), rtol=0, atol=1e-12)
    assert torch.equal(WeightRounding(CONFIG, 2)(torch.full((2, 3), 0.3)), torch.full((2, 3), 0.3))


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_norm_without_ranges_is_the_plain_norm(kind: str, has_bias: bool) -> None:
    plain = Norm(8, 1e-6, kind, has_bias=has_bias).double()
    hidden = torch.randn(4, 8, dtype=torch.float64)
    rounded = RoundedNorm(plain, CONFIG, 8).double().eval()
    torch.testing.assert_close(rounded(hidden), plain(hidden), rtol=0, atol=1e-12)
    assert rounded.plain().weight is plain.weight
    assert torch.equal(rounded.plain()(hidden), plain(hidden))


def test_parts_of_a_norm_are_rounded() -> None:
    plain, hidden = Norm(8, 1e-6).double(), torch.randn(5, 8, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.normal_()
        plain.bias.normal_()
    found = RoundedNorm(plain, QuantisationConfig(places="all", form="affine", activation_bits=4), 3).double()(hidden)

    def measured(values: Tensor, bits: int = 4) -> Tensor:
        return affine(values.detach(), values.min().item(), values.max().item(), bits)

    centred = hidden - hidden.mean(-1, keepdim=True)
    deviation = measured((centred.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    quotient = measured(measured(centred) / deviation)
    expected = measured(quotient * measured(plain.weight, 3) + plain.bias)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def projections(*lengths: int) -> tuple[Tensor, SequenceLayout]:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    draws = torch.Generator().manual_seed(0)
    return torch.randn(sum(lengths), 2, 4, dtype=torch.float64, generator=draws) * 3, SequenceLayout.packed(
        starts, max(lengths)
    )


def softmax() -> RoundedSoftmax:
    return RoundedSoftmax(CONFIG, 2).double()


def bounds(ranges: Ranges) -> tuple[float, float]:
    limits, lows = ranges.effective_ranges()
    assert lows is not None
    return lows.item(), limits.item()


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_without_ranges_is_plain_attention(is_causal: bool) -> None:
    tokens, layout = projections(3, 7, 1)
    rounding = softmax().eval()(None)
    expected = attention(tokens, tokens, tokens, layout, is_causal=is_causal)
    found = attention(tokens, tokens, tokens, layout, is_causal=is_causal, rounding=rounding)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_parts_of_the_softmax_are_rounded_and_masked_weights_stay_zero() -> None:
    tokens, layout = projections(5, 2)
    rounded = softmax()
    weights = attention_map(tokens, tokens, layout, is_causal=True, rounding=rounded(None))
    scores = torch.einsum("qhd,khd->hqk", tokens[:5], tokens[:5]) / 2
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    numerators = affine((scores - scores.amax(-1, keepdim=True)).exp(), 0.0, 1.0, 8)
    quotients = numerators / affine(numerators.sum(-1, keepdim=True), *bounds(rounded.denominators), 8)
    expected = affine(quotients, *bounds(rounded.weights), 8)
    torch.testing.assert_close(weights[0], expected, rtol=0, atol=1e-12)
    assert not weights[0].triu(1).any()
    assert not weights[1, :, :, 2:].any()  # keys that are padding


def test_padding_inside_attention_never_widens_a_range() -> None:
    tokens, layout = projections(6, 9)  # attention pads the first sequence with 3 queries and keys
    together, apart = softmax(), []
    attention(tokens, tokens, tokens, layout, rounding=together(None))
    for begin, end in ((0, 6), (6, 15)):
        apart.append(softmax())
        own = tokens[None, begin:end]
        attention(own, own, own, SequenceLayout.full(1, end - begin), rounding=apart[-1](None))
    for name in ("numerators", "denominators"):
        lows, limits = zip(*(bounds(getattr(one, name)) for one in apart), strict=True)
        assert bounds(getattr(together, name)) == pytest.approx((min(lows), max(limits)), abs=1e-12)
    assert bounds(together.denominators)[1] < 6  # the equal scores of padding would sum to 6
    assert bounds(together.weights)[1] <= max(bounds(one.weights)[1] for one in apart) + 0.02


def test_padded_batches_are_refused_while_ranges_are_observed() -> None:
    rounding, vectors = RoundedEmbedding(CONFIG), torch.randn(2, 3, 4)
    padded = SequenceLayout.padded(torch.tensor([[True, True, True], [True, False, False]]))
    with pytest.raises(InputError, match="the batch is padded, and padding would widen the ranges"):
        rounding(vectors, padded)
    rounding(vectors, SequenceLayout.full(2, 3))
    assert rounding.eval()(vectors, padded).shape == vectors.shape


@pytest.mark.parametrize("backend", ["short", "varlen", "grouped", "sdpa", "products"])
def test_fused_backends_refuse_a_rounded_softmax(backend: str) -> None:
    tokens, layout = projections(3)
    with pytest.raises(InputError, match=f"backend '{backend}' cannot compute this: the parts of the softmax are"):
        attention(tokens, tokens, tokens, layout, rounding=softmax()(None), dropout=0.1, backend=backend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"form": "symmetric"}, "form is 'symmetric'"), ({"rounds_activations": False}, "rounds_activations is false")],
)
def test_invalid_settings_of_all_places_raise(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        QuantisationConfig.parse({"places": "all", "form": "affine", **changes})
