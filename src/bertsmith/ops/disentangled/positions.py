"""The row of a relative position table for every offset, computed once on the CPU."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class RelativePositions:
    """A relative position table and the row of every offset.

    Shape: vectors (rows, width); slots (2·reach + 1,), long: the row of each offset query − key from −reach to reach;
    offsets beyond are clamped; query_positions in the queries' layout, None for 0, 1, 2, ….
    """

    vectors: Tensor
    slots: Tensor
    query_positions: Tensor | None = None
    are_distinct: bool = False
    """Queries of a sequence have distinct positions, all of which are positions of keys; kernels rely on it."""

    def by_offset(self) -> "RelativePositions":
        """Return the indices of tables that have one row per offset (`mirrored_rows`)."""
        return replace(self, slots=torch.arange(self.slots.shape[0], device=self.slots.device))


def mirrored_rows(
    position_key: Tensor | None, position_query: Tensor | None, slots: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return tables of one row per offset, whose queries have the row of the negated offset.

    With them every implementation computes the position-to-content score with the row of key − query, as printed in
    the paper. Reversing the rows of the table itself would be wrong: its first and last row are not mirror images.
    Shape: position_key, position_query (rows, heads, head_width) -> (offsets, heads, head_width) each.
    """
    key = None if position_key is None else position_key[slots]
    return key, None if position_query is None else position_query[slots.flip(0)]


def linear_slots(span: int) -> Tensor:
    """Return one row per offset below the span (He et al. 2021, eq. 3): (2·span + 1,), indices of 2·span rows."""
    return torch.arange(-span, span + 1).add(span).clamp(max=2 * span - 1)


def bucket_slots(buckets: int, max_distance: int, *, clamps_distance: bool) -> Tensor:
    """Return one row per near offset and logarithmic buckets for the others, indices of 2·buckets rows.

    Offsets up to buckets / 2 have a row each; the distance max_distance − 1 has the last one. With `clamps_distance`,
    as in the official code, distances from max_distance on use the rows of ±(max_distance − 1); without it, as in
    Hugging Face's code, the bucket number is clamped to the table instead, so the negative side ends on row 0.
    """
    # the ends of the list serve all offsets beyond
    reach = max_distance - 1 if clamps_distance else max_distance
    near = buckets // 2
    positive = [*range(near + 1), *_far_buckets(near, max_distance, reach)]
    offsets = torch.tensor([-bucket for bucket in positive[:0:-1]] + positive)
    return (offsets + buckets).clamp(0, 2 * buckets - 1)


def _far_buckets(near: int, max_distance: int, reach: int) -> list[int]:
    """Return near + ⌈ln(t/near) / ln((max_distance − 1)/near) · (near − 1)⌉ for t from near + 1 to reach.

    In integers, because a rounding error at the edge of a bucket would select another row: the ceiling is the least n
    with ((max_distance − 1)/near)ⁿ ≥ (t/near)^(near − 1).
    """
    buckets, n = [], 0
    left = near ** (near - 1)  # (max_distance − 1)ⁿ · near^(near − 1)
    right = 1  # nearⁿ
    for distance in range(near + 1, reach + 1):
        power = distance ** (near - 1)
        while left < power * right:
            n, left, right = n + 1, left * (max_distance - 1), right * near
        buckets.append(near + n)
    return buckets
