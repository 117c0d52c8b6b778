"""Stabilised features, computed as (exponent, factor) until the stabiliser is known, and their gradient.

With x the query or key times head_width^(-1/4), and u = Wx:

    feature = factor · exp(exponent − level) + ε

The level cancels in the normalised output, so it is a constant for the gradient. It is the largest exponent of each
query, and of all keys of a sequence; causal attention uses the keys up to each position only.
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
    """Random matrix and feature map of linear attention.

    Shape: random_matrix (features, head_width).
    """

    random_matrix: Tensor
    feature_map: str = "softmax"
    epsilon: float | None = None
    """Added to every feature; None for the default of the map."""

    def __post_init__(self) -> None:
        if self.feature_map not in FEATURE_MAPS:
            raise InputError(f"feature_map is {self.feature_map!r}; {nearest(self.feature_map, FEATURE_MAPS)}")

    @property
    def map(self) -> FeatureMap:
        return FEATURE_MAPS[self.feature_map]

    @property
    def added_epsilon(self) -> float:
        """The ε that is added to every feature."""
        return self.map.epsilon if self.epsilon is None else self.epsilon

    @property
    def width(self) -> int:
        """The number of features of a query or key."""
        return self.map.width(self.random_matrix.shape[0])

    def rows(self, x: Tensor) -> Tensor:
        """Return one row of the random matrix per feature, in the dtype of x: (width, head_width)."""
        columns = self.random_matrix.shape[-1]
        if columns != x.shape[-1]:
            raise InputError(f"random_matrix has {columns} columns; allowed: the head width {x.shape[-1]}")
        return self.map.widened(self.random_matrix.to(x.dtype))


class Projected(NamedTuple):
    """Features before stabilisation.

    Shape: exponent (…, length, width or 1), factor (…, length, width) or None for 1.
    """

    exponent: Tensor
    factor: Tensor | None


class SideFeatures(NamedTuple):
    """Scaled queries or keys and their features.

    Shape: x (batch, heads, length, head_width), level (batch, heads, length or 1, 1), features (batch, heads, length,
    width).
    """

    x: Tensor
    projected: Projected
    level: Tensor
    features: Tensor


def query_side(query: Tensor, features: RandomFeatures) -> SideFeatures:
    """Return the features of queries, each stabilised by its largest exponent.

    Shape: query (batch, length, heads, head_width).
    """
    x = _scaled(query)
    projected = project(x, features.rows(x), features.map)
    level = _finite(projected.exponent.detach().amax(-1, keepdim=True))
    return SideFeatures(x, projected, level, _add(without_epsilon(projected, level), features.added_epsilon))


def key_side(key: Tensor, features: RandomFeatures, is_token: Tensor | None, *, is_causal: bool) -> SideFeatures:
    """Return the features of keys, 0 at padding, stabilised by the largest exponent of the sequence (causal: so far).

    Shape: key (batch, length, heads, head_width), is_token (batch, length).
    """
    mask = None if is_token is None else is_token[:, None, :, None]
    x = _scaled(key)
    projected = project(x, features.rows(x), features.map, mask)
    level = projected.exponent.detach().amax(-1, keepdim=True)
    level = _finite(_largest_so_far(level) if is_causal else level.amax(-2, keepdim=True))
    values = _add(without_epsilon(projected, level), features.added_epsilon)
    return SideFeatures(x, projected, level, values if mask is None else values * mask)


def project(x: Tensor, rows: Tensor, feature_map: FeatureMap, is_token: Tensor | None = None) -> Projected:
    """Project scaled queries or keys; padding gets the exponent −∞, a feature of 0.

    Shape: x (…, length, head_width), rows (width, head_width), is_token broadcasts to (…, length, 1).
    """
    u = x @ rows.mT  # (…, length, head_width) -> (…, length, width)
    squares = x.square().sum(-1, keepdim=True)
    exponent = feature_map.norm * squares if feature_map.curve is not None else _add(u, feature_map.norm * squares)
    if is_token is not None:
        exponent = exponent.masked_fill(~is_token, -torch.inf)
    return Projected(exponent, None if feature_map.curve is None else feature_map.curve(u))


def with_ones(value: Tensor) -> Tensor:
    """Return [V 1], whose sums have the row sums in the last column: (batch, heads, length, head_width + 1).

    Shape: value (batch, length, heads, head_width).
    """
    return pad(_wide(value).transpose(1, 2), (0, 1), value=1.0)


def without_epsilon(projected: Projected, level: Tensor) -> Tensor:
    """Return the features without ε: (…, length, width)."""
    scale = projected.exponent - level
    scale = scale.exp_() if _may_overwrite() else scale.exp()
    return scale if projected.factor is None else projected.factor * scale


def gradient(side: SideFeatures, features: RandomFeatures, upstream: Tensor, vectors: Tensor) -> Tensor:
    """Return the gradient of the queries or keys `vectors` from the gradient of their features."""
    feature_map, rows = features.map, features.rows(side.x)
    by_exponent = upstream * without_epsilon(side.projected, side.level)
    if feature_map.curve is None:
        by_u = by_exponent
    else:
        assert feature_map.derivative is not None
        by_u = upstream * (side.projected.exponent - side.level).exp() * feature_map.derivative(side.x @ rows.mT)
    by_x = by_u @ rows
    if feature_map.norm:
        by_x = by_x + 2 * feature_map.norm * side.x * by_exponent.sum(-1, keepdim=True)
    return (by_x * vectors.shape[-1] ** -0.25).transpose(1, 2).to(vectors.dtype)


def _add(temporary: Tensor, term: Tensor | float) -> Tensor:
    """Return the sum, in place where no gradient needs the first: an allocation costs as much as the sum."""
    return temporary.add_(term) if _may_overwrite() else temporary + term


def _may_overwrite() -> bool:
    """Return whether temporary tensors may be overwritten: no gradient needs them, and no compiler traces them."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in float64 if it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _scaled(tensor: Tensor) -> Tensor:
    """Return queries or keys times head_width^(-1/4), so that the softmax kernel is exp(xᵀy)."""
    # (batch, length, heads, head_width) -> (batch, heads, length, head_width)
    return (_wide(tensor) * tensor.shape[-1] ** -0.25).transpose(1, 2)


def _largest_so_far(level: Tensor) -> Tensor:
    """Return the largest level up to each position: (batch, heads, length, 1)."""
    if not is_exporting():
        return level.cummax(-2).values
    # ONNX has no cumulative maximum, so take the maximum of each row of the matrix of pairs
    position = torch.arange(level.shape[-2], device=level.device)
    return level.mT.masked_fill(position > position[:, None], -torch.inf).amax(-1, keepdim=True)


def _finite(level: Tensor) -> Tensor:
    # without any token, −∞ − (−∞) would be NaN
    return level.clamp(min=torch.finfo(level.dtype).min)
