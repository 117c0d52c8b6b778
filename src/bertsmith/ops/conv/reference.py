"""Inputs and reference of the convolutions, differentiable in any dtype; fast implementations are tested against it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.dropout import drop, drop_tokens


@dataclass(frozen=True)
class DepthwiseInputs:
    """Inputs of a depthwise convolution.

    Shape: hidden (batch, length, width), or (tokens, width) when packed; kernel (width, kernel_size).
    """

    hidden: Tensor
    kernel: Tensor
    layout: SequenceLayout
    is_causal: bool = False
    legacy_padding: bool = False


@dataclass(frozen=True)
class LightConvInputs:
    """Inputs of a convolution whose tap weights are a softmax over scores.

    Shape: value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed; scores (heads,
    kernel_size), one kernel for all positions, or (batch, length, heads, kernel_size) or (tokens, heads, kernel_size),
    one per position.
    """

    value: Tensor
    scores: Tensor
    layout: SequenceLayout
    is_causal: bool = False
    legacy_padding: bool = False
    dropout: float = 0.0


def odd_kernel_size(kernel_size: int) -> int:
    """Return the kernel size; raise InputError if it is even, because the kernel would have no middle."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise InputError(f"kernel_size is {kernel_size}; allowed: odd numbers of 1 or more")
    return kernel_size


def kernel_extent(kernel_size: int, is_causal: bool) -> tuple[int, int]:
    """Return how many positions before and after its own a kernel reads."""
    return (kernel_size - 1, 0) if is_causal else (kernel_size // 2, kernel_size // 2)


def tap_weights(scores: Tensor) -> Tensor:
    """Return the softmax over the taps, at least in float32."""
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def dropped_weights(inputs: LightConvInputs) -> Tensor:
    """Return the tap weights after dropout."""
    weights = tap_weights(inputs.scores)
    if inputs.dropout == 0.0:
        return weights
    if weights.dim() == 2:
        return drop(weights, inputs.dropout)  # one kernel for all positions
    return drop_tokens(weights, inputs.dropout, inputs.layout)


def unsupported(inputs: DepthwiseInputs | LightConvInputs) -> str | None:
    return None


def depthwise(inputs: DepthwiseInputs) -> Tensor:
    """Return the convolved hidden states, by PyTorch's convolution over padded rows."""
    rows, _ = inputs.layout.pad(inputs.hidden)
    is_outside = _outside(inputs.layout, inputs.legacy_padding)
    if is_outside is not None:
        rows = rows.masked_fill(is_outside[..., None], 0.0)
    channels = rows.transpose(1, 2)  # (batch, length, width) -> (batch, width, length)
    kernel = inputs.kernel[:, None].to(rows.dtype)  # (width, kernel_size) -> (width, 1, kernel_size)
    mixed = conv1d(pad(channels, kernel_extent(kernel.shape[-1], inputs.is_causal)), kernel, groups=rows.shape[-1])
    return inputs.layout.unpad(mixed.transpose(1, 2), inputs.hidden)


def light_conv(inputs: LightConvInputs) -> Tensor:
    """Return the convolved values, by the product with the band matrix of tap weights."""
    rows, _ = inputs.layout.pad(inputs.value)
    weights = dropped_weights(inputs)
    band = kernel_map(weights, inputs.layout, inputs.is_causal, inputs.legacy_padding)
    mixed = torch.einsum("bhqk,bkhd->bqhd", band, rows.to(band.dtype)).to(rows.dtype)
    return inputs.layout.unpad(mixed, inputs.value)


def kernel_map(weights: Tensor, layout: SequenceLayout, is_causal: bool, legacy_padding: bool) -> Tensor:
    """Return the band matrix of tap weights, (batch, heads, max_length, max_length), 0 outside the sequence."""
    is_fixed = weights.dim() == 2
    rows = weights.expand(layout.batch, layout.max_length, -1, -1) if is_fixed else layout.pad(weights)[0]
    heads, kernel_size = rows.shape[2:]
    positions = torch.arange(layout.max_length, device=rows.device)
    before, _ = kernel_extent(kernel_size, is_causal)
    tap = positions - positions[:, None] + before  # (outputs, inputs): the tap that connects them
    index = tap.clamp(0, kernel_size - 1).expand(layout.batch, heads, -1, -1)
    # (batch, max_length, heads, kernel_size) -> (batch, heads, max_length, max_length)
    band = rows.transpose(1, 2).gather(-1, index)
    band = band.masked_fill((tap < 0) | (tap >= kernel_size), 0.0)
    is_outside = _outside(layout, legacy_padding)
    return band if is_outside is None else band.masked_fill(is_outside[:, None, None, :], 0.0)


def _outside(layout: SequenceLayout, legacy_padding: bool) -> Tensor | None:
    """Return the mask of positions outside every sequence, (batch, max_length); None without padding."""
    if layout.starts is not None:
        return torch.arange(layout.max_length, device=layout.starts.device) >= layout.lengths()[:, None]
    return None if layout.is_token is None or legacy_padding else ~layout.is_token
