"""Shared by the kernels: constants, tiles of rows, the feature map with its derivative, and how sums are split."""

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
    """The feature map as the kernels know it."""

    is_exponential: bool
    """exp(u + norm · ‖x‖²) if so, relu(u) otherwise."""
    norm: float
    epsilon: float

    def in_exponents(self, head_width: int) -> float:
        """What ‖states‖² is multiplied by in an exponent of base 2."""
        return self.norm * head_width**-0.5 * math.log2(math.e)

    def in_gradients(self, head_width: int) -> float:
        """What states are multiplied by in the gradient of an exponent."""
        return 2 * self.norm * head_width**-0.5

    @property
    def logarithm(self) -> float:
        """Of ε, in base 2."""
        return math.log2(self.epsilon) if self.epsilon > 0 else -1.0e30


def fitting(tile: Tile, padded: int) -> Tile:
    """The tile with columns that divide the padded number of features."""
    # the greatest common divisor is a power of two, as the columns of every tile are
    return replace(tile, columns=math.gcd(tile.columns, padded))


@triton.jit
def rows_of(states, row, head, row_stride, head_stride, is_row, WIDTH: tl.constexpr):
    """Rows of one head, 0 where there is none: (rows, WIDTH)."""
    column = tl.arange(0, WIDTH)
    positions = row.to(tl.int64)[:, None] * row_stride + head * head_stride + column[None, :]
    return tl.load(states + positions, mask=is_row[:, None], other=0.0)


@triton.jit
def rows_again(states, row, head, row_stride, head_stride, is_row, WIDTH: tl.constexpr):
    """The same rows by a load of their own.

    With loads under way Triton (3.6) keeps one buffer too few of a tile that a product and a sum both read, and may
    fill it again before the product has read it. The policy keeps the two loads from being made one.
    """
    column = tl.arange(0, WIDTH)
    positions = row.to(tl.int64)[:, None] * row_stride + head * head_stride + column[None, :]
    return tl.load(states + positions, mask=is_row[:, None], other=0.0, eviction_policy="evict_last")


@triton.jit
def matrix_of(matrix, feature, features, WIDTH: tl.constexpr):
    """Rows of the random matrix, 0 for features beyond the last: (features, WIDTH)."""
    column = tl.arange(0, WIDTH)
    positions = feature[:, None] * WIDTH + column[None, :]
    return tl.load(matrix + positions, mask=(feature < features)[:, None], other=0.0)


@triton.jit
def product(left, right):
    """The matrix product, summed in float32; both sides in the precision of the inputs."""
    if IS_INTERPRETED:
        # it would multiply the bits of bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def narrowed(made, like):
    """The tile in the precision of another; float16 keeps its largest number instead of ∞."""
    if like.dtype == tl.float16:
        made = tl.minimum(tl.maximum(made, -65504.0), 65504.0)
    return made.to(like.dtype)


@triton.jit
def squares(states):
    """‖states‖² of every row, in float32."""
    wide = states.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def weight(u, by_feature, by_row, IS_EXPONENTIAL: tl.constexpr):
    """The feature without ε times what belongs to its column and its row; both broadcast to the shape of u."""
    return tl.exp2(u * LOG2_E + by_feature - by_row) if IS_EXPONENTIAL else tl.maximum(u, 0.0) * by_feature * by_row


@triton.jit
def slope(u, by_feature, by_row, IS_EXPONENTIAL: tl.constexpr):
    """The derivative of `weight` by u."""
    if not IS_EXPONENTIAL:
        u = tl.where(u > 0.0, 1.0, 0.0)
    return weight(u, by_feature, by_row, IS_EXPONENTIAL)


# tile.columns is the block of features a program holds sums for: a program that holds all of them can finish alone.
_TUNED: Tiles = {
    (2, 16): Tile(64, 256, warps=8, stages=3),
    (2, 32): Tile(64, 256, warps=8, stages=3),
    (2, 64): Tile(64, 256, warps=8, stages=3),
    (2, 128): Tile(64, 128, warps=8, stages=3),
    (4, 128): Tile(32, 32, warps=8, stages=1),
}
_DEFAULT = Tile(32, 64, warps=8, stages=1)
_PROGRAMS = 264
"""Two for each multiprocessor of the largest GPU in use."""
_FEWEST_ROWS = 512


@dataclass(frozen=True)
class RowSplits:
    """`count` splits of `rows` rows for each sequence, and `blocks` blocks of features."""

    count: int
    rows: int
    blocks: int
    tile: Tile

    @property
    def is_whole(self) -> bool:
        """Whether one program sees a whole sequence and all features."""
        return self.count * self.blocks == 1

    @classmethod
    def of(cls, states: Tensor, sequences: int, max_length: int, padded: int, asked: Tile | None) -> "RowSplits":
        """Enough programs to fill the GPU, none with too few rows to pay for its partial sums.

        Shape: states (tokens, heads, head_width); sequences counts each head as its own.
        """
        chosen = fitting(asked or tile(_TUNED, _DEFAULT, states.dtype, states.shape[-1]), padded)
        blocks = padded // chosen.columns
        target = max(1, _PROGRAMS // max(1, sequences * blocks))
        count = max(1, min(target, max_length // _FEWEST_ROWS))
        rows = -(-max(1, max_length) // count)
        rows = -(-rows // chosen.rows) * chosen.rows
        return cls(-(-max(1, max_length) // rows), rows, blocks, chosen)
