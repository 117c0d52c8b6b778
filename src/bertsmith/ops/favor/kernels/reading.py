"""What queries take from the means that `memory` left behind, and the gradient of the queries.

A query's output is Σ_m P_m mean_m with P_m = φ_qm sum_m / Σ: flash attention with rows of the random matrix as keys.
ε is the same for all features, so what it reaches is one vector for each sequence and head, added once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.features import LOG2_E, NONE, Curve, fitting, matrix_of, product, rows_of, slope
from bertsmith.ops.favor.kernels.memory import KeyMemory
from bertsmith.ops.kernel_support import SequenceRows, Tile, Tiles, tile

_READ: Tiles = {(2, width): Tile(64, 32, warps=4, stages=3) for width in (16, 32, 64)} | {
    (2, 128): Tile(128, 64, warps=8)
}
_BACKWARD: Tiles = {**_READ, (2, 128): Tile(64, 64, warps=8)}
# without tensor cores, which float32 does not use here, larger tiles do not fit into registers
_DEFAULT = Tile(32, 32, warps=8, stages=1)


@triton.jit
def _read(
    query, matrix, first, length, mean, bias, reach, mixed, by_row, epsilon_share,
    query_row, query_head, heads, features, epsilon, log_epsilon,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    if tl.program_id(0) * ROWS >= count:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < count
    row += tl.load(first + sequence)
    position = (sequence * heads + head).to(tl.int64)
    column = tl.arange(0, WIDTH)
    q = rows_of(query, row, head, query_row, query_head, is_row, WIDTH)
    level = tl.full([ROWS], NONE, tl.float32)
    top = tl.full([ROWS], NONE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        at = position * PADDED + feature
        weights = matrix_of(matrix, feature, features, WIDTH)
        means = tl.load(mean + at[:, None] * WIDTH + column[None, :])
        biases = tl.load(bias + at)
        u = product(q, tl.trans(weights))
        if IS_EXPONENTIAL:
            bare = u * LOG2_E
            # ε is relative to the largest feature, which the weights of the features do not move
            level = tl.maximum(level, tl.max(tl.where((feature < features)[None, :], bare, NONE), 1))
            exponent = bare + biases[None, :]
            larger = tl.maximum(top, tl.max(exponent, 1))
            made = tl.exp2(exponent - larger[:, None])
            smaller = tl.exp2(top - larger)
            top = larger
            total = total * smaller
            sums = sums * smaller[:, None]
        else:
            made = tl.maximum(u, 0.0) * biases[None, :]
        total += tl.sum(made, 1)
        sums += product(made.to(means.dtype), means)
    reached = tl.load(reach + position * (WIDTH + 1) + column)
    ones = tl.load(reach + position * (WIDTH + 1) + WIDTH)
    if IS_EXPONENTIAL:
        added = tl.exp2(tl.minimum(log_epsilon + level - top, 0.0))
        total += added * ones
        normaliser = top + tl.log2(total)
    else:
        added = tl.full([ROWS], 0.0, tl.float32) + epsilon
        total += added * ones
        total = tl.where(total == 0.0, 1.0, total)
        normaliser = 1.0 / total
    sums = (sums + added[:, None] * reached[None, :]) / total[:, None]
    out = row.to(tl.int64) * heads + head
    tl.store(mixed + out[:, None] * WIDTH + column[None, :], sums.to(mixed.dtype.element_ty), mask=is_row[:, None])
    tl.store(by_row + out, normaliser, mask=is_row)
    tl.store(epsilon_share + out, added / total, mask=is_row)


@triton.jit
def _query_gradient(
    query, upstream, matrix, first, length, mean, bias, reach, mixed, by_row, epsilon_share, by_query, by_total,
    query_row, query_head, upstream_row, upstream_head, heads, features, norm_slope,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    if tl.program_id(0) * ROWS >= count:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < count
    row += tl.load(first + sequence)
    position = (sequence * heads + head).to(tl.int64)
    column = tl.arange(0, WIDTH)
    out = row.to(tl.int64) * heads + head
    q = rows_of(query, row, head, query_row, query_head, is_row, WIDTH)
    given = rows_of(upstream, row, head, upstream_row, upstream_head, is_row, WIDTH)
    made = rows_of(mixed, row, head, heads * WIDTH, WIDTH, is_row, WIDTH)
    normaliser = tl.load(by_row + out, mask=is_row, other=0.0)
    along = tl.sum(given.to(tl.float32) * made.to(tl.float32), 1)
    tl.store(by_total + out, along, mask=is_row)
    gradient = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        at = position * PADDED + feature
        weights = matrix_of(matrix, feature, features, WIDTH)
        means = tl.load(mean + at[:, None] * WIDTH + column[None, :])
        biases = tl.load(bias + at)
        u = product(q, tl.trans(weights))
        by_weight = product(given, tl.trans(means)) - along[:, None]
        by_u = slope(u, biases[None, :], normaliser[:, None], IS_EXPONENTIAL) * by_weight
        gradient += product(by_u.to(weights.dtype), weights)
    if IS_EXPONENTIAL:
        # Σ_m of by_u is what ε leaves of Σ_m φ_m · (its gradient), which is 0: the output has degree 0 in φ
        reached = tl.load(reach + position * (WIDTH + 1) + column)
        ones = tl.load(reach + position * (WIDTH + 1) + WIDTH)
        share = tl.load(epsilon_share + out, mask=is_row, other=0.0)
        by_exponent = -share * (tl.sum(given.to(tl.float32) * reached[None, :], 1) - along * ones)
        gradient += norm_slope * by_exponent[:, None] * q.to(tl.float32)
    positions = out[:, None] * WIDTH + column[None, :]
    tl.store(by_query + positions, gradient.to(by_query.dtype.element_ty), mask=is_row[:, None])


class Reading(NamedTuple):
    """The output, and of every row and head the logarithm of its sum (for a curve its inverse) and ε over its sum.

    Shape: mixed (tokens, heads, head_width), by_row, epsilon_share (tokens, heads).
    """

    mixed: Tensor
    by_row: Tensor
    epsilon_share: Tensor


def read(
    query: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    memory: KeyMemory,
    curve: Curve,
    asked: Tile | None = None,
) -> Reading:
    """Read the memory with queries, (tokens, heads, head_width)."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    mean, bias, _, reach = memory
    (tokens, heads, width), (batch, _, padded, _) = query.shape, mean.shape
    mixed = sequences.empty(query, tokens, heads, width)
    by_row, share = (sequences.empty(query, tokens, heads, dtype=torch.float32) for _ in range(2))
    chosen = fitting(asked or tile(_READ, _DEFAULT, query.dtype, width), padded)
    grid = (triton.cdiv(max_length, chosen.rows), heads, batch)
    if tokens * heads * max_length:
        _read[grid](
            query, matrix, first, length, mean, bias, reach, mixed, by_row, share,
            query.stride(0), query.stride(1), heads, matrix.shape[0], curve.epsilon, curve.logarithm,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, ROWS=chosen.rows, COLUMNS=chosen.columns,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return Reading(mixed, by_row, share)


def query_gradient(
    query: Tensor,
    upstream: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    memory: KeyMemory,
    reading: Reading,
    curve: Curve,
    asked: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of the queries, and the product of each row of the output with its own gradient: (tokens, heads)."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    mean, bias, _, reach = memory
    mixed, by_row, epsilon_share = reading
    (tokens, heads, width), (batch, _, padded, _) = query.shape, mean.shape
    by_query = sequences.empty(query, tokens, heads, width)
    by_total = sequences.empty(query, tokens, heads, dtype=torch.float32)
    chosen = fitting(asked or tile(_BACKWARD, _DEFAULT, query.dtype, width), padded)
    grid = (triton.cdiv(max_length, chosen.rows), heads, batch)
    if tokens * heads * max_length:
        _query_gradient[grid](
            query, upstream, matrix, first, length, mean, bias, reach, mixed, by_row, epsilon_share,
            by_query, by_total,
            query.stride(0), query.stride(1), upstream.stride(0), upstream.stride(1),
            heads, matrix.shape[0], curve.in_gradients(width),
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, ROWS=chosen.rows, COLUMNS=chosen.columns,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return by_query, by_total
