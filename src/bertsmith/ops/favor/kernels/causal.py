"""Causal outputs: each query reads the state before its chunk, and the keys of its chunk up to itself.

Within a chunk a query has the features φ̂_q + ε, divided by exp(its level),
and a key φ̂_k exp(key_level) + ε exp(level),
with its largest exponent and the largest so far: products of φ̂ are a matrix product, the terms of ε products of sums.

A scan over the chunks of a sequence keeps the state in registers and stores it before every chunk; all chunks then read
in parallel. If there are fewer sequences than the GPU has room for, every sequence is split: a first scan returns the
totals of each split, and a second scan starts from the totals of the splits before it.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.features import (
    LOG2_E,
    NONE,
    Curve,
    RowSplits,
    fit_tile,
    load_matrix,
    load_rows,
    product,
    reload_rows,
    squares,
)
from bertsmith.ops.kernel_support import SequenceRows, Tile, Tiles, tile

# a tile that a product reads in a loop is never read into registers: see `reload_rows`
_READ: Tiles = {(2, width): Tile(64, 32, warps=4, stages=2) for width in (16, 32, 64)} | {
    (2, 128): Tile(64, 32, warps=8, stages=2)
}
# a third stage of the scan's loads would spill registers, and 256 features save a pass over the keys for their levels
_SCAN: Tiles = {(2, width): Tile(64, 256, warps=8, stages=2) for width in (16, 32, 64)}
# without tensor cores, which float32 does not use here, larger tiles do not fit into registers
_DEFAULT = Tile(32, 32, warps=8, stages=1)


def chunk_tile(states: Tensor, chunk: int, padded: int, tiling: Tile | None) -> Tile:
    """Return the tile of a kernel whose programs process one chunk each."""
    chosen = tiling or tile(_READ, _DEFAULT, states.dtype, states.shape[-1])
    return fit_tile(replace(chosen, rows=chunk), padded)


@triton.jit
def chunk_slot(first, sequence, chunk, CHUNK: tl.constexpr):
    """Return the index of the state before a chunk; int64. A sequence has one more slot, for the state after it."""
    return (tl.load(first + sequence) // CHUNK + 2 * sequence + chunk).to(tl.int64)


def slots(tokens: int, batch: int, chunk: int) -> int:
    """Return the number of slots for the states of all chunks."""
    return tokens // chunk + 2 * batch


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
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def _state(top, total, sums, floor, rest, level, keys, is_feature, epsilon, log_epsilon, IS_EXPONENTIAL: tl.constexpr):
    """Return (mean, size, relative) of the features from sums without ε, and the sums of ε · exp(level).

    relative: the size divided by exp(level) (for relu by the number of keys), the weight of ε of a query.
    Shape: top, total, is_feature (features,), sums (features, columns), rest (columns,), floor, level, keys ().
    """
    if IS_EXPONENTIAL:
        log_sum = tl.where(total > 0.0, top + tl.log2(tl.where(total > 0.0, total, 1.0)), NONE)
        any_floor = tl.where(floor > 0.0, floor, 1.0)
        log_floor = log_epsilon + level + tl.log2(any_floor)
        larger = tl.maximum(log_sum, log_floor)
        size = larger + tl.log2(tl.exp2(log_sum - larger) + tl.exp2(log_floor - larger))
        mean = (tl.exp2(log_sum - size) / tl.where(total > 0.0, total, 1.0))[:, None] * sums
        mean += (tl.exp2(log_floor - size) / any_floor)[:, None] * rest[None, :]
        size = tl.where(is_feature, size, NONE)
        relative = tl.where(is_feature, tl.exp2(size - level), 0.0)
    else:
        size = tl.where(is_feature, total + epsilon * floor, 0.0)
        mean = (sums + epsilon * rest[None, :]) / tl.where(size > 0.0, size, 1.0)[:, None]
        relative = size / tl.maximum(keys, 1).to(tl.float32)
    return tl.where(is_feature[:, None], mean, 0.0), size, relative


@triton.jit(do_not_specialize=["splits", "split_chunks"])
def _scan(
    key, value, matrix, first, length, key_level, largest, mean, size, feature_sums, level, level_before,
    split_top, split_total, split_sums, split_floor,
    key_row, key_head, value_row, value_head,
    heads, splits, split_chunks, features, norm, epsilon, log_epsilon,
    IS_EXPONENTIAL: tl.constexpr, HAS_LEVELS: tl.constexpr, IS_TOTAL: tl.constexpr, BLOCKS: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Store the state before every chunk of a split and the levels of its keys, or the totals of the split.

    HAS_LEVELS: `_levels` has stored the levels of keys; a program that has all features computes them itself.
    """
    head, split, sequence = tl.program_id(0), tl.program_id(1) % splits, tl.program_id(1) // splits
    block = tl.program_id(2)
    begin = tl.load(first + sequence)
    count = tl.load(length + sequence)
    feature = block * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < features
    column = tl.arange(0, WIDTH)
    position = tl.arange(0, CHUNK)
    chunks = tl.cdiv(count, CHUNK)
    weights = load_matrix(matrix, feature, features, WIDTH)
    top = tl.full([FEATURES], NONE if IS_EXPONENTIAL else 0.0, tl.float32)
    total = tl.zeros([FEATURES], tl.float32)
    sums = tl.zeros([FEATURES, WIDTH], tl.float32)
    rest = tl.zeros([WIDTH], tl.float32)
    floor = tl.sum(total, 0)
    before = tl.max(top, 0)
    part = (sequence * heads + head).to(tl.int64) * splits
    if not IS_TOTAL:
        for earlier in range(split):
            at = (part + earlier) * PADDED + feature
            loaded = tl.load(split_sums + at[:, None] * WIDTH + column[None, :])
            at_floor = split_floor + (part + earlier) * (WIDTH + 2)
            after = tl.load(at_floor + WIDTH + 1)
            if IS_EXPONENTIAL:
                new_top = tl.load(split_top + at)
                larger = tl.maximum(top, new_top)
                smaller, new = tl.exp2(top - larger), tl.exp2(new_top - larger)
                top = larger
                total = total * smaller + new * tl.load(split_total + at)
                sums = sums * smaller[:, None] + new[:, None] * loaded
                floor *= tl.exp2(before - after)
                rest *= tl.exp2(before - after)
            else:
                total += tl.load(split_total + at)
                sums += loaded
            floor += tl.load(at_floor + WIDTH)
            rest += tl.load(at_floor + column)
            before = after
    elif IS_EXPONENTIAL:
        # the levels of earlier splits count
        entering = tl.minimum(chunks, split * split_chunks)
        for start in range(0, entering, 128):
            earlier = start + tl.arange(0, 128)
            positions = chunk_slot(first, sequence, earlier, CHUNK) * heads + head
            levels_so_far = tl.load(largest + positions, mask=earlier < entering, other=NONE)
            before = tl.maximum(before, tl.max(levels_so_far, 0))
    for chunk in range(split * split_chunks, tl.minimum(chunks, (split + 1) * split_chunks)):
        slot = chunk_slot(first, sequence, chunk, CHUNK) * heads + head
        row = chunk * CHUNK + position
        is_row = row < count
        row += begin
        at = row.to(tl.int64) * heads + head
        if not IS_TOTAL:
            means, sizes, relative = _state(
                top, total, sums, floor, rest, before, chunk * CHUNK, is_feature, epsilon, log_epsilon, IS_EXPONENTIAL
            )
            state = slot * PADDED + feature
            tl.store(mean + state[:, None] * WIDTH + column[None, :], means.to(mean.dtype.element_ty))
            tl.store(size + state, sizes)
            at_sums = feature_sums + (slot * BLOCKS + block) * (WIDTH + 1)
            tl.store(at_sums + column, tl.sum(relative[:, None] * means, 0))
            tl.store(at_sums + WIDTH, tl.sum(relative, 0))
            if block == 0:
                tl.store(level_before + slot, before)
        k = load_rows(key, row, head, key_row, key_head, is_row, WIDTH)
        v = load_rows(value, row, head, value_row, value_head, is_row, WIDTH)
        v_again = reload_rows(value, row, head, value_row, value_head, is_row, WIDTH).to(tl.float32)
        u = product(weights, tl.trans(k))
        if IS_EXPONENTIAL:
            k_again = reload_rows(key, row, head, key_row, key_head, is_row, WIDTH)
            exponent = u * LOG2_E + tl.where(is_row, norm * squares(k_again), NONE)[None, :]
            if HAS_LEVELS:
                key_levels = tl.load(key_level + at, mask=is_row, other=NONE)
            else:
                key_levels = tl.max(tl.where(is_feature[:, None], exponent, NONE), 0)
                tl.store(key_level + at, key_levels, mask=is_row)
            levels = tl.maximum(tl.associative_scan(key_levels, 0, _larger), before)
            if not IS_TOTAL and block == 0:
                tl.store(level + at, levels, mask=is_row)
            after = tl.max(levels, 0)
            floors = tl.where(is_row, tl.exp2(levels - after), 0.0)
            floor *= tl.exp2(before - after)
            rest *= tl.exp2(before - after)
            before = after
            larger = tl.maximum(top, tl.max(exponent, 1))
            phi = tl.exp2(exponent - larger[:, None])
            smaller = tl.exp2(top - larger)
            top = larger
            total = total * smaller
            sums = sums * smaller[:, None]
        else:
            floors = tl.where(is_row, 1.0, 0.0)
            phi = tl.maximum(u, 0.0)
        floor += tl.sum(floors, 0)
        rest += tl.sum(floors[:, None] * v_again, 0)
        total += tl.sum(phi, 1)
        sums += product(phi.to(v.dtype), v)
    if IS_TOTAL:
        at = (part + split) * PADDED + feature
        tl.store(split_sums + at[:, None] * WIDTH + column[None, :], sums)
        tl.store(split_top + at, top)
        tl.store(split_total + at, total)
        # the same for every block of features
        if block == 0:
            at_floor = split_floor + (part + split) * (WIDTH + 2)
            tl.store(at_floor + column, rest)
            tl.store(at_floor + WIDTH, floor)
            tl.store(at_floor + WIDTH + 1, before)
    elif split == tl.maximum(chunks - 1, 0) // split_chunks:
        # the split with the last chunk also stores the state after the sequence, whose sizes the gradients need
        means, sizes, _ = _state(
            top, total, sums, floor, rest, before, count, is_feature, epsilon, log_epsilon, IS_EXPONENTIAL
        )
        slot = chunk_slot(first, sequence, chunks, CHUNK) * heads + head
        state = slot * PADDED + feature
        tl.store(mean + state[:, None] * WIDTH + column[None, :], means.to(mean.dtype.element_ty))
        tl.store(size + state, sizes)
        if block == 0:
            tl.store(level_before + slot, before)


