"""How a call is cut: where states lie, what the buffers hold, and the tiles."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bertsmith.ops.disentangled.kernels.positions import expanded, products
from bertsmith.ops.kernel_support import Tile, Tiles, tile

EDGE = 64
"""Tiles have at most so many rows and columns; bands begin at multiples of it."""


@dataclass(frozen=True)
class Side:
    """The queries or the keys, and how many columns, places of the other side, each of their sequences has.

    Shape: states (rows, heads, width), the last two axes contiguous; first, length, column_length (batch,), int32;
    places (rows,) or None for 0, 1, 2, … in each sequence.
    """

    states: Tensor
    first: Tensor
    length: Tensor
    column_length: Tensor
    longest: int
    columns: int
    """The most columns a sequence has."""
    direction: int
    """1 for queries, −1 for keys: offsets are query − key."""
    places: Tensor | None = None


@dataclass(frozen=True)
class Expanded:
    """A relative table with one row for every offset a pair can have: kernels read neighbours side by side.

    Shape: rows (offsets, heads, width), from the offset `least` on. Offsets of `reach` and beyond share a row.
    """

    rows: Tensor
    least: int
    reach: int


@dataclass(frozen=True)
class Buffer:
    """What one number per pair is kept of: whole rows, or a band around the diagonal."""

    columns: int
    half: int
    """Places before a block of rows where its band begins; 0 for whole rows."""

    @classmethod
    def of(cls, columns: int, reach: int, *, is_dense: bool) -> "Buffer":
        """Bands where they are narrower than the rows; `is_dense` rules them out."""
        half = -(-(reach + EDGE - 1) // EDGE) * EDGE
        width = 2 * half + EDGE
        whole = -(-columns // EDGE) * EDGE
        return cls(whole, 0) if is_dense or whole <= width else cls(width, half)


KEPT_COLUMNS = 512
"""Buffers of at most so many numbers per token and head are kept for the backward pass: 2 × 8 states of 64 numbers,
about what the rest of a layer keeps."""


def buffers(longest: int, key_longest: int, reach: int, *, has_places: bool) -> tuple[Buffer, Buffer]:
    """What is held by query and by key.

    Bands follow a diagonal, which queries at places of their own and keys of another length do not have.
    """
    is_dense = has_places or longest != key_longest
    by_query = Buffer.of(key_longest, reach, is_dense=is_dense)
    return by_query, Buffer.of(key_longest if has_places else longest, reach, is_dense=is_dense)


def are_kept(by_query: Buffer, by_key: Buffer) -> bool:
    """Whether the backward pass is handed the position scores; wide ones and bands are computed anew."""
    return by_query.half == 0 and max(by_query.columns, by_key.columns) <= KEPT_COLUMNS


FORWARD: Tiles = {(2, 64): Tile(64, 32, warps=4, stages=3)}
FORWARD_DEFAULT = Tile(64, 64, warps=4, stages=2)
KEYS: Tiles = {(2, 64): Tile(64, 64, warps=4, stages=3)}
KEYS_DEFAULT = Tile(64, 64, warps=4, stages=2)
QUERIES: Tiles = {(2, 64): Tile(64, 64, warps=4, stages=3)}
QUERIES_DEFAULT = Tile(64, 64, warps=4, stages=2)
PRODUCTS: Tiles = {(2, 64): Tile(64, 64, warps=4, stages=4)}
PRODUCTS_DEFAULT = Tile(64, 64, warps=4, stages=2)
POSITIONS: Tiles = {}
POSITIONS_DEFAULT = Tile(64, 64, warps=4, stages=2)
# rows are queries and columns keys, in all passes; of the position products, states and offsets


def forward_tile(states: Tensor) -> Tile:
    return _tile(FORWARD, FORWARD_DEFAULT, states)


def keys_tile(states: Tensor) -> Tile:
    return _tile(KEYS, KEYS_DEFAULT, states)


def queries_tile(states: Tensor) -> Tile:
    return _tile(QUERIES, QUERIES_DEFAULT, states)


def products_tile(states: Tensor) -> Tile:
    return _tile(PRODUCTS, PRODUCTS_DEFAULT, states)


def positions_tile(states: Tensor) -> Tile:
    return _tile(POSITIONS, POSITIONS_DEFAULT, states)


def _tile(tuned: Tiles, default: Tile, states: Tensor) -> Tile:
    if states.dtype == torch.float32:
        default = Tile(32, 32, warps=4, stages=1)  # twice the bytes, and products without tensor cores
    return tile(tuned, default, states.dtype, states.shape[-1])


LOG2_E = 1.4426950408889634
Scores = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Call:
    """Disentangled attention over rows of tokens.

    Shape: query (rows, heads, width), key and value (key rows, heads, width), the last two axes contiguous;
    position_key, position_query (table rows, heads, width); first, length, key_first, key_length (batch,), int32;
    places (rows,); seed (1,), int32.
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
    places: Tensor | None
    seed: Tensor | None
    longest: int
    key_longest: int
    scale: float
    dropout: float
    is_causal: bool
    has_pads: bool

    @property
    def keeps_scores(self) -> bool:
        """Whether the backward pass is handed the position scores."""
        return are_kept(*self.buffers)

    def fresh(self, like: Tensor) -> Tensor:
        """Room for a result by row; zeros where some rows are nobody's and no kernel writes them."""
        return like.new_zeros(like.shape) if self.has_pads else like.new_empty(like.shape)

    @property
    def reach(self) -> int:
        """The offset from which on all share a row."""
        return 0 if self.slots is None else self.slots.shape[0] // 2

    @cached_property
    def buffers(self) -> tuple[Buffer, Buffer]:
        """What is held by query and by key."""
        return buffers(self.longest, self.key_longest, self.reach, has_places=self.places is not None)

    @cached_property
    def query_side(self) -> Side:
        return Side(
            self.query, self.first, self.length, self.key_length, self.longest, self.key_longest, 1, self.places
        )

    @cached_property
    def key_side(self) -> Side:
        # places of queries are places among the keys
        columns, longest = (self.length, self.longest) if self.places is None else (self.key_length, self.key_longest)
        return Side(self.key, self.key_first, self.key_length, columns, self.key_longest, longest, -1)

    @cached_property
    def keys_by_offset(self) -> Expanded | None:
        """What the queries look positions up in."""
        return self._by_offset(self.position_key)

    @cached_property
    def queries_by_offset(self) -> Expanded | None:
        """What the keys look positions up in."""
        return self._by_offset(self.position_query)

    def _by_offset(self, table: Tensor | None) -> Expanded | None:
        if table is None:
            return None
        assert self.slots is not None
        queries = self.longest if self.places is None else self.key_longest
        least, greatest = 1 - self.key_longest, queries - 1
        if self.constants["HALF"]:
            edge = self.buffers[0].half + 2 * EDGE
            least, greatest = max(least, -edge), min(greatest, edge)
        return expanded(table, self.slots, least, greatest)

    def position_scores(self) -> Scores:
        """by_query, by_key, and the same of what is far for each side: (rows, heads, 2), float32.

        All in units of the base-2 exponent.
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

    def _far(self, states: Tensor, table: Expanded, factor: float) -> Tensor | None:
        """The products with the rows for everything ahead and everything behind, where there is anything so far."""
        if not self.constants["HALF"]:
            return None
        ends = torch.stack([table.rows[0], table.rows[-1]])
        return torch.einsum("thd,rhd->thr", states, ends).float().mul_(factor).contiguous()

    @property
    def where(self) -> tuple[Tensor | None, ...]:
        return self.places, self.first, self.length, self.key_first, self.key_length, self.seed

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
            "HAS_PLACES": self.places is not None,
            "HALF": self.buffers[0].half if has_query or has_key else 0,
            "CAUSAL": self.is_causal,
            "DROPS": self.dropout > 0,
        }
