"""Gradients of keys and values: sums over queries per feature, and the gradient of every key from these sums.

With P_qm the weight of feature m in query q, and δ_q the product of the output's row with its gradient:

    T_m = Σ_q P_qm · gradient_q,  t_m = Σ_q P_qm δ_q
    by value_k = Σ_m φ_km / sum_m · T_m,  by exponent_km = (φ_km − ε) / sum_m · (T_m · value_k − t_m)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.features import (
    NONE,
    Curve,
    RowSplits,
    fit_tile,
    load_matrix,
    load_rows,
    product,
    reload_rows,
    slope,
    squares,
    weight,
)
from bertsmith.ops.favor.kernels.memory import KeyMemory
from bertsmith.ops.favor.kernels.reading import Reading
from bertsmith.ops.kernel_support import SequenceRows, Tile, Tiles, tile

_TUNED: Tiles = {
    **{(2, width): Tile(64, 32, warps=4, stages=3) for width in (16, 32, 64)},
    (2, 128): Tile(64, 32, warps=8),
}
# without tensor cores, which float32 does not use here, larger tiles do not fit into registers
_DEFAULT = Tile(32, 32, warps=8, stages=1)


@triton.jit
def _finish(sums, along, added, added_along, biases, shifts, count, epsilon, log_epsilon, IS_EXPONENTIAL: tl.constexpr):
    """Return T and t with ε, divided by min(n, 1024), the scale of the shares in `memory`, and Σ_m ε / sum_m · T_m."""
    share = tl.minimum(tl.maximum(count, 1).to(tl.float32), 1024.0)
    if IS_EXPONENTIAL:
        size = tl.exp2(biases)
        part = tl.where(biases > NONE / 2, tl.exp2(tl.minimum(log_epsilon - biases, 0.0)), 0.0)
    else:
        size = biases
        part = epsilon * shifts / share
    sums += size[:, None] * added[None, :]
    along += size * added_along
    return sums / share, along / share, tl.sum(part[:, None] * sums, 0)


@triton.jit(do_not_specialize=["splits", "split_rows"])
def _gather(
    query, upstream, matrix, first, length, key_length, bias, shift, by_row, epsilon_share, by_total,
    sums_out, along_out, floor_out, partial_sums, partial_along, partial_added,
    query_row, query_head, upstream_row, upstream_head,
    heads, splits, split_rows, features, epsilon, log_epsilon,
    IS_EXPONENTIAL: tl.constexpr, IS_WHOLE: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    head, split, sequence = tl.program_id(0), tl.program_id(1) % splits, tl.program_id(1) // splits
    position = (sequence * heads + head).to(tl.int64)
    begin = tl.load(first + sequence)
    count = tl.load(length + sequence)
    feature = tl.program_id(2) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    weights = load_matrix(matrix, feature, features, WIDTH)
    biases = tl.load(bias + position * PADDED + feature)
    sums = tl.zeros([FEATURES, WIDTH], tl.float32)
    along = tl.zeros([FEATURES], tl.float32)
    added = tl.zeros([WIDTH], tl.float32)
    added_along = tl.sum(along, 0)
    end = tl.minimum(count, (split + 1) * split_rows)
    for start in range(split * split_rows, end, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = row < end
        row += begin
        at = row.to(tl.int64) * heads + head
        q = load_rows(query, row, head, query_row, query_head, is_row, WIDTH)
        upstream_rows = load_rows(upstream, row, head, upstream_row, upstream_head, is_row, WIDTH)
        if IS_EXPONENTIAL:
            normaliser = tl.load(by_row + at, mask=is_row, other=-NONE)
        else:
            normaliser = tl.load(by_row + at, mask=is_row, other=0.0)
        delta = tl.load(by_total + at, mask=is_row, other=0.0)
        share = tl.load(epsilon_share + at, mask=is_row, other=0.0)
        u = product(weights, tl.trans(q))
        phi = weight(u, biases[:, None], normaliser[None, :], IS_EXPONENTIAL)
        sums += product(phi.to(upstream_rows.dtype), upstream_rows)
        along += tl.sum(phi * delta[None, :], 1)
        again = reload_rows(upstream, row, head, upstream_row, upstream_head, is_row, WIDTH)
        added += tl.sum(share[:, None] * again.to(tl.float32), 0)
        added_along += tl.sum(share * delta, 0)
    if IS_WHOLE:
        shifts = tl.load(shift + position * PADDED + feature)
        keys = tl.load(key_length + sequence)
        sums, along, floor = _finish(
            sums, along, added, added_along, biases, shifts, keys, epsilon, log_epsilon, IS_EXPONENTIAL
        )
        at = position * PADDED + feature
        tl.store(sums_out + at[:, None] * WIDTH + column[None, :], sums.to(sums_out.dtype.element_ty))
        tl.store(along_out + at, along)
        tl.store(floor_out + position * WIDTH + column, floor)
    else:
        part = position * splits + split
        at = part * PADDED + feature
        tl.store(partial_sums + at[:, None] * WIDTH + column[None, :], sums)
        tl.store(partial_along + at, along)
        # the same for every block of features
        if tl.program_id(2) == 0:
            tl.store(partial_added + part * (WIDTH + 1) + column, added)
            tl.store(partial_added + part * (WIDTH + 1) + WIDTH, added_along)


@triton.jit(do_not_specialize=["splits"])
def _join(
    partial_sums, partial_along, partial_added, key_length, bias, shift, sums_out, along_out, floor_out,
    heads, splits, epsilon, log_epsilon,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    position = (sequence * heads + head).to(tl.int64)
    feature = tl.arange(0, ALL)
    is_feature = feature < PADDED
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ALL, COLUMNS], tl.float32)
    along = tl.zeros([ALL], tl.float32)
    added = tl.zeros([COLUMNS], tl.float32)
    added_along = tl.sum(along, 0)
    for split in range(splits):
        part = position * splits + split
        at = part * PADDED + feature
        sums += tl.load(partial_sums + at[:, None] * WIDTH + column[None, :], mask=is_feature[:, None], other=0.0)
        along += tl.load(partial_along + at, mask=is_feature, other=0.0)
        added += tl.load(partial_added + part * (WIDTH + 1) + column)
        added_along += tl.load(partial_added + part * (WIDTH + 1) + WIDTH)
    at = position * PADDED + feature
    biases = tl.load(bias + at, mask=is_feature, other=NONE if IS_EXPONENTIAL else 0.0)
    shifts = tl.load(shift + at, mask=is_feature, other=0.0)
    keys = tl.load(key_length + sequence)
    sums, along, floor = _finish(
        sums, along, added, added_along, biases, shifts, keys, epsilon, log_epsilon, IS_EXPONENTIAL
    )
    tl.store(
        sums_out + at[:, None] * WIDTH + column[None, :], sums.to(sums_out.dtype.element_ty), mask=is_feature[:, None]
    )
    tl.store(floor_out + position * WIDTH + column, floor)
    # the same for all blocks of columns
    if tl.program_id(0) == 0:
        tl.store(along_out + at, along, mask=is_feature)


@triton.jit
def _key_gradient(
    key, value, matrix, first, length, shift, sums, along, floor, by_key, by_value,
    key_row, key_head, value_row, value_head, heads, features, norm, norm_slope,
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
    k = load_rows(key, row, head, key_row, key_head, is_row, WIDTH)
    v = load_rows(value, row, head, value_row, value_head, is_row, WIDTH)
    # rows beyond the sequence get the exponent −∞
    by_row = tl.where(is_row, -norm * squares(k), -NONE) if IS_EXPONENTIAL else tl.full([ROWS], 1.0, tl.float32)
    gradient = tl.zeros([ROWS, WIDTH], tl.float32)
    by_values = tl.zeros([ROWS, WIDTH], tl.float32) + tl.load(floor + position * WIDTH + column)[None, :]
    by_norm = tl.zeros([ROWS], tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        at = position * PADDED + feature
        weights = load_matrix(matrix, feature, features, WIDTH)
        query_sums = tl.load(sums + at[:, None] * WIDTH + column[None, :])
        shifts = tl.load(shift + at)
        if IS_EXPONENTIAL:
            shifts = -shifts
        u = product(k, tl.trans(weights))
        phi = weight(u, shifts[None, :], by_row[:, None], IS_EXPONENTIAL)
        by_feature = product(v, tl.trans(query_sums)) - tl.load(along + at)[None, :]
        by_values += product(phi.to(query_sums.dtype), query_sums)
        if IS_EXPONENTIAL:
            by_u = phi * by_feature
            by_norm += tl.sum(by_u, 1)
        else:
            by_u = slope(u, shifts[None, :], by_row[:, None], IS_EXPONENTIAL) * by_feature
        gradient += product(by_u.to(weights.dtype), weights)
    gradient += norm_slope * by_norm[:, None] * k.to(tl.float32)
    positions = (row.to(tl.int64) * heads + head)[:, None] * WIDTH + column[None, :]
    tl.store(by_key + positions, gradient.to(by_key.dtype.element_ty), mask=is_row[:, None])
    tl.store(by_value + positions, by_values.to(by_value.dtype.element_ty), mask=is_row[:, None])


class QuerySums(NamedTuple):
    """T, t and floor of every sequence and head; floor is the gradient of every value through ε.

    Shape: sums (batch, heads, padded, head_width), along (batch, heads, padded), floor (batch, heads, head_width).
    """

    sums: Tensor
    along: Tensor
    floor: Tensor


def sum_queries(
    query: Tensor,
    upstream: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    key_length: Tensor,
    memory: KeyMemory,
    reading: Reading,
    by_total: Tensor,
    curve: Curve,
    tiling: Tile | None = None,
) -> QuerySums:
    """Sum the gradients of the output over the queries of every sequence and head."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    bias, shift, by_row, epsilon_share = memory.bias, memory.shift, reading.by_row, reading.epsilon_share
    (_, heads, width), (batch, _, padded) = query.shape, bias.shape
    splits = RowSplits.of(query, batch * heads, max_length, padded, tiling)
    sums = query.new_empty(batch, heads, padded, width)
    along = query.new_empty(batch, heads, padded, dtype=torch.float32)
    floor = query.new_empty(batch, heads, width, dtype=torch.float32)
    parts = 0 if splits.is_whole else splits.count
    partial_sums = query.new_empty(batch, heads, parts, padded, width, dtype=torch.float32)
    partial_along = query.new_empty(batch, heads, parts, padded, dtype=torch.float32)
    partial_added = query.new_empty(batch, heads, parts, width + 1, dtype=torch.float32)
    if batch * heads == 0:
        return QuerySums(sums, along, floor)
    _gather[(heads, batch * splits.count, splits.blocks)](
        query, upstream, matrix, first, length, key_length, bias, shift, by_row, epsilon_share, by_total,
        sums, along, floor, partial_sums, partial_along, partial_added,
        query.stride(0), query.stride(1), upstream.stride(0), upstream.stride(1),
        heads, splits.count, splits.rows, matrix.shape[0], curve.epsilon, curve.logarithm,
        IS_EXPONENTIAL=curve.is_exponential, IS_WHOLE=splits.is_whole,
        PADDED=padded, WIDTH=width, ROWS=splits.tile.rows, FEATURES=splits.tile.columns,
        num_warps=splits.tile.warps, num_stages=splits.tile.stages,
    )  # fmt: skip
    if not splits.is_whole:
        _join[(width // 16, heads, batch)](
            partial_sums, partial_along, partial_added, key_length, bias, shift, sums, along, floor,
            heads, splits.count, curve.epsilon, curve.logarithm,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, ALL=triton.next_power_of_2(padded), COLUMNS=16,
        )  # fmt: skip
    return QuerySums(sums, along, floor)


def key_gradient(
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    shift: Tensor,
    sums: QuerySums,
    curve: Curve,
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values, (tokens, heads, head_width)."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    (tokens, heads, width), (batch, _, padded) = key.shape, shift.shape
    by_key, by_value = (sequences.empty(key, tokens, heads, width) for _ in range(2))
    chosen = fit_tile(tiling or tile(_TUNED, _DEFAULT, key.dtype, width), padded)
    grid = (triton.cdiv(max_length, chosen.rows), heads, batch)
    if tokens * heads * max_length:
        _key_gradient[grid](
            key, value, matrix, first, length, shift, *sums, by_key, by_value,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            heads, matrix.shape[0], curve.in_exponents(width), curve.in_gradients(width),
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, ROWS=chosen.rows, COLUMNS=chosen.columns,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return by_key, by_value
