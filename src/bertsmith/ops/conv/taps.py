"""Convolutions as sums of shifted slices: only the input and the tap weights are saved for the backward pass."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.conv.reference import DepthwiseInputs, LightConvInputs, dropped_weights, kernel_extent


def unsupported(inputs: DepthwiseInputs | LightConvInputs) -> str | None:
    return None


def depthwise(inputs: DepthwiseInputs) -> Tensor:
    """Return the convolved hidden states."""
    hidden, layout = inputs.hidden, inputs.layout
    if layout.are_rows:
        rows, full = layout.pad(hidden)
        return depthwise(replace(inputs, hidden=rows, layout=full)).flatten(0, 1)
    kernel_size = inputs.kernel.shape[-1]
    before, after = kernel_extent(kernel_size, inputs.is_causal)
    if layout.is_packed:
        spaced, positions = _insert_gaps(hidden, layout, max(before, after))
        length = spaced.shape[0] - before - after
        mixed = _tap_sum(spaced, inputs.kernel, axis=0, length=length)
        return mixed.index_select(0, positions - before).to(hidden.dtype)
    if layout.is_token is not None and not inputs.legacy_padding:
        hidden = hidden.masked_fill(~layout.is_token[..., None], 0.0)
    spaced = pad(hidden, (0, 0, before, after))
    return _tap_sum(spaced, inputs.kernel, axis=1, length=hidden.shape[1]).to(hidden.dtype)


def light_conv(inputs: LightConvInputs) -> Tensor:
    """Return the convolved values."""
    value, layout = inputs.value, inputs.layout
    if layout.are_rows:
        rows, full = layout.pad(value)
        scores = inputs.scores if inputs.scores.dim() == 2 else layout.pad(inputs.scores)[0]
        return light_conv(replace(inputs, value=rows, scores=scores, layout=full)).flatten(0, 1)
    weights = dropped_weights(inputs)
    before, after = kernel_extent(weights.shape[-1], inputs.is_causal)
    is_inside = _inside(value, layout, before, after, inputs.legacy_padding)
    if is_inside is not None:
        # mask the weights and not the values, which are far larger
        weights = weights.where(is_inside[..., None, :], 0.0)
    axis = value.dim() - 3
    spaced = pad(value, (0, 0, 0, 0, before, after))
    return _tap_sum(spaced, weights[..., None, :], axis=axis, length=value.shape[axis]).to(value.dtype)


def _tap_sum(spaced: Tensor, weights: Tensor, *, axis: int, length: int) -> Tensor:
    """Return Σ_j weights[…, j] · spaced[j : j + length], accumulated at least in float32; the slices are views."""
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    total = spaced.narrow(axis, 0, length) * weights[..., 0]
    for tap in range(1, weights.shape[-1]):
        total = torch.addcmul(total, spaced.narrow(axis, tap, length), weights[..., tap])
    return total


def _insert_gaps(hidden: Tensor, layout: SequenceLayout, gap: int) -> tuple[Tensor, Tensor]:
    """Insert `gap` zeros before, between and after packed sequences; return the position of each token, too."""
    positions = torch.arange(hidden.shape[0], device=hidden.device) + gap * (layout.sequence_index(hidden) + 1)
    spaced = hidden.new_zeros(hidden.shape[0] + gap * (layout.batch + 1), hidden.shape[1])
    return spaced.index_copy(0, positions, hidden), positions


def _inside(value: Tensor, layout: SequenceLayout, before: int, after: int, legacy_padding: bool) -> Tensor | None:
    """Return the mask of taps inside the sequence, (…, kernel_size); None if zeros at the ends of rows suffice."""
    if layout.starts is not None:
        offsets = torch.arange(-before, after + 1, device=value.device)
        neighbours = layout.positions(value)[:, None] + offsets  # (tokens, kernel_size)
        return (neighbours >= 0) & (neighbours < layout.lengths()[layout.sequence_index(value)][:, None])
    if layout.is_token is None or legacy_padding:
        return None
    windows = pad(layout.is_token, (before, after)).unfold(1, before + after + 1, 1)  # (batch, length, kernel_size)
    return windows.contiguous()  # overlapping views would make an exported program depend on the length


def shift(hidden: Tensor, by: int, layout: SequenceLayout) -> Tensor:
    """Return at each position the vector `by` positions later in the same sequence, or zeros beyond its ends.

    Shape: hidden and result (batch, length, …) or (tokens, …).
    """
    if by == 0 and layout.is_token is None:
        return hidden
    if layout.are_rows:
        return _shift_axis(layout.pad(hidden)[0], by, 1).flatten(0, 1)
    axis = 0 if layout.is_packed else 1
    shifted = _shift_axis(hidden, by, axis)
    is_inside = _is_inside(hidden, by, layout)
    if is_inside is None:
        return shifted
    return shifted * is_inside.reshape(is_inside.shape + (1,) * (hidden.dim() - is_inside.dim()))


def _shift_axis(hidden: Tensor, by: int, axis: int) -> Tensor:
    """Shift a tensor along an axis and fill with zeros."""
    # pad first, then slice: nothing depends on the length, so one exported graph serves all lengths
    edges = [0, 0] * (hidden.dim() - 1 - axis) + ([-by, 0] if by < 0 else [0, by])
    return pad(hidden, edges).narrow(axis, max(by, 0), hidden.shape[axis])


def _is_inside(hidden: Tensor, by: int, layout: SequenceLayout) -> Tensor | None:
    """Return the mask of positions whose neighbour is in the same sequence; None if no mask is needed."""
    if layout.is_packed:
        position = layout.positions(hidden) + by
        return (position >= 0) & (position < layout.lengths()[layout.sequence_index(hidden)])
    if layout.is_token is None:
        return None
    return _shift_axis(layout.is_token, by, 1)
