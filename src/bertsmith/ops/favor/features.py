"""The feature maps, kept as (exponent, factor) until a stabiliser is known, and their gradient by hand.

With x the query or key times head_width^(-1/4), and u = Wx:

    feature = factor · exp(exponent − level) + ε

The level cancels in the normalised output, so it is a constant for the gradient. It is the largest exponent of a query,
and of all keys of a sequence; a causal form may use only those at or before each key.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bertsmith.ops.favor.kernels import KERNELS, Kernel


class Projected(NamedTuple):
    """Features before their stabiliser.

    Shape: exponent (…, length, width or 1), factor (…, length, width) or None for 1.
    """

    exponent: Tensor
    factor: Tensor | None


def widened(projection: Tensor, kernel: Kernel) -> Tensor:
    """One row of the matrix for every feature: (feature width, head_width)."""
    if len(kernel.copies) == 1:
        return projection
    return torch.cat([sign * projection for sign in kernel.copies])


def feature_width(kernel: str, features: int) -> int:
    """How many features a matrix of `features` rows gives."""
    return features * len(KERNELS[kernel].copies)


def scaled(states: Tensor, like: Tensor) -> Tensor:
    """Queries or keys times head_width^(-1/4) in the precision of `like`, so that softmax's kernel is exp(xᵀy)."""
    return states.to(like.dtype) * states.shape[-1] ** -0.25


def project(x: Tensor, matrix: Tensor, kernel: Kernel, is_token: Tensor | None = None) -> Projected:
    """What the kernel makes of scaled queries or keys; pads get the exponent −∞, which is a feature of 0.

    Shape: x (…, length, head_width), matrix (width, head_width), is_token broadcasts to (…, length, 1).
    """
    u = x @ matrix.mT  # (…, length, head_width) -> (…, length, width)
    squares = x.square().sum(-1, keepdim=True)
    exponent = kernel.norm * squares if kernel.curve is not None else u + kernel.norm * squares
    if is_token is not None:
        exponent = exponent.masked_fill(~is_token, -torch.inf)
    return Projected(exponent, None if kernel.curve is None else kernel.curve(u))


def row_level(projected: Projected) -> Tensor:
    """The largest exponent of every position: (…, length, 1)."""
    return _finite(projected.exponent.detach().amax(-1, keepdim=True))


def sequence_level(projected: Projected) -> Tensor:
    """The largest exponent of every sequence and head: (…, 1, 1)."""
    return _finite(projected.exponent.detach().amax((-2, -1), keepdim=True))


def running_level(projected: Projected) -> Tensor:
    """The largest exponent up to every position, that one counted in: (…, length, 1)."""
    return _finite(projected.exponent.detach().amax(-1, keepdim=True).cummax(-2).values)


def _finite(level: Tensor) -> Tensor:
    # where there is no token at all, −∞ − (−∞) would be NaN
    return level.clamp(min=torch.finfo(level.dtype).min)


def bare(projected: Projected, level: Tensor) -> Tensor:
    """The features without ε: (…, length, width)."""
    scale = (projected.exponent - level).exp()
    return scale if projected.factor is None else projected.factor * scale


def features(projected: Projected, level: Tensor, epsilon: float, is_token: Tensor | None = None) -> Tensor:
    """The features, 0 at pads: (…, length, width)."""
    positive = bare(projected, level) + epsilon
    return positive if is_token is None else positive * is_token


def gradient(
    x: Tensor, matrix: Tensor, kernel: Kernel, projected: Projected, level: Tensor, upstream: Tensor
) -> Tensor:
    """The gradient with respect to the scaled queries or keys, given the one with respect to their features."""
    by_exponent = upstream * bare(projected, level)
    if kernel.curve is None:
        by_u = by_exponent
    else:
        assert kernel.derivative is not None
        by_u = upstream * (projected.exponent - level).exp() * kernel.derivative(x @ matrix.mT)
    by_x = by_u @ matrix
    if kernel.norm:
        by_x = by_x + 2 * kernel.norm * x * by_exponent.sum(-1, keepdim=True)
    return by_x
