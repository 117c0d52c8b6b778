"""Outputs of queries from the means that `memory` computed, and the gradient of the queries.

A query's output is Σ_m P_m mean_m with P_m = φ_qm sum_m / Σ: flash attention with rows of the random matrix as keys.
ε is the same for all features, so its contribution is one vector per sequence and head, added once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.features import LOG2_E, NONE, Curve, fit_tile, load_matrix, load_rows, product, slope
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
    query, matrix, first, length, mean, bias, feature_sums, mixed, by_row, epsilon_share,
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
    q = load_rows(query, row, head, query_row, query_head, is_row, WIDTH)
    level = tl.full([ROWS], NONE, tl.float32)
    top = tl.full([ROWS], NONE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        at = position * PADDED + feature
        weights = load_matrix(matrix, feature, features, WIDTH)
        means = tl.load(mean + at[:, None] * WIDTH + column[None, :])
        biases = tl.load(bias + at)
        u = product(q, tl.trans(weights))
        if IS_EXPONENTIAL:
            query_exponent = u * LOG2_E
            # ε is relative to the largest feature, without the weights of the features
            level = tl.maximum(level, tl.max(tl.where((feature < features)[None, :], query_exponent, NONE), 1))
            exponent = query_exponent + biases[None, :]
            larger = tl.maximum(top, tl.max(exponent, 1))
            phi = tl.exp2(exponent - larger[:, None])
            smaller = tl.exp2(top - larger)
            top = larger
            total = total * smaller
            sums = sums * smaller[:, None]
        else:
            phi = tl.maximum(u, 0.0) * biases[None, :]
        total += tl.sum(phi, 1)
        sums += product(phi.to(means.dtype), means)
    feature_sum = tl.load(feature_sums + position * (WIDTH + 1) + column)
    ones = tl.load(feature_sums + position * (WIDTH + 1) + WIDTH)
    if IS_EXPONENTIAL:
        added = tl.exp2(tl.minimum(log_epsilon + level - top, 0.0))
        total += added * ones
        normaliser = top + tl.log2(total)
    else:
        added = tl.full([ROWS], 0.0, tl.float32) + epsilon
        total += added * ones
        total = tl.where(total == 0.0, 1.0, total)
        normaliser = 1.0 / total
    sums = (sums + added[:, None] * feature_sum[None, :]) / total[:, None]
    out = row.to(tl.int64) * heads + head
    tl.store(mixed + out[:, None] * WIDTH + column[None, :], sums.to(mixed.dtype.element_ty), mask=is_row[:, None])
    tl.store(by_row + out, normaliser, mask=is_row)
    tl.store(epsilon_share + out, added / total, mask=is_row)


@triton.jit
def _query_gradient(
    query, upstream, matrix, first, length, mean, bias, feature_sums, mixed, by_row, epsilon_share, by_query, by_total,
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
    q = load_rows(query, row, head, query_row, query_head, is_row, WIDTH)
    upstream_rows = load_rows(upstream, row, head, upstream_row, upstream_head, is_row, WIDTH)
    output = load_rows(mixed, row, head, heads * WIDTH, WIDTH, is_row, WIDTH)
    normaliser = tl.load(by_row + out, mask=is_row, other=0.0)
    along = tl.sum(upstream_rows.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(by_total + out, along, mask=is_row)
    gradient = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        at = position * PADDED + feature
        weights = load_matrix(matrix, feature, features, WIDTH)
        means = tl.load(mean + at[:, None] * WIDTH + column[None, :])
        biases = tl.load(bias + at)
        u = product(q, tl.trans(weights))
        by_weight = product(upstream_rows, tl.trans(means)) - along[:, None]
        by_u = slope(u, biases[None, :], normaliser[:, None], IS_EXPONENTIAL) * by_weight
        gradient += product(by_u.to(weights.dtype), weights)
    if IS_EXPONENTIAL:
        # the output is homogeneous of degree 0 in φ, so Σ_m φ_m · ∂/∂φ_m is 0 and Σ_m by_u is minus the share of ε
        feature_sum = tl.load(feature_sums + position * (WIDTH + 1) + column)
        ones = tl.load(feature_sums + position * (WIDTH + 1) + WIDTH)
        share = tl.load(epsilon_share + out, mask=is_row, other=0.0)
        by_exponent = -share * (tl.sum(upstream_rows.to(tl.float32) * feature_sum[None, :], 1) - along * ones)
        gradient += norm_slope * by_exponent[:, None] * q.to(tl.float32)
    positions = out[:, None] * WIDTH + column[None, :]
    tl.store(by_query + positions, gradient.to(by_query.dtype.element_ty), mask=is_row[:, None])


class Reading(NamedTuple):
    """The output and, per row and head, the logarithm of its sum (for relu its inverse) and ε divided by its sum.

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
    tiling: Tile | None = None,
) -> Reading:
    """Read the memory with queries, (tokens, heads, head_width)."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    mean, bias, _, feature_sums = memory
    (tokens, heads, width), (batch, _, padded, _) = query.shape, mean.shape
    mixed = sequences.empty(query, tokens, heads, width)
    by_row, share = (sequences.empty(query, tokens, heads, dtype=torch.float32) for _ in range(2))
    chosen = fit_tile(tiling or tile(_READ, _DEFAULT, query.dtype, width), padded)
    grid = (triton.cdiv(max_length, chosen.rows), heads, batch)
    if tokens * heads * max_length:
        _read[grid](
            query, matrix, first, length, mean, bias, feature_sums, mixed, by_row, share,
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
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the queries, and the product of each output row with its gradient: (tokens, heads)."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    mean, bias, _, feature_sums = memory
    mixed, by_row, epsilon_share = reading
    (tokens, heads, width), (batch, _, padded, _) = query.shape, mean.shape
    by_query = sequences.empty(query, tokens, heads, width)
    by_total = sequences.empty(query, tokens, heads, dtype=torch.float32)
    chosen = fit_tile(tiling or tile(_BACKWARD, _DEFAULT, query.dtype, width), padded)
    grid = (triton.cdiv(max_length, chosen.rows), heads, batch)
    if tokens * heads * max_length:
        _query_gradient[grid](
            query, upstream, matrix, first, length, mean, bias, feature_sums, mixed, by_row, epsilon_share,
            by_query, by_total,
            query.stride(0), query.stride(1), upstream.stride(0), upstream.stride(1),
            heads, matrix.shape[0], curve.in_gradients(width),
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, ROWS=chosen.rows, COLUMNS=chosen.columns,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return by_query, by_total
