"""Softmax whose numerator, denominator and output are rounded (Prato et al. 2020)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rounding = Callable[[Tensor, Tensor], Tensor]
"""Rounds a tensor; the mask, which broadcasts over it, is True at the values that count for its range."""

FUSED = "the parts of the softmax are rounded, but this backend fuses them; use the reference"
"""Why fused implementations refuse a rounded softmax."""


@dataclass(frozen=True)
class SoftmaxRounding:
    """Functions that round the parts of a softmax; those of numerators and weights keep 0 exactly."""

    numerators: Rounding
    denominators: Rounding
    weights: Rounding


def rounded_softmax(scores: Tensor, allowed: Tensor, is_query: Tensor | None, rounding: SoftmaxRounding) -> Tensor:
    """Return the attention weights over the last axis; 0 at masked pairs, and in rows without any key.

    Shape: scores and result (batch, heads, queries, keys), allowed broadcastable to it; is_query (batch, queries), True
    at queries that are tokens, None for all.
    """
    counts = allowed if is_query is None else allowed & is_query[:, None, :, None]
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    masked = wide.masked_fill(~allowed, torch.finfo(wide.dtype).min)
    numerators = (masked - masked.detach().amax(-1, keepdim=True)).exp().masked_fill(~allowed, 0.0)
    numerators = rounding.numerators(numerators, counts)
    has_keys = allowed.any(-1, keepdim=True)
    denominators = numerators.sum(-1, keepdim=True).masked_fill(~has_keys, 1.0)
    denominators = rounding.denominators(denominators, counts.any(-1, keepdim=True))
    return rounding.weights(numerators / denominators, counts).to(scores.dtype)
