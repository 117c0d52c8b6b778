"""The feature maps, kept as (exponent, factor) until a stabiliser is known, and their gradient by hand.

With x the query or key times head_width^(-1/4), and u = Wx:

    feature = factor · exp(exponent − level) + ε

The level cancels in the normalised output, so it is a constant for the gradient. It is the largest exponent of a query,
and of all keys of a sequence; a causal form may use only those at or before each key.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bertsmith.errors import InputError, nearest
from bertsmith.ops.dispatch import is_exporting
from bertsmith.ops.favor.feature_maps import FEATURE_MAPS, FeatureMap


@dataclass(frozen=True)
class RandomFeatures:
    """How queries and keys become features.

    Shape: random_matrix (features, head_width).
    """

    random_matrix: Tensor
    feature_map: str = "softmax"
    epsilon: float | None = None
    """Added to every feature; None for the map's own."""

    def __post_init__(self) -> None:
        if self.feature_map not in FEATURE_MAPS:
            raise InputError(f"feature_map is {self.feature_map!r}; {nearest(self.feature_map, FEATURE_MAPS)}")

    @property
    def map(self) -> FeatureMap:
        return FEATURE_MAPS[self.feature_map]

    @property
    def added(self) -> float:
        """What is added to every feature."""
        return self.map.epsilon if self.epsilon is None else self.epsilon

    @property
    def width(self) -> int:
        """How many features a query or key has."""
        return self.map.width(self.random_matrix.shape[0])

    def rows(self, x: Tensor) -> Tensor:
        """A row of the random matrix for every feature, in the precision of x: (width, head_width)."""
        columns = self.random_matrix.shape[-1]
        if columns != x.shape[-1]:
            raise InputError(f"random_matrix has {columns} columns; allowed: the head width {x.shape[-1]}")
        return self.map.widened(self.random_matrix.to(x.dtype))


class Projected(NamedTuple):
    """Features before their stabiliser.

    Shape: exponent (…, length, width or 1), factor (…, length, width) or None for 1.
    """

    exponent: Tensor
    factor: Tensor | None


class SideFeatures(NamedTuple):
    """Queries or keys and what the feature map makes of them.

    Shape: x (batch, heads, length, head_width), level (batch, heads, length or 1, 1), features (batch, heads, length,
    width).
    """

    x: Tensor
    projected: Projected
    level: Tensor
    features: Tensor


def query_side(query: Tensor, features: RandomFeatures) -> SideFeatures:
    """The features of queries, each stabilised by its own largest exponent.

    Shape: query (batch, length, heads, head_width).
    """
    x = _scaled(query)
    projected = project(x, features.rows(x), features.map)
    level = _finite(projected.exponent.detach().amax(-1, keepdim=True))
    return SideFeatures(x, projected, level, _added(bare(projected, level), features.added))


def key_side(key: Tensor, features: RandomFeatures, is_token: Tensor | None, *, is_causal: bool) -> SideFeatures:
    """The features of keys, 0 at pads, stabilised by the largest exponent of the sequence; causal, of it so far.

    Shape: key (batch, length, heads, head_width), is_token (batch, length).
    """
    mask = None if is_token is None else is_token[:, None, :, None]
    x = _scaled(key)
    projected = project(x, features.rows(x), features.map, mask)
    level = projected.exponent.detach().amax(-1, keepdim=True)
    level = _finite(_largest_so_far(level) if is_causal else level.amax(-2, keepdim=True))
    made = _added(bare(projected, level), features.added)
    return SideFeatures(x, projected, level, made if mask is None else made * mask)


def project(x: Tensor, rows: Tensor, feature_map: FeatureMap, is_token: Tensor | None = None) -> Projected:
    """What the map makes of scaled queries or keys; pads get the exponent −∞, which is a feature of 0.

    Shape: x (…, length, head_width), rows (width, head_width), is_token broadcasts to (…, length, 1).
    """
    u = x @ rows.mT  # (…, length, head_width) -> (…, length, width)
    squares = x.square().sum(-1, keepdim=True)
    exponent = feature_map.norm * squares if feature_map.curve is not None else _added(u, feature_map.norm * squares)
    if is_token is not None:
        exponent = exponent.masked_fill(~is_token, -torch.inf)
    return Projected(exponent, None if feature_map.curve is None else feature_map.curve(u))


def with_ones(value: Tensor) -> Tensor:
    """[V 1], whose sums hold the row sums in the last column: (batch, heads, length, head_width + 1).

    Shape: value (batch, length, heads, head_width).
    """
    return pad(_wide(value).transpose(1, 2), (0, 1), value=1.0)


def bare(projected: Projected, level: Tensor) -> Tensor:
    """The features without ε: (…, length, width)."""
    scale = projected.exponent - level
    scale = scale.exp_() if _may_overwrite() else scale.exp()
    return scale if projected.factor is None else projected.factor * scale


def gradient(side: SideFeatures, features: RandomFeatures, upstream: Tensor, states: Tensor) -> Tensor:
    """The gradient of the queries or keys `states` a side was made of, given the one of its features."""
    feature_map, rows = features.map, features.rows(side.x)
    by_exponent = upstream * bare(side.projected, side.level)
    if feature_map.curve is None:
        by_u = by_exponent
    else:
        assert feature_map.derivative is not None
        by_u = upstream * (side.projected.exponent - side.level).exp() * feature_map.derivative(side.x @ rows.mT)
    by_x = by_u @ rows
    if feature_map.norm:
        by_x = by_x + 2 * feature_map.norm * side.x * by_exponent.sum(-1, keepdim=True)
    return (by_x * states.shape[-1] ** -0.25).transpose(1, 2).to(states.dtype)


def _added(fresh: Tensor, term: Tensor | float) -> Tensor:
    """The sum, in the memory of the first where no gradient needs it: fresh memory costs as much as the sum."""
    return fresh.add_(term) if _may_overwrite() else fresh + term


def _may_overwrite() -> bool:
    """Whether fresh numbers may be overwritten: no gradient needs them, and no compiler loses track of them."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _wide(states: Tensor) -> Tensor:
    """The states in the precision of all that follows: float32, whatever autocast says, or float64 if they are."""
    return states if states.dtype == torch.float64 else states.float()


def _scaled(states: Tensor) -> Tensor:
    """Queries or keys times head_width^(-1/4), so that what softmax weighs by is exp(xᵀy)."""
    # (batch, length, heads, head_width) -> (batch, heads, length, head_width)
    return (_wide(states) * states.shape[-1] ** -0.25).transpose(1, 2)


def _largest_so_far(level: Tensor) -> Tensor:
    """The largest level up to each position: (batch, heads, length, 1)."""
    if not is_exporting():
        return level.cummax(-2).values
    # ONNX has no running maximum, so that of each row of the matrix of pairs
    position = torch.arange(level.shape[-2], device=level.device)
    return level.mT.masked_fill(position > position[:, None], -torch.inf).amax(-1, keepdim=True)


def _finite(level: Tensor) -> Tensor:
    # where there is no token at all, −∞ − (−∞) would be NaN
    return level.clamp(min=torch.finfo(level.dtype).min)
