"""Memory layout of the hidden vectors, buffers of position scores, and tiles of the kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.ops.kernel_support import Tile, Tiles, tile

EDGE = 64
"""Maximum rows and columns of a tile; bands begin at multiples of it."""


@dataclass(frozen=True)
class Side:
    """Queries or keys, with the number of columns (positions of the other side) of each sequence.

    Shape: vectors (rows, heads, width), the last two axes contiguous; first, length, column_length (batch,), int32;
    positions (rows,) or None for 0, 1, 2, … in each sequence.
    """

    vectors: Tensor
    first: Tensor
    length: Tensor
    column_length: Tensor
    max_length: int
    columns: int
    """Largest number of columns of a sequence."""
    direction: int
    """1 for queries, −1 for keys: offsets are query − key."""
    positions: Tensor | None = None


@dataclass(frozen=True)
class Expanded:
    """A relative table with one row per possible offset, so that kernels read neighbouring offsets contiguously.

    Shape: rows (offsets, heads, width), from the offset `least` on. Offsets of `reach` and beyond share a row.
    """

    rows: Tensor
    least: int
    reach: int


@dataclass(frozen=True)
class Buffer:
    """Shape of a buffer with one number per pair: whole rows, or a band around the diagonal."""

    columns: int
    half: int
    """Positions from the start of the band to its block of rows; 0 for whole rows."""

    @classmethod
    def of(cls, columns: int, reach: int, *, is_dense: bool) -> "Buffer":
        """Return a band if it is narrower than whole rows and not `is_dense`."""
        half = -(-(reach + EDGE - 1) // EDGE) * EDGE
        width = 2 * half + EDGE
        whole = -(-columns // EDGE) * EDGE
        return cls(whole, 0) if is_dense or whole <= width else cls(width, half)


MAX_SAVED_COLUMNS = 512
"""Buffers with at most this many numbers per token and head are saved for the backward pass: about as much as the
rest of a layer saves."""


def buffers(max_length: int, max_key_length: int, reach: int, *, has_positions: bool) -> tuple[Buffer, Buffer]:
    """Return the buffers by query and by key.

    A band follows the diagonal, which does not exist if queries have explicit positions or keys have other lengths.
    """
    is_dense = has_positions or max_length != max_key_length
    by_query = Buffer.of(max_key_length, reach, is_dense=is_dense)
    return by_query, Buffer.of(max_key_length if has_positions else max_length, reach, is_dense=is_dense)


def are_saved(by_query: Buffer, by_key: Buffer) -> bool:
    """Return whether the position scores are saved for the backward pass; wide ones and bands are recomputed."""
    return by_query.half == 0 and max(by_query.columns, by_key.columns) <= MAX_SAVED_COLUMNS


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
# tile rows are queries and columns keys; in products with the table, rows are vectors and columns offsets


def forward_tile(vectors: Tensor) -> Tile:
    return _tile(FORWARD, FORWARD_DEFAULT, vectors)


def keys_tile(vectors: Tensor) -> Tile:
    return _tile(KEYS, KEYS_DEFAULT, vectors)


def queries_tile(vectors: Tensor) -> Tile:
    return _tile(QUERIES, QUERIES_DEFAULT, vectors)


def products_tile(vectors: Tensor) -> Tile:
    return _tile(PRODUCTS, PRODUCTS_DEFAULT, vectors)


def positions_tile(vectors: Tensor) -> Tile:
    return _tile(POSITIONS, POSITIONS_DEFAULT, vectors)


def _tile(tuned: Tiles, default: Tile, vectors: Tensor) -> Tile:
    if vectors.dtype == torch.float32:
        default = Tile(32, 32, warps=4, stages=1)  # twice the bytes, and products without tensor cores
    return tile(tuned, default, vectors.dtype, vectors.shape[-1])
