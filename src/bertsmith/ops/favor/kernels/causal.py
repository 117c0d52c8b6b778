"""Causal outputs: each query reads the state before its chunk, and the keys of its chunk up to itself.

Within a chunk a query has the features φ̂_q + ε, divided by exp(its level),
and a key φ̂_k exp(key_level) + ε exp(level),
with its largest exponent and the largest so far: products of φ̂ are a matrix product, the terms of ε products of sums.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.features import LOG2_E, NONE, Curve, fit_tile, load_matrix, load_rows, product, squares
from bertsmith.ops.kernel_support import SequenceRows, Tile


def chunk_tile(states: Tensor, chunk: int) -> Tile:
    """Return the tile of every causal kernel: products have fewer than 64 rows, and loads are not pipelined.

    A tile that is both prefetched and read into registers has one buffer, which warp-group products may still read when
    the next load arrives.
    """
    return Tile(chunk, 32, warps=4 if states.dtype.itemsize == 2 else 8, stages=1)


@triton.jit
def chunk_slot(first, sequence, chunk, CHUNK: tl.constexpr):
    """Return the index of a chunk's states; int64."""
    return (tl.load(first + sequence) // CHUNK + sequence + chunk).to(tl.int64)


@triton.jit
def _levels(
    key, matrix, first, length, key_level, largest, key_row, key_head, heads, features, norm,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the largest exponent of every key, and of every chunk."""
    chunk, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    if chunk * CHUNK >= count:
        return
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    is_row = row < count
    row += tl.load(first + sequence)
    k = load_rows(key, row, head, key_row, key_head, is_row, WIDTH)
    level = tl.full([CHUNK], NONE, tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        u = product(k, tl.trans(load_matrix(matrix, feature, features, WIDTH)))
        level = tl.maximum(level, tl.max(tl.where((feature < features)[None, :], u, NONE), 1))
    level = tl.where(is_row, level * LOG2_E + norm * squares(k), NONE)
    tl.store(key_level + row.to(tl.int64) * heads + head, level, mask=is_row)
    tl.store(largest + chunk_slot(first, sequence, chunk, CHUNK) * heads + head, tl.max(level, 0))


@triton.jit
def _chunk_sums(
    key, value, matrix, first, length, key_level, largest, means, sizes, level, level_before,
    key_row, key_head, value_row, value_head, heads, blocks, features, norm, epsilon, log_epsilon,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Store the state of each chunk alone, the level of every key, and the level before the chunk."""
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head, sequence = tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    if chunk * CHUNK >= count:
        return
    slot = chunk_slot(first, sequence, chunk, CHUNK) * heads + head
    position = tl.arange(0, CHUNK)
    row = chunk * CHUNK + position
    is_row = row < count
    row += tl.load(first + sequence)
    feature = block * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    at = row.to(tl.int64) * heads + head
    k = load_rows(key, row, head, key_row, key_head, is_row, WIDTH)
    v = load_rows(value, row, head, value_row, value_head, is_row, WIDTH)
    u = product(load_matrix(matrix, feature, features, WIDTH), tl.trans(k))
    if IS_EXPONENTIAL:
        entering = NONE + tl.zeros([128], tl.float32)
        for start in range(0, chunk, 128):
            earlier = start + tl.arange(0, 128)
            positions = chunk_slot(first, sequence, earlier, CHUNK) * heads + head
            entering = tl.maximum(entering, tl.load(largest + positions, mask=earlier < chunk, other=NONE))
        before = tl.max(entering, 0)
        key_levels = tl.load(key_level + at, mask=is_row, other=NONE)
        so_far = tl.max(tl.where(position[None, :] <= position[:, None], key_levels[None, :], NONE), 1)
        levels = tl.maximum(so_far, before)
        if block == 0:
            tl.store(level + at, levels, mask=is_row)
            tl.store(level_before + slot, before)
        exponent = u * LOG2_E + tl.where(is_row, norm * squares(k), NONE)[None, :]
        top = tl.max(exponent, 1)
        phi = tl.exp2(exponent - top[:, None])
        total = tl.sum(phi, 1)
        lifted = tl.max(levels, 0)
        floors = tl.where(is_row, tl.exp2(levels - lifted), 0.0)
        floor = tl.sum(floors, 0)
        # the sums of ε · exp(level), the same for every feature
        rest = tl.sum(floors[:, None] * v.to(tl.float32), 0) / floor
        floor = log_epsilon + lifted + tl.log2(floor)
        size = top + tl.log2(total)
        larger = tl.maximum(size, floor)
        size_all = larger + tl.log2(tl.exp2(size - larger) + tl.exp2(floor - larger))
        mean = product(phi.to(v.dtype), v) * tl.exp2(size - size_all - tl.log2(total))[:, None]
        mean += tl.exp2(floor - size_all)[:, None] * rest[None, :]
        size_all = tl.where(feature < features, size_all, NONE)
    else:
        phi = tl.maximum(u, 0.0)
        size_all = tl.sum(phi, 1) + epsilon * tl.sum(tl.where(is_row, 1.0, 0.0), 0)
        size_all = tl.where(feature < features, size_all, 0.0)
        mean = product(phi.to(v.dtype), v) + epsilon * tl.sum(v.to(tl.float32), 0)[None, :]
        mean = mean / tl.where(size_all > 0.0, size_all, 1.0)[:, None]
    mean = tl.where((feature < features)[:, None], mean, 0.0)
    position = slot * PADDED + feature
    tl.store(means + position[:, None] * WIDTH + column[None, :], mean.to(means.dtype.element_ty))
    tl.store(sizes + position, size_all)


@triton.jit
def _carry(
    means, sizes, first, length, before, before_size, after_size, heads,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Store the state before every chunk, and the sizes after it."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    size = tl.full([FEATURES], NONE if IS_EXPONENTIAL else 0.0, tl.float32)
    mean = tl.zeros([FEATURES, WIDTH], tl.float32)
    for chunk in range(0, tl.cdiv(count, CHUNK)):  # noqa: PIE808
        at = (chunk_slot(first, sequence, chunk, CHUNK) * heads + head) * PADDED + feature
        positions = at[:, None] * WIDTH + column[None, :]
        new = tl.load(means + positions).to(tl.float32)
        new_size = tl.load(sizes + at)
        tl.store(before + positions, mean.to(before.dtype.element_ty))
        tl.store(before_size + at, size)
        if IS_EXPONENTIAL:
            larger = tl.maximum(size, new_size)
            total = larger + tl.log2(tl.exp2(size - larger) + tl.exp2(new_size - larger))
            mean = mean * tl.exp2(size - total)[:, None] + new * tl.exp2(new_size - total)[:, None]
        else:
            total = size + new_size
            whole = tl.where(total > 0.0, total, 1.0)
            mean = mean * (size / whole)[:, None] + new * (new_size / whole)[:, None]
        size = total
        tl.store(after_size + at, size)


class ChunkStates(NamedTuple):
    """Sums over the keys and values before each chunk, and levels of keys and chunks.

    Shape: mean (slots, heads, padded, head_width), size, size_after (slots, heads, padded), key_level, level (tokens,
    heads), level_before (slots, heads).
    """

    mean: Tensor
    size: Tensor
    size_after: Tensor
    key_level: Tensor
    level: Tensor
    level_before: Tensor


def chunk_states(
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    curve: Curve,
    padded: int,
    chunk: int,
    tiling: Tile | None = None,
) -> ChunkStates:
    """Sum over the keys and values before each chunk."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    (tokens, heads, width), batch = key.shape, first.shape[0]
    slots = tokens // chunk + batch
    tile = fit_tile(tiling or chunk_tile(key, chunk), padded)
    means, before = (key.new_empty(slots, heads, padded, width) for _ in range(2))
    sizes, before_size, after_size = (key.new_empty(slots, heads, padded, dtype=torch.float32) for _ in range(3))
    key_level, level = (key.new_zeros(tokens, heads, dtype=torch.float32) for _ in range(2))
    largest, level_before = (key.new_zeros(slots, heads, dtype=torch.float32) for _ in range(2))
    chunks = triton.cdiv(max_length, chunk)
    if tokens * heads * max_length:
        blocks, norm = padded // tile.columns, curve.in_exponents(width)
        if curve.is_exponential:
            _levels[(chunks, heads, batch)](
                key, matrix, first, length, key_level, largest, key.stride(0), key.stride(1), heads, matrix.shape[0],
                norm,
                PADDED=padded, WIDTH=width, CHUNK=chunk, COLUMNS=tile.columns,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        _chunk_sums[(chunks * blocks, heads, batch)](
            key, value, matrix, first, length, key_level, largest, means, sizes, level, level_before,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            heads, blocks, matrix.shape[0], norm, curve.epsilon, curve.logarithm,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, CHUNK=chunk, FEATURES=tile.columns,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        _carry[(padded // 16, heads, batch)](
            means, sizes, first, length, before, before_size, after_size, heads,
            IS_EXPONENTIAL=curve.is_exponential, PADDED=padded, WIDTH=width, CHUNK=chunk, FEATURES=16, num_warps=2,
        )  # fmt: skip
    return ChunkStates(before, before_size, after_size, key_level, level, level_before)


@triton.jit
def _read(
    query, key, value, matrix, first, length, mean, size, key_level, level, level_before, mixed, by_row, query_level,
    query_row, query_head, key_row, key_head, value_row, value_head, heads, features, norm, epsilon,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    if chunk * CHUNK >= count:
        return
    slot = chunk_slot(first, sequence, chunk, CHUNK) * heads + head
    position = tl.arange(0, CHUNK)
    row = chunk * CHUNK + position
    is_row = row < count
    row += tl.load(first + sequence)
    column = tl.arange(0, WIDTH)
    at = row.to(tl.int64) * heads + head
    q = load_rows(query, row, head, query_row, query_head, is_row, WIDTH)
    k = load_rows(key, row, head, key_row, key_head, is_row, WIDTH)
    key_levels = tl.load(key_level + at, mask=is_row, other=0.0)
    levels = tl.load(level + at, mask=is_row, other=-NONE)
    before = tl.load(level_before + slot)
    by_key = tl.where(is_row, norm * squares(k) - key_levels, NONE)
    # features of queries are divided by exp(top), their products with the state's sizes by exp(peak)
    top = tl.full([CHUNK], NONE, tl.float32)
    peak = tl.full([CHUNK], NONE, tl.float32)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    query_sum = tl.zeros([CHUNK], tl.float32)
    key_sum = tl.zeros([CHUNK], tl.float32)
    state_sum = tl.zeros([CHUNK], tl.float32)
    sums = tl.zeros([CHUNK, WIDTH], tl.float32)
    feature_sum = tl.zeros([WIDTH], tl.float32)
    ones = tl.sum(feature_sum, 0)
    keys = tl.maximum(chunk * CHUNK, 1).to(tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        is_feature = feature < features
        weights = load_matrix(matrix, feature, features, WIDTH)
        state = slot * PADDED + feature
        means = tl.load(mean + state[:, None] * WIDTH + column[None, :])
        sizes = tl.load(size + state)
        u = product(q, tl.trans(weights))
        key_u = product(k, tl.trans(weights))
        if IS_EXPONENTIAL:
            exponent = tl.where(is_feature[None, :], u * LOG2_E, NONE)
            larger = tl.maximum(top, tl.max(exponent, 1))
            phi = tl.exp2(exponent - larger[:, None])
            smaller = tl.exp2(top - larger)
            top = larger
            pairs = pairs * smaller[:, None]
            query_sum = query_sum * smaller
            key_phi = tl.where(is_feature[None, :], tl.exp2(key_u * LOG2_E + by_key[:, None]), 0.0)
            exponent += sizes[None, :]
            larger = tl.maximum(peak, tl.max(exponent, 1))
            state_phi = tl.exp2(exponent - larger[:, None])
            smaller = tl.exp2(peak - larger)
            peak = larger
            sums = sums * smaller[:, None]
            state_sum = state_sum * smaller
            relative = tl.exp2(sizes - before)
        else:
            phi = tl.maximum(u, 0.0)
            key_phi = tl.maximum(key_u, 0.0)
            relative = sizes / keys
            state_phi = phi * relative[None, :]
        pairs += product(phi.to(q.dtype), tl.trans(key_phi.to(q.dtype)))
        query_sum += tl.sum(phi, 1)
        key_sum += tl.sum(key_phi, 1)
        sums += product(state_phi.to(means.dtype), means)
        state_sum += tl.sum(state_phi, 1)
        feature_sum += tl.sum(relative[:, None] * means.to(tl.float32), 0)
        ones += tl.sum(relative, 0)
    is_past = (position[None, :] <= position[:, None]) & is_row[None, :]
    if IS_EXPONENTIAL:
        key_factor = tl.exp2(tl.where(is_past, key_levels[None, :] - levels[:, None], NONE))
        level_factor = tl.exp2(tl.where(is_past, levels[None, :] - levels[:, None], NONE))
        state_factor = tl.exp2(tl.minimum(peak - top - levels, 120.0))
        floor_factor = epsilon * tl.exp2(before - levels)
    else:
        key_factor = tl.where(is_past, 1.0, 0.0)
        level_factor = key_factor
        state_factor = tl.zeros([CHUNK], tl.float32) + keys
        floor_factor = epsilon * state_factor
        top = tl.zeros([CHUNK], tl.float32)
    query_sum += epsilon * features
    pairs = (pairs + epsilon * key_sum[None, :]) * key_factor + epsilon * query_sum[:, None] * level_factor
    total = tl.sum(pairs, 1) + state_sum * state_factor + floor_factor * ones
    total = tl.where(total == 0.0, 1.0, total)
    v = load_rows(value, row, head, value_row, value_head, is_row, WIDTH)
    out = product((pairs / total[:, None]).to(v.dtype), v)
    out += sums * (state_factor / total)[:, None] + (floor_factor / total)[:, None] * feature_sum[None, :]
    tl.store(mixed + at[:, None] * WIDTH + column[None, :], out.to(mixed.dtype.element_ty), mask=is_row[:, None])
    tl.store(by_row + at, top + levels + tl.log2(total), mask=is_row)
    tl.store(query_level + at, top, mask=is_row)


def read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    states: ChunkStates,
    curve: Curve,
    chunk: int,
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the logarithm of every row's sum, and the logarithm of every query's largest feature.

    Shape: query and output (tokens, heads, head_width), the others (tokens, heads).
    """
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    mean, size, _, key_level, level, level_before = states
    (tokens, heads, width), padded = query.shape, mean.shape[2]
    mixed = sequences.empty(query, tokens, heads, width)
    by_row, query_level = (sequences.empty(query, tokens, heads, dtype=torch.float32) for _ in range(2))
    tile = fit_tile(tiling or chunk_tile(query, chunk), padded)
    if tokens * heads * max_length:
        _read[(triton.cdiv(max_length, chunk), heads, first.shape[0])](
            query, key, value, matrix, first, length, mean, size, key_level, level, level_before, mixed, by_row,
            query_level,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            heads, matrix.shape[0], curve.in_exponents(width), curve.epsilon,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, CHUNK=chunk, COLUMNS=tile.columns,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return mixed, by_row, query_level
