"""Memory layout of the hidden states, buffers of position scores, and tiles of the kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

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
    max_length: int
    columns: int
    """The most columns a sequence has."""
    direction: int
    """1 for queries, −1 for keys: offsets are query − key."""
    positions: Tensor | None = None


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


def buffers(max_length: int, max_key_length: int, reach: int, *, has_positions: bool) -> tuple[Buffer, Buffer]:
    """What is held by query and by key.

    Bands follow a diagonal, which queries at places of their own and keys of another length do not have.
    """
    is_dense = has_positions or max_length != max_key_length
    by_query = Buffer.of(max_key_length, reach, is_dense=is_dense)
    return by_query, Buffer.of(max_key_length if has_positions else max_length, reach, is_dense=is_dense)


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