class ChunkStates(NamedTuple):
    """Sums over the keys and values before each chunk, and levels of keys and chunks.

    Shape: mean (slots, heads, padded, head_width), size (slots, heads, padded), key_level, level (tokens, heads),
    level_before (slots, heads).
    """

    mean: Tensor
    size: Tensor
    key_level: Tensor
    level: Tensor
    level_before: Tensor


def chunk_splits(
    states: Tensor, batch: int, max_length: int, padded: int, chunk: int, tiling: Tile | None
) -> RowSplits:
    """Return the splits of a scan; each is a whole number of chunks."""
    tiling = tiling or _SCAN.get((states.dtype.itemsize, states.shape[-1]))
    return RowSplits.of(states, batch * states.shape[1], max_length, padded, tiling, rows=chunk)


def chunk_states(
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    curve: Curve,
    padded: int,
    chunk: int,
    tiling: Tile | None = None,
) -> tuple[ChunkStates, Tensor]:
    """Sum over the keys and values before each chunk, and over features per block of features, for ε of queries.

    Shape of the second: (slots, heads, blocks, head_width + 1), sums of size · mean, and of sizes.
    """
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    (tokens, heads, width), batch = key.shape, first.shape[0]
    splits = chunk_splits(key, batch, max_length, padded, chunk, tiling)
    places, parts = slots(tokens, batch, chunk), 0 if splits.count == 1 else splits.count
    mean = key.new_empty(places, heads, padded, width)

    def empty(*shape: int) -> Tensor:
        return key.new_empty(shape, dtype=torch.float32)

    size, feature_sums = empty(places, heads, padded), empty(places, heads, splits.blocks, width + 1)
    key_level, level = (key.new_zeros(tokens, heads, dtype=torch.float32) for _ in range(2))
    largest, level_before = (key.new_zeros(places, heads, dtype=torch.float32) for _ in range(2))
    top, total = (empty(batch, heads, parts, padded) for _ in range(2))
    sums, floor = empty(batch, heads, parts, padded, width), empty(batch, heads, parts, width + 2)
    if tokens * heads * max_length:
        norm = curve.in_exponents(width)
        if curve.is_exponential and not splits.is_whole:
            chosen = chunk_tile(key, chunk, padded, None)
            _levels[(triton.cdiv(max_length, chunk), heads, batch)](
                key, matrix, first, length, key_level, largest, key.stride(0), key.stride(1), heads, matrix.shape[0],
                norm,
                PADDED=padded, WIDTH=width, CHUNK=chunk, COLUMNS=chosen.columns,
                num_warps=chosen.warps, num_stages=chosen.stages,
            )  # fmt: skip
        for is_total in (True, False) if parts else (False,):
            _scan[(heads, batch * splits.count, splits.blocks)](
                key, value, matrix, first, length, key_level, largest, mean, size, feature_sums, level, level_before,
                top, total, sums, floor,
                key.stride(0), key.stride(1), value.stride(0), value.stride(1),
                heads, splits.count, splits.rows // chunk, matrix.shape[0], norm, curve.epsilon, curve.logarithm,
                IS_EXPONENTIAL=curve.is_exponential, HAS_LEVELS=not splits.is_whole, IS_TOTAL=is_total,
                BLOCKS=splits.blocks, PADDED=padded, WIDTH=width, CHUNK=chunk, FEATURES=splits.tile.columns,
                num_warps=splits.tile.warps, num_stages=splits.tile.stages,
            )  # fmt: skip
    return ChunkStates(mean, size, key_level, level, level_before), feature_sums


