"""Convolutions as sums of shifted slices: the backward pass keeps only the input and the tap weights."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.conv.reference import DepthwiseInputs, LightConvInputs, dropped_weights, reach


def unsupported(inputs: DepthwiseInputs | LightConvInputs) -> str | None:
    return None


def depthwise(inputs: DepthwiseInputs) -> Tensor:
    """The convolved states, in the shape of `hidden`."""
    hidden, layout = inputs.hidden, inputs.layout
    if layout.are_rows:
        rows, full = layout.pad(hidden)
        return depthwise(replace(inputs, hidden=rows, layout=full)).flatten(0, 1)
    kernel_size = inputs.kernel.shape[-1]
    before, after = reach(kernel_size, inputs.is_causal)
    if layout.is_packed:
        spaced, positions = _spread(hidden, layout, max(before, after))
        length = spaced.shape[0] - before - after
        mixed = _tap_sum(spaced, inputs.kernel, axis=0, length=length)
        return mixed.index_select(0, positions - before).to(hidden.dtype)
    if layout.is_token is not None and not inputs.legacy_padding:
        hidden = hidden.masked_fill(~layout.is_token[..., None], 0.0)
    spaced = pad(hidden, (0, 0, before, after))
    return _tap_sum(spaced, inputs.kernel, axis=1, length=hidden.shape[1]).to(hidden.dtype)


def light_conv(inputs: LightConvInputs) -> Tensor:
    """The convolved values, in the shape of `value`."""
    value, layout = inputs.value, inputs.layout
    if layout.are_rows:
        rows, full = layout.pad(value)
        scores = inputs.scores if inputs.scores.dim() == 2 else layout.pad(inputs.scores)[0]
        return light_conv(replace(inputs, value=rows, scores=scores, layout=full)).flatten(0, 1)
    weights = dropped_weights(inputs)
    before, after = reach(weights.shape[-1], inputs.is_causal)
    is_inside = _inside(value, layout, before, after, inputs.legacy_padding)
    if is_inside is not None:
        # a weight per position and tap is far smaller than the value, so the weights are masked and not the values
        weights = weights.where(is_inside[..., None, :], 0.0)
    axis = value.dim() - 3
    spaced = pad(value, (0, 0, 0, 0, before, after))
    return _tap_sum(spaced, weights[..., None, :], axis=axis, length=value.shape[axis]).to(value.dtype)


def _tap_sum(spaced: Tensor, weights: Tensor, *, axis: int, length: int) -> Tensor:
    """Σ_j weights[…, j] · spaced[j : j + length], accumulated at least in float32; the slices are views."""
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    total = spaced.narrow(axis, 0, length) * weights[..., 0]
    for tap in range(1, weights.shape[-1]):
        total = torch.addcmul(total, spaced.narrow(axis, tap, length), weights[..., tap])
    return total


def _spread(hidden: Tensor, layout: SequenceLayout, gap: int) -> tuple[Tensor, Tensor]:
    """Packed states with `gap` zeros before, between and after the sequences, and the place of each token in them."""
    positions = torch.arange(hidden.shape[0], device=hidden.device) + gap * (layout.sequence_index(hidden) + 1)
    spaced = hidden.new_zeros(hidden.shape[0] + gap * (layout.batch + 1), hidden.shape[1])
    return spaced.index_copy(0, positions, hidden), positions


def _inside(value: Tensor, layout: SequenceLayout, before: int, after: int, legacy_padding: bool) -> Tensor | None:
    """True where a position's tap falls inside its sequence: (…, taps); None if zeros at the ends of rows suffice."""
    if layout.starts is not None:
        offsets = torch.arange(-before, after + 1, device=value.device)
        neighbours = layout.positions(value)[:, None] + offsets  # (tokens, taps)
        return (neighbours >= 0) & (neighbours < layout.lengths()[layout.sequence_index(value)][:, None])
    if layout.is_token is None or legacy_padding:
        return None
    windows = pad(layout.is_token, (before, after)).unfold(1, before + after + 1, 1)  # (batch, length, taps)
    return windows.contiguous()  # overlapping views make an exported program depend on the length


def shifted(hidden: Tensor, by: int, layout: SequenceLayout) -> Tensor:
    """The states of the tokens `by` places further on in the same sequence, zeros where there is none.

    Shape: hidden (batch, length, …) or (tokens, …), and so is the result.
    """
    if by == 0 and layout.is_token is None:
        return hidden
    if layout.are_rows:
        return _moved(layout.pad(hidden)[0], by, 1).flatten(0, 1)
    axis = 0 if layout.is_packed else 1
    moved = _moved(hidden, by, axis)
    is_inside = _is_inside(hidden, by, layout)
    if is_inside is None:
        return moved
    return moved * is_inside.reshape(is_inside.shape + (1,) * (hidden.dim() - is_inside.dim()))


def _moved(hidden: Tensor, by: int, axis: int) -> Tensor:
    """The tensor moved along an axis, zeros at the end that was left."""
    # zeros first, then the cut: no question about the length, so that one export serves all of them
    edges = [0, 0] * (hidden.dim() - 1 - axis) + ([-by, 0] if by < 0 else [0, by])
    return pad(hidden, edges).narrow(axis, max(by, 0), hidden.shape[axis])


def _is_inside(hidden: Tensor, by: int, layout: SequenceLayout) -> Tensor | None:
    """True where the neighbour is a token of the same sequence; None where it always is or was filled with zeros."""
    if layout.is_packed:
        position = layout.positions(hidden) + by
        return (position >= 0) & (position < layout.lengths()[layout.sequence_index(hidden)])
    if layout.is_token is None:
        return None
    return _moved(layout.is_token, by, 1)
