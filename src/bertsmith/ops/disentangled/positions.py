"""Which row of a relative table belongs to which distance, as lists made once on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RelativePositions:
    """The relative table of one call and the row for every distance.

    Shape: vectors (rows, width); slots (2·reach + 1,), long: the row for each offset query − key from −reach to reach,
    offsets beyond being clamped; query_positions in the queries' layout: their places in their own sequences, None for
    0, 1, 2, ….
    """

    vectors: Tensor
    slots: Tensor
    query_positions: Tensor | None = None
    are_distinct: bool = False
    """No two queries of a sequence stand at one place, and all stand at places of keys: kernels rely on it."""


def linear_slots(span: int) -> Tensor:
    """One row for every offset below the span (He et al. 2021, eq. 3): (2·span + 1,), of 2·span rows."""
    return torch.arange(-span, span + 1).add(span).clamp(max=2 * span - 1)


def bucket_slots(buckets: int, max_distance: int, *, clamps_distance: bool) -> Tensor:
    """One row for every near offset, logarithmically wider buckets for the others, of 2·buckets rows.

    Offsets up to buckets / 2 have a row each; the distance farthest − 1 has the last one. From `farthest` on they all
    share the rows of ±(farthest − 1) if the distance is clamped, as in the official code; if not, as in Hugging Face's,
    the bucket number runs on and is clamped to the table: the negative side then ends on row 0.
    """
    # the ends of the list stand for everything beyond
    reach = max_distance - 1 if clamps_distance else max_distance
    near = buckets // 2
    positive = [*range(near + 1), *_far_buckets(near, max_distance, reach)]
    offsets = torch.tensor([-bucket for bucket in positive[:0:-1]] + positive)
    return (offsets + buckets).clamp(0, 2 * buckets - 1)


def _far_buckets(near: int, max_distance: int, reach: int) -> list[int]:
    """near + ⌈ln(t/near) / ln((farthest − 1)/near) · (near − 1)⌉ for t from near + 1 to reach.

    In whole numbers, because a rounding error at the edge of a bucket would take another row: the ceiling is the least
    n with ((farthest − 1)/near)ⁿ ≥ (t/near)^(near − 1).
    """
    buckets, n = [], 0
    left = near ** (near - 1)  # (farthest − 1)ⁿ · near^(near − 1)
    right = 1  # nearⁿ
    for distance in range(near + 1, reach + 1):
        power = distance ** (near - 1)
        while left < power * right:
            n, left, right = n + 1, left * (max_distance - 1), right * near
        buckets.append(near + n)
    return buckets