@triton.jit
def _read(
    query, key, value, matrix, first, length, mean, size, key_level, level, level_before, feature_sums,
    mixed, by_row, query_level, pair_weights,
    query_row, query_head, key_row, key_head, value_row, value_head, heads, features, norm, epsilon,
    IS_EXPONENTIAL: tl.constexpr, BLOCKS: tl.constexpr,
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
    by_key = tl.where(is_row, norm * squares(k) - key_levels, NONE)
    # features of queries are divided by exp(top), their products with the state's sizes by exp(peak)
    top = tl.full([CHUNK], NONE, tl.float32)
    peak = tl.full([CHUNK], NONE, tl.float32)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    query_sum = tl.zeros([CHUNK], tl.float32)
    key_sum = tl.zeros([CHUNK], tl.float32)
    state_sum = tl.zeros([CHUNK], tl.float32)
    sums = tl.zeros([CHUNK, WIDTH], tl.float32)
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
        else:
            phi = tl.maximum(u, 0.0)
            key_phi = tl.maximum(key_u, 0.0)
            state_phi = phi * (sizes / keys)[None, :]
        pairs += product(phi.to(q.dtype), tl.trans(key_phi.to(q.dtype)))
        query_sum += tl.sum(phi, 1)
        key_sum += tl.sum(key_phi, 1)
        sums += product(state_phi.to(means.dtype), means)
        state_sum += tl.sum(state_phi, 1)
    levels = tl.load(level + at, mask=is_row, other=-NONE)
    before = tl.load(level_before + slot)
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
    feature_sum = tl.zeros([WIDTH], tl.float32)
    ones = tl.sum(feature_sum, 0)
    for block in range(BLOCKS):
        at_sums = feature_sums + (slot * BLOCKS + block) * (WIDTH + 1)
        feature_sum += tl.load(at_sums + column)
        ones += tl.load(at_sums + WIDTH)
    query_sum += epsilon * features
    pairs = (pairs + epsilon * key_sum[None, :]) * key_factor + epsilon * query_sum[:, None] * level_factor
    total = tl.sum(pairs, 1) + state_sum * state_factor + floor_factor * ones
    total = tl.where(total == 0.0, 1.0, total)
    v = load_rows(value, row, head, value_row, value_head, is_row, WIDTH)
    pairs = (pairs / total[:, None]).to(v.dtype)
    out = product(pairs, v)
    out += sums * (state_factor / total)[:, None] + (floor_factor / total)[:, None] * feature_sum[None, :]
    tl.store(mixed + at[:, None] * WIDTH + column[None, :], out.to(mixed.dtype.element_ty), mask=is_row[:, None])
    tl.store(pair_weights + at[:, None] * CHUNK + position[None, :], pairs, mask=is_row[:, None])
    tl.store(by_row + at, top + levels + tl.log2(total), mask=is_row)
    tl.store(query_level + at, top, mask=is_row)


class ChunkReading(NamedTuple):
    """The output, and what the gradients need of every row: logarithms of its sum and its largest feature, weights.

    pair_weights: the weights of the keys of the query's chunk.
    Shape: mixed (tokens, heads, head_width), by_row, query_level (tokens, heads), pair_weights (tokens, heads, chunk).
    """

    mixed: Tensor
    by_row: Tensor
    query_level: Tensor
    pair_weights: Tensor


def read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    states: ChunkStates,
    feature_sums: Tensor,
    curve: Curve,
    chunk: int,
    tiling: Tile | None = None,
) -> ChunkReading:
    """Read the states before the chunks, and the keys of the chunks, with queries: (tokens, heads, head_width)."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    (tokens, heads, width), (_, _, padded, _) = query.shape, states.mean.shape
    mixed = sequences.empty(query, tokens, heads, width)
    by_row, query_level = (sequences.empty(query, tokens, heads, dtype=torch.float32) for _ in range(2))
    pair_weights = sequences.empty(query, tokens, heads, chunk)
    chosen = chunk_tile(query, chunk, padded, tiling)
    if tokens * heads * max_length:
        _read[(triton.cdiv(max_length, chunk), heads, first.shape[0])](
            query, key, value, matrix, first, length, *states, feature_sums, mixed, by_row, query_level, pair_weights,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            heads, matrix.shape[0], curve.in_exponents(width), curve.epsilon,
            IS_EXPONENTIAL=curve.is_exponential, BLOCKS=feature_sums.shape[2],
            PADDED=padded, WIDTH=width, CHUNK=chunk, COLUMNS=chosen.columns,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return ChunkReading(mixed, by_row, query_level, pair_weights)
