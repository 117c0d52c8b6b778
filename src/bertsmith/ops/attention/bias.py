"""Relative position bias (T5, Raffel et al. 2020; MPNet, Song et al. 2020): one number per head and offset."""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_BIAS = "the scores have a relative position bias, which the kernel does not add"
"""Why fused implementations refuse a bias."""


@dataclass(frozen=True)
class RelativeBias:
    """Numbers added to the attention scores after their division by √head_width.

    Shape: by_offset (heads, 2·reach + 1): the bias of each offset query − key from −reach to reach; offsets beyond are
    clamped.
    """

    by_offset: Tensor
    first_query: int = 0
    """Position of the first query; the first key has position 0."""

    def matrix(self, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
        """Return the bias of every pair, (heads, queries, keys)."""
        reach, device = self.by_offset.shape[1] // 2, self.by_offset.device
        position = torch.arange(queries, device=device) + self.first_query
        offsets = position[:, None] - torch.arange(keys, device=device)
        return self.by_offset.to(dtype)[:, offsets.clamp(-reach, reach) + reach]


def t5_slots(buckets: int, max_distance: int | None) -> Tensor:
    """Return the row of every offset query − key from −reach to reach: `buckets` rows per side, keys before first.

    Distances below buckets / 2 have a row each; the others share rows logarithmically, and those from `max_distance`
    on have the last row. None for one row per distance.
    """
    if max_distance is None:
        side = torch.arange(buckets)
    else:
        side = torch.tensor([_bucket(distance, buckets, max_distance) for distance in range(max_distance)])
    return torch.cat([side[1:].flip(0) + buckets, side])


def _bucket(distance: int, buckets: int, max_distance: int) -> int:
    """Return near + ⌊ln(distance/near) / ln(max_distance/near) · (buckets − near)⌋ for far distances.

    In integers, because a rounding error at the edge of a bucket would select another row: the result is the greatest
    near + n with (max_distance/near)ⁿ ≤ (distance/near)^(buckets − near).
    """
    near = buckets // 2
    if distance < near:
        return distance
    far, n = buckets - near, 0
    while max_distance ** (n + 1) * near ** (far - n - 1) <= distance**far:
        n += 1
    return min(near + n, buckets - 1)
