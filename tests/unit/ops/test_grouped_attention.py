"""Attention in groups of similar length against the reference, with all gradients; its dropout."""

import pytest
import torch
from torch import Tensor

from bertsmith.data.layout import LengthGroups, SequenceLayout
from bertsmith.ops.attention import BACKENDS, attention
from bertsmith.ops.attention.reference import AttentionInputs
from bertsmith.ops.dispatch import choose
from bertsmith.ops.dropout import drop

TINY_RATE = 1e-9  # drops nothing, but takes the code path with dropout
LENGTHS = {
    "mixed": [40, 3, 37, 20, 1, 18],
    "one length": [24, 24, 24],
    "short": [5, 1, 2],
    "one": [19],
}


def layout_of(lengths: list[int], layout_name: str) -> SequenceLayout:
    counts = torch.tensor(lengths)
    if layout_name == "packed":
        starts = torch.cat([torch.zeros(1), counts.cumsum(0), counts.sum()[None]])  # the last sequence is empty
        return SequenceLayout.packed(starts.int(), max(lengths))
    return SequenceLayout.padded(torch.arange(max(lengths) + 2) < counts[:, None])


def tensors(layout: SequenceLayout, tokens: int) -> list[Tensor]:
    shape = (tokens,) if layout.is_packed else (layout.batch, layout.max_length)
    widths = (8, 8, 6)
    return [torch.randn(*shape, 3, width, dtype=torch.float64, requires_grad=True) for width in widths]


@pytest.mark.parametrize(("is_causal", "window"), [(False, None), (True, None), (False, 2), (True, 3)])
@pytest.mark.parametrize("layout_name", ["packed", "padded", "full"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_grouped_attention_equals_the_reference_with_gradients(
    lengths: list[int], layout_name: str, is_causal: bool, window: int | None
) -> None:
    layout = (
        SequenceLayout.full(len(lengths), max(lengths)) if layout_name == "full" else layout_of(lengths, layout_name)
    )
    inputs = tensors(layout, sum(lengths))
    real = torch.ones(inputs[0].shape[:-2], dtype=torch.bool) if layout.is_token is None else layout.is_token
    options = {"layout": layout, "is_causal": is_causal, "window": window}
    results = []
    for backend, dropout in (("grouped", TINY_RATE), ("reference", 0.0)):
        mixed = attention(*inputs, **options, dropout=dropout, backend=backend)
        results.append([mixed[real], *torch.autograd.grad(mixed[real].square().sum(), inputs)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-11)


def test_packed_and_padded_get_the_same_dropout_mask() -> None:
    lengths = LENGTHS["mixed"]
    packed, padded = layout_of(lengths, "packed"), layout_of(lengths, "padded")
    inputs = tensors(packed, sum(lengths))
    rows = [tensor.new_zeros(*padded.is_token.shape, *tensor.shape[1:]) for tensor in inputs]
    for row, tensor in zip(rows, inputs, strict=True):
        row[padded.is_token] = tensor.detach()
    torch.manual_seed(3)
    one = attention(*inputs, packed, dropout=0.4, backend="grouped")
    torch.manual_seed(3)
    other = attention(*rows, padded, dropout=0.4, backend="grouped")
    torch.testing.assert_close(one, other[padded.is_token], rtol=1e-12, atol=1e-12)
    assert not other[~padded.is_token].any()
    assert (one - attention(*inputs, packed, backend="reference")).abs().max() > 0.1


def test_mean_over_dropout_masks_equals_output_without_dropout() -> None:
    lengths = [9, 4]
    layout = layout_of(lengths, "packed")
    inputs = [tensor.detach() for tensor in tensors(layout, sum(lengths))]
    mean = torch.stack([attention(*inputs, layout, dropout=0.3, backend="grouped") for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, attention(*inputs, layout), rtol=0, atol=0.06)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_rate_and_mean(rate: float) -> None:
    dropped = drop(torch.ones(401, 501), rate)
    assert abs((dropped == 0).double().mean() - rate) < 5e-3
    torch.testing.assert_close(dropped[dropped != 0].unique(), torch.tensor([1 / (1 - rate)]), rtol=1e-4, atol=0)
    # neighbours share 64 random bits, but must be dropped independently
    flat = (dropped == 0).double().flatten()
    for distance in (1, 2, 3, 4):
        assert abs((flat[:-distance] * flat[distance:]).mean() - rate**2) < 5e-3


def test_groups_contain_every_token_once_with_little_padding() -> None:
    lengths = [100, 0, 90, 30, 28, 74, 7, 16, 2]
    groups = LengthGroups.of(lengths)
    assert sum(count for count, _ in groups.sizes) == 8
    assert groups.sizes == ((2, 100), (1, 74), (2, 30), (3, 16))
    assert groups.rows == 382
    assert len(groups.positions.unique()) == sum(lengths)
    assert LengthGroups.of([]).sizes == ()


def test_auto_chooses_grouped_for_dropout_on_cpu_and_other_inputs_get_a_reason() -> None:
    layout, other = layout_of([3, 2], "packed"), layout_of([3, 2], "packed")
    inputs = tensors(layout, 5)
    with_dropout = AttentionInputs(*inputs, layout, layout, dropout=0.1)
    assert choose(BACKENDS, "auto", with_dropout) is BACKENDS["grouped"]
    without = AttentionInputs(*inputs, layout, layout)
    assert choose(BACKENDS, "auto", without) is BACKENDS["sdpa"]
    assert BACKENDS["grouped"].unsupported(without) == "dropout is 0, but this backend is for training with dropout"
    elsewhere = AttentionInputs(*inputs, layout, other, dropout=0.1)
    assert BACKENDS["grouped"].unsupported(elsewhere) == "key_layout differs from the queries' layout"
    half = AttentionInputs(*(tensor.bfloat16() for tensor in inputs), layout, layout, dropout=0.1)
    assert "supports float32 and float64" in str(BACKENDS["grouped"].unsupported(half))
