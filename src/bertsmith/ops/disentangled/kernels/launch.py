"""The arguments that the kernels of one launch share."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bertsmith.ops.disentangled.kernels.plan import EDGE, Buffer, Expanded, Side, are_saved, buffers
from bertsmith.ops.disentangled.kernels.positions import expand, products

LOG2_E = 1.4426950408889634
Scores = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Launch:
    """Arguments of disentangled attention over rows of tokens.

    Shape: query (rows, heads, width), key and value (key rows, heads, width), the last two axes contiguous;
    position_key, position_query (table rows, heads, width); first, length, key_first, key_length (batch,), int32;
    positions (rows,); seed (1,), int32.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    position_key: Tensor | None
    position_query: Tensor | None
    slots: Tensor | None
    first: Tensor
    length: Tensor
    key_first: Tensor
    key_length: Tensor
    positions: Tensor | None
    seed: Tensor | None
    max_length: int
    max_key_length: int
    scale: float
    dropout: float
    is_causal: bool
    has_padding: bool

    @property
    def saves_scores(self) -> bool:
        """Whether the position scores are saved for the backward pass."""
        return are_saved(*self.buffers)

    def empty(self, like: Tensor) -> Tensor:
        """Return memory for an output; zeros if there is padding, which no kernel writes."""
        return like.new_zeros(like.shape) if self.has_padding else like.new_empty(like.shape)

    @property
    def reach(self) -> int:
        """The offset from which on all offsets share a row."""
        return 0 if self.slots is None else self.slots.shape[0] // 2

    @cached_property
    def buffers(self) -> tuple[Buffer, Buffer]:
        """The buffers by query and by key."""
        return buffers(self.max_length, self.max_key_length, self.reach, has_positions=self.positions is not None)

    @cached_property
    def query_side(self) -> Side:
        return Side(
            self.query,
            self.first,
            self.length,
            self.key_length,
            self.max_length,
            self.max_key_length,
            1,
            self.positions,
        )

    @cached_property
    def key_side(self) -> Side:
        # explicit positions of queries are positions of keys
        columns, max_length = (
            (self.length, self.max_length) if self.positions is None else (self.key_length, self.max_key_length)
        )
        return Side(self.key, self.key_first, self.key_length, columns, self.max_key_length, max_length, -1)

    @cached_property
    def keys_by_offset(self) -> Expanded | None:
        """The table of position keys by offset, for queries."""
        return self._by_offset(self.position_key)

    @cached_property
    def queries_by_offset(self) -> Expanded | None:
        """The table of position queries by offset, for keys."""
        return self._by_offset(self.position_query)

    def _by_offset(self, table: Tensor | None) -> Expanded | None:
        if table is None:
            return None
        assert self.slots is not None
        queries = self.max_length if self.positions is None else self.max_key_length
        least, greatest = 1 - self.max_key_length, queries - 1
        if self.constants["HALF"]:
            edge = self.buffers[0].half + 2 * EDGE
            least, greatest = max(least, -edge), min(greatest, edge)
        return expand(table, self.slots, least, greatest)

    def position_scores(self) -> Scores:
        """Return by_query, by_key and the far scores of both sides, each (rows, heads, 2), float32.

        All are base-2 exponents.
        """
        factor = self.scale * LOG2_E
        by_query = by_key = far_query = far_key = None
        if self.keys_by_offset is not None:
            by_query = products(self.query_side, self.keys_by_offset, self.buffers[0], factor)
            far_query = self._far(self.query, self.keys_by_offset, factor)
        if self.queries_by_offset is not None:
            by_key = products(self.key_side, self.queries_by_offset, self.buffers[1], factor)
            far_key = self._far(self.key, self.queries_by_offset, factor)
        return by_query, by_key, far_query, far_key

    def _far(self, vectors: Tensor, table: Expanded, factor: float) -> Tensor | None:
        """Return the products with the first and last row of the table, for keys far ahead and behind; None if none."""
        if not self.constants["HALF"]:
            return None
        ends = torch.stack([table.rows[0], table.rows[-1]])
        return torch.einsum("thd,rhd->thr", vectors, ends).float().mul_(factor).contiguous()

    @property
    def where(self) -> tuple[Tensor | None, ...]:
        return self.positions, self.first, self.length, self.key_first, self.key_length, self.seed

    @property
    def numbers(self) -> tuple[float, float, int]:
        return self.scale * LOG2_E, self.dropout, self.reach

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.query.stride(0), self.key.stride(0), self.value.stride(0)

    @property
    def columns(self) -> tuple[int, int]:
        return self.buffers[0].columns, self.buffers[1].columns

    @cached_property
    def constants(self) -> dict[str, Any]:
        has_query, has_key = self.position_key is not None, self.position_query is not None
        return {
            "HEADS": self.query.shape[1],
            "WIDTH": self.query.shape[2],
            "HAS_QUERY": has_query,
            "HAS_KEY": has_key,
            "HAS_POSITIONS": self.positions is not None,
            "HALF": self.buffers[0].half if has_query or has_key else 0,
            "CAUSAL": self.is_causal,
            "DROPS": self.dropout > 0,
        }
