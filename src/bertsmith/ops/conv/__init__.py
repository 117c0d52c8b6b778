"""Convolutions inside each sequence: `depthwise` with a kernel per channel, `light_conv` with a softmax per head.

Taps outside the sequence, at padding or in another sequence, count as 0; the remaining weights are not renormalised.
With `legacy_padding` the padding of a padded layout takes part, as in ConvBERT's released code and in `transformers`;
packed sequences have no padding. In causal convolutions the last tap is the token itself.
"""

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.conv import fused, reference, taps
from bertsmith.ops.conv.reference import DepthwiseInputs, LightConvInputs, kernel_extent, odd_kernel_size, tap_weights
from bertsmith.ops.conv.taps import shift
from bertsmith.ops.dispatch import Implementation, Implementations, choose

DEPTHWISE_BACKENDS: Implementations[DepthwiseInputs, Tensor] = {
    "triton": Implementation(fused.depthwise, fused.unsupported, fused.preferred),
    "taps": Implementation(taps.depthwise, taps.unsupported),
    "reference": Implementation(reference.depthwise, reference.unsupported),
}
BACKENDS: Implementations[LightConvInputs, Tensor] = {
    "triton": Implementation(fused.light_conv, fused.unsupported, fused.preferred),
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
    """Return Σ_j kernel[c, j] · hidden[i + j − kernel_size//2, c], in the shape of `hidden`.

    Shape: hidden (batch, length, width), or (tokens, width) when packed; kernel (width, kernel_size), odd.
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
    """Return Σ_j softmax(scores)[h, j] · value[i + j − kernel_size//2, h] (Wu et al. 2019, eqs. 3 to 5).

    `dropout` is applied to the softmax weights.

    Shape: value and result (batch, length, heads, head_width), or (tokens, heads, head_width) when packed; scores
    (heads, kernel_size), the same kernels at all positions, or (batch, length, heads, kernel_size) or (tokens, heads,
    kernel_size), one per position.
    """
    odd_kernel_size(scores.shape[-1])
    inputs = LightConvInputs(value, scores, layout, is_causal, legacy_padding, dropout)
    return choose(BACKENDS, backend, inputs).compute(inputs)


def depthwise_step(window: Tensor, kernel: Tensor) -> Tensor:
    """Return the causal `depthwise` at the last position of a window: (batch, width).

    Shape: window (batch, kernel_size, width), zeros before the first token; kernel (width, kernel_size).
    """
    return torch.einsum("btw,wt->bw", window, kernel.to(window.dtype))


def light_conv_step(window: Tensor, scores: Tensor) -> Tensor:
    """Return the causal `light_conv` at the last position of a window: (batch, heads, head_width).

    Shape: window (batch, kernel_size, heads, head_width), zeros before the first token; scores (heads, kernel_size) or
    (batch, heads, kernel_size).
    """
    weights = tap_weights(scores).expand(window.shape[0], -1, -1)
    return torch.einsum("bthd,bht->bhd", window.to(weights.dtype), weights).to(window.dtype)


def kernel_map(
    weights: Tensor, layout: SequenceLayout, *, is_causal: bool = False, legacy_padding: bool = False
) -> Tensor:
    """Return tap weights as a band matrix, (batch, heads, max_length, max_length), with output positions as rows.

    Shape: weights as `tap_weights(scores)`: (heads, kernel_size), (batch, length, heads, kernel_size) or (tokens,
    heads, kernel_size).
    """
    odd_kernel_size(weights.shape[-1])
    return reference.kernel_map(weights, layout, is_causal, legacy_padding)


__all__ = [
    "BACKENDS",
    "DEPTHWISE_BACKENDS",
    "depthwise",
    "depthwise_step",
    "kernel_extent",
    "kernel_map",
    "light_conv",
    "light_conv_step",
    "odd_kernel_size",
    "shift",
    "tap_weights",
]
