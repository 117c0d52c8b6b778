"""Which row of a relative table stands for each pair of positions."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RelativePositions:
    """The relative table of an encoder and the way into it: made once for a call, shared by all layers.

    Shape: vectors (rows, width); slots (2 · reach + 1,); query_positions as the queries lie.
    """

    vectors: Tensor
    slots: Tensor
    """The row for every offset query − key; offsets beyond the ends take the end's."""
    query_positions: Tensor | None = None
    """Places of the queries in their own sequences; None for 0, 1, 2 …"""
