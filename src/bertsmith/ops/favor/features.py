"""The feature maps, kept as (exponent, factor) until a stabiliser is known, and their gradient by hand.

With x the query or key times head_width^(-1/4), and u = Wx:

    feature = factor · exp(exponent − level) + ε

The level cancels in the normalised output, so it is a constant for the gradient. It is the largest exponent of a query,
and of all keys of a sequence; a causal form may use only those at or before each key.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bertsmith.ops.favor.kernels import KERNELS, Kernel


class Projected(NamedTuple):
    """Features before their stabiliser.

    Shape: exponent (…, length, width or 1), factor (…, length, width) or None for 1.
    """

    exponent: Tensor
    factor: Tensor | None


class Side(NamedTuple):
    """Queries or keys and what the feature map makes of them.

    Shape: x (batch, heads, length, head_width), level (batch, heads, length or 1, 1), features (batch, heads, length,
    width).
    """

    x: Tensor
    projected: Projected
    level: Tensor
    features: Tensor


def query_side(query: Tensor, rows: Tensor, kernel: Kernel, epsilon: float) -> Side:
    """The features of queries, each stabilised by its own largest exponent.

    Shape: query (batch, length, heads, head_width), rows (width, head_width).
    """
    x = _scaled(query, rows)
    projected = project(x, rows, kernel)
    level = _finite(projected.exponent.detach().amax(-1, keepdim=True))
    return Side(x, projected, level, _features(projected, level, epsilon, None))


def key_side(
    key: Tensor, rows: Tensor, kernel: Kernel, epsilon: float, is_token: Tensor | None, *, is_causal: bool
) -> Side:
    """The features of keys, 0 at pads, stabilised by the largest exponent of the sequence; causal, of it so far.

    Shape: key (batch, length, heads, head_width), rows (width, head_width), is_token (batch, length).
    """
    mask = None if is_token is None else is_token[:, None, :, None]
    x = _scaled(key, rows)
    projected = project(x, rows, kernel, mask)
    level = projected.exponent.detach().amax(-1, keepdim=True)
    level = _finite(level.cummax(-2).values if is_causal else level.amax(-2, keepdim=True))
    return Side(x, projected, level, _features(projected, level, epsilon, mask))


def widened(projection: Tensor, kernel: Kernel) -> Tensor:
    """One row of the matrix for every feature: (feature width, head_width)."""
    if len(kernel.copies) == 1:
        return projection
    return torch.cat([sign * projection for sign in kernel.copies])


def feature_width(kernel: str, features: int) -> int:
    """How many features a matrix of `features` rows gives."""
    return features * len(KERNELS[kernel].copies)


def project(x: Tensor, rows: Tensor, kernel: Kernel, is_token: Tensor | None = None) -> Projected:
    """What the kernel makes of scaled queries or keys; pads get the exponent −∞, which is a feature of 0.

    Shape: x (…, length, head_width), rows (width, head_width), is_token broadcasts to (…, length, 1).
    """
    u = x @ rows.mT  # (…, length, head_width) -> (…, length, width)
    squares = x.square().sum(-1, keepdim=True)
    exponent = kernel.norm * squares if kernel.curve is not None else u + kernel.norm * squares
    if is_token is not None:
        exponent = exponent.masked_fill(~is_token, -torch.inf)
    return Projected(exponent, None if kernel.curve is None else kernel.curve(u))


def with_ones(value: Tensor, rows: Tensor) -> Tensor:
    """[V 1], whose sums hold the row sums in the last column: (batch, heads, length, head_width + 1).

    Shape: value (batch, length, heads, head_width).
    """
    return pad(value.to(rows.dtype).transpose(1, 2), (0, 1), value=1.0)


def bare(projected: Projected, level: Tensor) -> Tensor:
    """The features without ε: (…, length, width)."""
    scale = (projected.exponent - level).exp()
    return scale if projected.factor is None else projected.factor * scale


def gradient(side: Side, rows: Tensor, kernel: Kernel, upstream: Tensor, states: Tensor) -> Tensor:
    """The gradient of the queries or keys `states` a side was made of, given the one of its features."""
    by_exponent = upstream * bare(side.projected, side.level)
    if kernel.curve is None:
        by_u = by_exponent
    else:
        assert kernel.derivative is not None
        by_u = upstream * (side.projected.exponent - side.level).exp() * kernel.derivative(side.x @ rows.mT)
    by_x = by_u @ rows
    if kernel.norm:
        by_x = by_x + 2 * kernel.norm * side.x * by_exponent.sum(-1, keepdim=True)
    return (by_x * states.shape[-1] ** -0.25).transpose(1, 2).to(states.dtype)


def _scaled(states: Tensor, rows: Tensor) -> Tensor:
    """Queries or keys times head_width^(-1/4), so that softmax's kernel is exp(xᵀy), in the precision of the rows."""
    # (batch, length, heads, head_width) -> (batch, heads, length, head_width)
    return (states.to(rows.dtype) * states.shape[-1] ** -0.25).transpose(1, 2)


def _finite(level: Tensor) -> Tensor:
    # where there is no token at all, −∞ − (−∞) would be NaN
    return level.clamp(min=torch.finfo(level.dtype).min)


def _features(projected: Projected, level: Tensor, epsilon: float, mask: Tensor | None) -> Tensor:
    features = bare(projected, level) + epsilon
    return features if mask is None else features * mask
