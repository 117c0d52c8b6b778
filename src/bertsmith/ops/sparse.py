"""Sparse attention weights: sparsemax and α-entmax, which are exactly 0 for keys whose scores are low enough.

p = [(α − 1) z − τ]₊^(1/(α − 1)) for scores z, with τ such that p sums to 1 (Peters et al. 2019). α = 2 is sparsemax
(Martins and Astudillo 2016), and α → 1 is softmax. A key has weight 0 if its score is 1/(α − 1) or more below the
row's maximum.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bertsmith.ops.cumulative_sum import cumulative_sum
from bertsmith.ops.dispatch import is_exporting

SOFTMAX_ONLY = "the attention weights are sparse, but the kernel has softmax only"
"""Why fused implementations refuse sparse weights."""


@dataclass(frozen=True)
class SparseMap:
    """The function from scores to attention weights.

    Shape: alpha a number, or (heads,).
    """

    alpha: float | Tensor
    """α in (1, 2]; 1.5 and 2 are computed exactly by sorting, tensors and other numbers by bisection."""
    scale: float = 1.0
    """Factor of the scores."""


def sparse_probabilities(scores: Tensor, allowed: Tensor | None, sparse: SparseMap) -> Tensor:
    """Return the attention weights of the scores over the last axis; 0 at masked pairs, and in rows without any key.

    Shape: scores and result (batch, heads, queries, keys); allowed broadcastable to it, None for all pairs.
    """
    dtype, alpha = scores.dtype, sparse.alpha
    scores = scores.to(torch.promote_types(dtype, torch.float32)) * sparse.scale
    if isinstance(alpha, Tensor):
        alpha = alpha.to(scores.dtype)[:, None, None]  # (heads,) -> (heads, 1, 1)
    # an exported graph needs the plain operations
    weights: Tensor = _entmax(scores, allowed, alpha) if is_exporting() else _Entmax.apply(scores, allowed, alpha)
    return weights.to(dtype)


class _Entmax(torch.autograd.Function):
    """α-entmax with its closed-form gradients, which need the weights only."""

    @staticmethod
    def forward(scores: Tensor, allowed: Tensor | None, alpha: float | Tensor) -> Tensor:
        return _entmax(scores, allowed, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *_, alpha = inputs
        is_tensor = isinstance(alpha, Tensor)
        ctx.save_for_backward(output, alpha if is_tensor else None)
        ctx.alpha = None if is_tensor else alpha

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
        weights, alpha = ctx.saved_tensors
        alpha = ctx.alpha if alpha is None else alpha
        # ∂p/∂z = diag(s) − ssᵀ/Σs with s = p^(2 − α) on the support (Peters et al. 2019, proposition 2)
        support = weights > 0
        filled = weights.where(support, 1.0)  # so that powers and logarithms have finite derivatives
        slope = filled.pow(2 - alpha).where(support, 0.0)
        share = slope / slope.sum(-1, keepdim=True).clamp_min(torch.finfo(slope.dtype).tiny)
        by_scores = slope * (gradient - (share * gradient).sum(-1, keepdim=True))
        if not ctx.needs_input_grad[2]:
            return by_scores, None, None
        # Correia et al. 2019, proposition 1
        entropy = -filled * filled.log()
        by_entropy = entropy - share * entropy.sum(-1, keepdim=True)
        by_alpha = (weights - share) / (alpha - 1) ** 2 + by_entropy / (alpha - 1)
        return by_scores, None, (gradient * by_alpha).sum_to_size(alpha.shape)


def _entmax(scores: Tensor, allowed: Tensor | None, alpha: float | Tensor) -> Tensor:
    """Return α-entmax of the allowed scores."""
    lowest = torch.finfo(scores.dtype).min
    masked = scores if allowed is None else scores.where(allowed, lowest)
    # the threshold is at least -1 relative to the maximum, so everything at -2 has weight 0
    levels = ((scores - masked.amax(-1, keepdim=True)) * (alpha - 1)).clamp_min(-2.0)
    if allowed is not None:
        levels = levels.where(allowed, -2.0)
    if isinstance(alpha, float) and alpha == 2.0:
        weights = (levels - _sparsemax_threshold(levels)).relu()
    elif isinstance(alpha, float) and alpha == 1.5:
        weights = (levels - _entmax15_threshold(levels)).relu().square()
    else:
        weights = _by_bisection(levels, 1 / (alpha - 1))
    return weights if allowed is None else weights.where(allowed, 0.0)


def _sparsemax_threshold(levels: Tensor) -> Tensor:
    """Return τ with Σ[x − τ]₊ = 1, (…, 1): the support is the longest prefix of the sorted x with 1 + n·xₙ > Σx."""
    ordered, count = _ordered(levels)
    total = cumulative_sum(ordered, -1)
    support = (1 + count * ordered > total).sum(-1, keepdim=True)
    return (total.gather(-1, support - 1) - 1) / support


def _entmax15_threshold(levels: Tensor) -> Tensor:
    """Return τ with Σ[x − τ]₊² = 1, (…, 1): for each prefix of the sorted x a root of a quadratic equation."""
    ordered, count = _ordered(levels)
    mean = cumulative_sum(ordered, -1) / count
    squares = (cumulative_sum(ordered.square(), -1) - count * mean.square()).clamp_min(0.0)  # about the mean
    threshold = mean - ((1 - squares) / count).clamp_min(0.0).sqrt()
    support = (threshold <= ordered).sum(-1, keepdim=True)
    return threshold.gather(-1, support - 1)


def _ordered(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the levels in descending order, and 1, 2, 3, … for the lengths of their prefixes."""
    ordered = levels.sort(dim=-1, descending=True).values
    return ordered, torch.arange(1, levels.shape[-1] + 1, device=levels.device, dtype=levels.dtype)


def _by_bisection(levels: Tensor, exponent: float | Tensor) -> Tensor:
    """Return [x − τ]₊^exponent with sum 1; the maximum of x is 0, so τ is in [-1, 0]."""
    low = torch.full_like(levels[..., :1], -1.0)
    width = 1.0
    for _ in range(26 if levels.dtype == torch.float32 else 54):
        width /= 2
        total = (levels - low - width).relu().pow(exponent).sum(-1, keepdim=True)
        low = torch.where(total >= 1, low + width, low)
    weights = (levels - low).relu().pow(exponent)
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(levels.dtype).tiny)
