"""Shared by the kernels: constants, loads of rows, the feature map with its derivative, and splits of sums."""

import math
from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops import kernel_support as support
from bertsmith.ops.kernel_support import Tile, Tiles, tile

NONE = tl.constexpr(-1.0e30)
"""The logarithm of 0, finite so that differences are never NaN."""
IS_INTERPRETED = tl.constexpr(support.is_interpreting())
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Curve:
    """The feature map of the kernels."""

    is_exponential: bool
    """True for exp(u + norm · ‖x‖²), False for relu(u)."""
    norm: float
    epsilon: float

    def in_exponents(self, head_width: int) -> float:
        """Return the factor of the squared norm of a query or key in a base-2 exponent."""
        return self.norm * head_width**-0.5 * math.log2(math.e)

    def in_gradients(self, head_width: int) -> float:
        """Return the factor of a query or key in the gradient of an exponent."""
        return 2 * self.norm * head_width**-0.5

    @property
    def logarithm(self) -> float:
        """The base-2 logarithm of ε."""
        return math.log2(self.epsilon) if self.epsilon > 0 else -1.0e30


def fit_tile(tile: Tile, padded: int) -> Tile:
    """Return the tile with columns that divide the padded number of features."""
    # a power of two, like the columns of every tile
    return replace(tile, columns=math.gcd(tile.columns, padded))


@triton.jit
def load_rows(states, row, head, row_stride, head_stride, is_row, WIDTH: tl.constexpr):
    """Load rows of one head, 0 at masked rows: (rows, WIDTH)."""
    column = tl.arange(0, WIDTH)
    positions = row.to(tl.int64)[:, None] * row_stride + head * head_stride + column[None, :]
    return tl.load(states + positions, mask=is_row[:, None], other=0.0)


@triton.jit
def reload_rows(states, row, head, row_stride, head_stride, is_row, WIDTH: tl.constexpr):
    """Load the same rows a second time.

    With pipelined loads Triton (3.6) allocates one buffer too few for a tile that both a product and a sum read, and
    may overwrite it before the product has read it. The eviction policy keeps the compiler from merging the loads.
    """
    column = tl.arange(0, WIDTH)
    positions = row.to(tl.int64)[:, None] * row_stride + head * head_stride + column[None, :]
    return tl.load(states + positions, mask=is_row[:, None], other=0.0, eviction_policy="evict_last")


@triton.jit
def load_matrix(matrix, feature, features, WIDTH: tl.constexpr):
    """Load rows of the random matrix, 0 beyond the last feature: (features, WIDTH)."""
    column = tl.arange(0, WIDTH)
    positions = feature[:, None] * WIDTH + column[None, :]
    return tl.load(matrix + positions, mask=(feature < features)[:, None], other=0.0)


@triton.jit
def product(left, right):
    """Return the matrix product, accumulated in float32; both sides have the dtype of the inputs."""
    if IS_INTERPRETED:
        # the interpreter stores bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def narrow_to(values, like):
    """Cast a tile to the dtype of another; float16 saturates instead of overflowing."""
    if like.dtype == tl.float16:
        values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    return values.to(like.dtype)


@triton.jit
def squares(states):
    """Return the squared norm of every row, in float32."""
    wide = states.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def weight(u, by_feature, by_row, IS_EXPONENTIAL: tl.constexpr):
    """Return the feature without ε, times a factor per column and per row (exponents for exponential maps)."""
    return tl.exp2(u * LOG2_E + by_feature - by_row) if IS_EXPONENTIAL else tl.maximum(u, 0.0) * by_feature * by_row


@triton.jit
def slope(u, by_feature, by_row, IS_EXPONENTIAL: tl.constexpr):
    """Return the derivative of `weight` with respect to u."""
    if not IS_EXPONENTIAL:
        u = tl.where(u > 0.0, 1.0, 0.0)
    return weight(u, by_feature, by_row, IS_EXPONENTIAL)


# tile.columns is the number of features whose sums a program holds; a program that holds all can finish alone
_TUNED: Tiles = {
    (2, 16): Tile(64, 256, warps=8, stages=3),
    (2, 32): Tile(64, 256, warps=8, stages=3),
    (2, 64): Tile(64, 256, warps=8, stages=3),
    (2, 128): Tile(64, 128, warps=8, stages=3),
    (4, 128): Tile(32, 32, warps=8, stages=1),
}
_DEFAULT = Tile(32, 64, warps=8, stages=1)
_PROGRAMS = 264
"""Two per multiprocessor of an H100 or H200."""
_MIN_ROWS = 512


@dataclass(frozen=True)
class RowSplits:
    """`count` splits of `rows` rows per sequence, and `blocks` blocks of features."""

    count: int
    rows: int
    blocks: int
    tile: Tile

    @property
    def is_whole(self) -> bool:
        """Whether one program processes a whole sequence and all features."""
        return self.count * self.blocks == 1

    @classmethod
    def of(
        cls,
        states: Tensor,
        sequences: int,
        max_length: int,
        padded: int,
        tiling: Tile | None = None,
        *,
        rows: int | None = None,
    ) -> "RowSplits":
        """Return enough splits to fill the GPU, each with enough rows to be worth its partial sums.

        A split is a whole number of tiles, which have `rows` rows if given. Shape: states (tokens, heads, head_width);
        `sequences` counts every head separately.
        """
        chosen = fit_tile(tiling or tile(_TUNED, _DEFAULT, states.dtype, states.shape[-1]), padded)
        chosen = replace(chosen, rows=rows or chosen.rows)
        blocks = padded // chosen.columns
        max_splits = max(1, _PROGRAMS // max(1, sequences * blocks))
        count = max(1, min(max_splits, max_length // _MIN_ROWS))
        split_rows = -(-max(1, max_length) // count)
        split_rows = -(-split_rows // chosen.rows) * chosen.rows
        return cls(-(-max(1, max_length) // split_rows), split_rows, blocks, chosen)
