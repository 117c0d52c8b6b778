"""Convolutions inside each sequence: `depthwise` with a kernel per channel, `light_conv` with softmax taps per head.

In both, what a tap finds outside the sequence counts 0: pads and other sequences are outside. The taps that remain are
not renormalised. With `legacy_padding` the pads of a padded layout take part, as they do in ConvBERT's released code
and in `transformers`; packed sequences have no pads. Causal: the last tap is the token itself.
"""

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.conv import fused, reference, taps
from bertsmith.ops.conv.reference import DepthwiseInputs, LightConvInputs, odd_kernel_size, reach, tap_weights
from bertsmith.ops.conv.taps import shifted
from bertsmith.ops.dispatch import Implementation, Implementations, choose

DEPTHWISE_BACKENDS: Implementations[DepthwiseInputs] = {
    "triton": Implementation(fused.depthwise, fused.unsupported, fused.wanted),
    "taps": Implementation(taps.depthwise, taps.unsupported),
    "reference": Implementation(reference.depthwise, reference.unsupported),
}
BACKENDS: Implementations[LightConvInputs] = {
    "triton": Implementation(fused.light_conv, fused.unsupported, fused.wanted),
    "taps": Implementation(taps.light_conv, taps.unsupported),
    "reference": Implementation(reference.light_conv, reference.unsupported),
}


def depthwise(
    hidden: Tensor,
    kernel: Tensor,
    layout: SequenceLayout,
    *,
    is_causal: bool = False,
    legacy_padding: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Σ_j kernel[c, j] · hidden[i + j − taps//2, c], in the shape of `hidden`.

    Shape: hidden (batch, length, width), or (tokens, width) when packed; kernel (width, taps), taps odd.
    """
    odd_kernel_size(kernel.shape[-1])
    inputs = DepthwiseInputs(hidden, kernel, layout, is_causal, legacy_padding)
    return choose(DEPTHWISE_BACKENDS, backend, inputs).compute(inputs)


def light_conv(
    value: Tensor,
    scores: Tensor,
    layout: SequenceLayout,
    *,
    is_causal: bool = False,
    legacy_padding: bool = False,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Σ_j softmax(scores)[h, j] · value[i + j − taps//2, h], in the shape of `value` (Wu et al. 2019, eqs. 3 to 5).

    `dropout` falls on the softmax's weights.

    Shape: value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed; scores (heads, taps),
    the same kernels everywhere, or (batch, length, heads, taps), (tokens, heads, taps), a kernel for each position.
    """
    odd_kernel_size(scores.shape[-1])
    inputs = LightConvInputs(value, scores, layout, is_causal, legacy_padding, dropout)
    return choose(BACKENDS, backend, inputs).compute(inputs)


def depthwise_step(window: Tensor, kernel: Tensor) -> Tensor:
    """The causal `depthwise` at the last place of a window of states: (batch, width).

    Shape: window (batch, taps, width), zeros before the first token; kernel (width, taps).
    """
    return torch.einsum("btw,wt->bw", window, kernel.to(window.dtype))


def light_conv_step(window: Tensor, scores: Tensor) -> Tensor:
    """The causal `light_conv` at the last place of a window of values: (batch, heads, head_width).

    Shape: window (batch, taps, heads, head_width), zeros before the first token; scores (heads, taps) or
    (batch, heads, taps).
    """
    weights = tap_weights(scores).expand(window.shape[0], -1, -1)
    return torch.einsum("bthd,bht->bhd", window.to(weights.dtype), weights).to(window.dtype)


def kernel_map(
    weights: Tensor, layout: SequenceLayout, *, is_causal: bool = False, legacy_padding: bool = False
) -> Tensor:
    """The tap weights as a banded matrix, (batch, heads, longest, longest); rows are receivers, outside counts 0.

    Shape: weights (heads, taps), or (batch, length, heads, taps) and (tokens, heads, taps): `tap_weights(scores)`.
    """
    odd_kernel_size(weights.shape[-1])
    return reference.kernel_map(weights, layout, is_causal, legacy_padding)


__all__ = [
    "BACKENDS",
    "DEPTHWISE_BACKENDS",
    "depthwise",
    "depthwise_step",
    "kernel_map",
    "light_conv",
    "light_conv_step",
    "odd_taps",
    "reach",
    "shifted",
    "tap_weights",
]
