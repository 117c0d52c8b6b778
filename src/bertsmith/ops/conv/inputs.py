"""What every form of the convolutions is given, and the questions they share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.dropout import drop, drop_tokens


@dataclass(frozen=True)
class DepthwiseInputs:
    """One call of a depthwise convolution.

    Shape: hidden (batch, length, width), or (tokens, width) when packed; kernel (width, taps).
    """

    hidden: Tensor
    kernel: Tensor
    layout: SequenceLayout
    is_causal: bool = False
    legacy_padding: bool = False


@dataclass(frozen=True)
class LightConvInputs:
    """One call of a convolution whose taps are a softmax.

    Shape: value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed; scores (heads, taps),
    one kernel for all positions, or (batch, length, heads, taps) and (tokens, heads, taps), one for each.
    """

    value: Tensor
    scores: Tensor
    layout: SequenceLayout
    is_causal: bool = False
    legacy_padding: bool = False
    dropout: float = 0.0


def odd_taps(taps: int) -> int:
    """The number itself; an even one, whose window would have no middle, raises InputError."""
    if taps < 1 or taps % 2 == 0:
        raise InputError(f"taps is {taps}; allowed: odd numbers from 1 up")
    return taps


def reach(taps: int, is_causal: bool) -> tuple[int, int]:
    """How many places before and after its own a position takes from."""
    return (taps - 1, 0) if is_causal else (taps // 2, taps // 2)


def tap_weights(scores: Tensor) -> Tensor:
    """The softmax over the taps, in the shape of the scores and at least in float32."""
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def dropped_weights(inputs: LightConvInputs) -> Tensor:
    """The weights of the taps after dropout."""
    weights = tap_weights(inputs.scores)
    if inputs.dropout == 0.0:
        return weights
    if weights.dim() == 2:
        return drop(weights, inputs.dropout)  # one kernel for all positions
    return drop_tokens(weights, inputs.dropout, inputs.layout)
