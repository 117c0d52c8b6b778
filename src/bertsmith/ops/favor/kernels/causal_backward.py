"""Gradients of causal queries, keys and values, from the states before and the sums after every chunk.

Within a chunk, with Σ_i the row sum of query i, δ_i the product of output row i with its gradient, and features as in
`causal`, H_ij = (gradient_i · value_j − δ_i) · exp(key_level_j + level_i) / Σ_i for j ≤ i is the gradient of φ̂_i · φ̂_j.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.causal import ChunkReading, ChunkStates, chunk_slot, chunk_splits, chunk_tile
from bertsmith.ops.favor.kernels.features import (
    NONE,
    Curve,
    load_matrix,
    load_rows,
    narrow_to,
    product,
    reload_rows,
    slope,
    squares,
    weight,
)
from bertsmith.ops.kernel_support import SequenceRows, Tile


@triton.jit
def range_scale(chunk, CHUNK: tl.constexpr):
    """Return the scale that keeps shares of keys (times it) and sums over queries (divided by it) in float16."""
    return tl.minimum((chunk + 1) * CHUNK, 1024).to(tl.float32)


@triton.jit
def _factors(
    size, level_before, slot, later_slot, feature, PADDED: tl.constexpr, IS_EXPONENTIAL: tl.constexpr
):  # fmt: skip
    """Return the factors of sums and of sums of ε, from a later chunk to an earlier one: ratios of sizes and levels."""
    before = tl.load(size + slot * PADDED + feature)
    after = tl.load(size + later_slot * PADDED + feature)
    if IS_EXPONENTIAL:
        level_factor = tl.exp2(tl.load(level_before + slot) - tl.load(level_before + later_slot))
        return tl.exp2(before - after), level_factor
    return before / tl.where(after > 0.0, after, 1.0), 1.0


@triton.jit(do_not_specialize=["splits", "split_chunks"])
def _scan(
    query, upstream, matrix, first, length, size, level_before, by_row, query_level, by_total,
    later, later_along, floors, split_sums, split_along, split_added,
    query_row, query_head, upstream_row, upstream_head, heads, splits, split_chunks, features, epsilon,
    IS_EXPONENTIAL: tl.constexpr, IS_TOTAL: tl.constexpr, BLOCKS: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Store the sums over the queries after every chunk of a split, or over the queries of the split.

    Sums are relative to the sizes after a chunk, and sums of ε, the same for all features, to the level after it.
    """
    head, split, sequence = tl.program_id(0), tl.program_id(1) % splits, tl.program_id(1) // splits
    block = tl.program_id(2)
    begin = tl.load(first + sequence)
    count = tl.load(length + sequence)
    feature = block * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < features
    column = tl.arange(0, WIDTH)
    chunks = tl.cdiv(count, CHUNK)
    weights = load_matrix(matrix, feature, features, WIDTH)
    sums = tl.zeros([FEATURES, WIDTH], tl.float32)
    along = tl.zeros([FEATURES], tl.float32)
    added = tl.zeros([WIDTH], tl.float32)
    added_along = tl.sum(along, 0)
    part = (sequence * heads + head).to(tl.int64) * splits
    slots = chunk_slot(first, sequence, 0, CHUNK)
    end = tl.minimum(chunks, (split + 1) * split_chunks)
    if not IS_TOTAL:
        for step in range(tl.cdiv(chunks, split_chunks) - 1 - split):
            later_split = tl.cdiv(chunks, split_chunks) - 1 - step
            split_begin = (slots + later_split * split_chunks) * heads + head
            split_end = (slots + tl.minimum(chunks, (later_split + 1) * split_chunks)) * heads + head
            factor, level_factor = _factors(size, level_before, split_begin, split_end, feature, PADDED, IS_EXPONENTIAL)
            at = (part + later_split) * PADDED + feature
            sums = sums * factor[:, None] + tl.load(split_sums + at[:, None] * WIDTH + column[None, :])
            along = along * factor + tl.load(split_along + at)
            at_added = split_added + (part + later_split) * (WIDTH + 1)
            added = added * level_factor + tl.load(at_added + column)
            added_along = added_along * level_factor + tl.load(at_added + WIDTH)
    for step in range(end - split * split_chunks):
        chunk = end - 1 - step
        slot = (slots + chunk) * heads + head
        row = chunk * CHUNK + tl.arange(0, CHUNK)
        is_row = row < count
        row += begin
        at = row.to(tl.int64) * heads + head
        state = slot * PADDED + feature
        sizes = tl.load(size + state)
        before = tl.load(level_before + slot)
        if not IS_TOTAL:
            sizes_after = tl.load(size + state + heads * PADDED)
            after = tl.load(level_before + slot + heads)
            if IS_EXPONENTIAL:
                relative = tl.where(is_feature, tl.exp2(sizes_after - after), 0.0)
                part_of_floor = tl.where(is_feature, epsilon * tl.exp2(tl.minimum(after - sizes_after, 100.0)), 0.0)
            else:
                relative = sizes_after
                part_of_floor = tl.where(
                    sizes_after > 0.0, epsilon / tl.where(sizes_after > 0.0, sizes_after, 1.0), 0.0
                )
            scale = range_scale(chunk, CHUNK)
            all_sums = sums + relative[:, None] * added[None, :]
            tl.store(later + state[:, None] * WIDTH + column[None, :], (all_sums / scale).to(later.dtype.element_ty))
            tl.store(later_along + state, (along + relative * added_along) / scale)
            floor = tl.sum(part_of_floor[:, None] * all_sums, 0)
            tl.store(floors + (slot * BLOCKS + block) * WIDTH + column, floor)
        factor, level_factor = _factors(size, level_before, slot, slot + heads, feature, PADDED, IS_EXPONENTIAL)
        q = load_rows(query, row, head, query_row, query_head, is_row, WIDTH)
        upstream_rows = load_rows(upstream, row, head, upstream_row, upstream_head, is_row, WIDTH)
        again = reload_rows(upstream, row, head, upstream_row, upstream_head, is_row, WIDTH).to(tl.float32)
        normaliser = tl.load(by_row + at, mask=is_row, other=-NONE)
        levels = tl.load(query_level + at, mask=is_row, other=0.0)
        delta = tl.load(by_total + at, mask=is_row, other=0.0)
        u = product(weights, tl.trans(q))
        if IS_EXPONENTIAL:
            inverse = normaliser
            share = epsilon * tl.exp2(tl.minimum(levels + before - normaliser, 120.0))
        else:
            inverse = tl.exp2(-normaliser)
            share = epsilon * inverse
        phi = weight(u, sizes[:, None], inverse[None, :], IS_EXPONENTIAL)
        along = along * factor + tl.sum(phi * delta[None, :], 1)
        sums = sums * factor[:, None]
        sums += product(phi.to(upstream_rows.dtype), upstream_rows)
        added = added * level_factor + tl.sum(share[:, None] * again, 0)
        added_along = added_along * level_factor + tl.sum(share * delta, 0)
    if IS_TOTAL:
        at = (part + split) * PADDED + feature
        tl.store(split_sums + at[:, None] * WIDTH + column[None, :], sums)
        tl.store(split_along + at, along)
        # the same for every block of features
        if block == 0:
            at_added = split_added + (part + split) * (WIDTH + 1)
            tl.store(at_added + column, added)
            tl.store(at_added + WIDTH, added_along)


class LaterSums(NamedTuple):
    """Sums over the queries after each chunk: of the output's gradient, and of its product with the output.

    Both are divided by min(keys so far, 1024). floors: per block of features, the gradient of values through ε.
    Shape: sums (slots, heads, padded, head_width), along (slots, heads, padded), floors (slots, heads, blocks,
    head_width).
    """

    sums: Tensor
    along: Tensor
    floors: Tensor


def sums_after(
    query: Tensor,
    upstream: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    states: ChunkStates,
    reading: ChunkReading,
    by_total: Tensor,
    curve: Curve,
    chunk: int,
    tiling: Tile | None = None,
) -> LaterSums:
    """Sum the gradients of the output over the queries after each chunk."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    (tokens, heads, width), (places, _, padded), batch = query.shape, states.size.shape, first.shape[0]
    splits = chunk_splits(query, batch, max_length, padded, chunk, tiling)
    later = query.new_empty(places, heads, padded, width)

    def empty(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    along, floors = empty(places, heads, padded), empty(places, heads, splits.blocks, width)
    parts = 0 if splits.count == 1 else splits.count
    split_sums, split_along = empty(batch, heads, parts, padded, width), empty(batch, heads, parts, padded)
    split_added = empty(batch, heads, parts, width + 1)
    if tokens * heads * max_length:
        for is_total in (True, False) if parts else (False,):
            _scan[(heads, batch * splits.count, splits.blocks)](
                query, upstream, matrix, first, length, states.size, states.level_before, reading.by_row,
                reading.query_level, by_total, later, along, floors, split_sums, split_along, split_added,
                query.stride(0), query.stride(1), upstream.stride(0), upstream.stride(1),
                heads, splits.count, splits.rows // chunk, matrix.shape[0], curve.epsilon,
                IS_EXPONENTIAL=curve.is_exponential, IS_TOTAL=is_total, BLOCKS=splits.blocks,
                PADDED=padded, WIDTH=width, CHUNK=chunk, FEATURES=splits.tile.columns,
                num_warps=splits.tile.warps, num_stages=splits.tile.stages,
            )  # fmt: skip
    return LaterSums(later, along, floors)


@triton.jit
def _query_gradient(
    query, key, value, upstream, mixed, matrix, first, length, mean, size, key_level, level, by_row, query_level,
    by_query, by_total,
    query_row, query_head, key_row, key_head, value_row, value_head, upstream_row, upstream_head,
    heads, features, norm, norm_slope, epsilon,
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
    v = load_rows(value, row, head, value_row, value_head, is_row, WIDTH)
    upstream_rows = load_rows(upstream, row, head, upstream_row, upstream_head, is_row, WIDTH)
    out = load_rows(mixed, row, head, heads * WIDTH, WIDTH, is_row, WIDTH)
    along = tl.sum(upstream_rows.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(by_total + at, along, mask=is_row)
    key_levels = tl.load(key_level + at, mask=is_row, other=0.0)
    levels = tl.load(level + at, mask=is_row, other=0.0)
    normaliser = tl.load(by_row + at, mask=is_row, other=-NONE)
    top = tl.load(query_level + at, mask=is_row, other=0.0)
    is_past = (position[None, :] <= position[:, None]) & is_row[None, :]
    by_pair = product(upstream_rows, tl.trans(v)) - along[:, None]
    relative = top - normaliser
    exponent = tl.where(is_past, levels[None, :] + relative[:, None], NONE)
    floor = epsilon * tl.sum(by_pair * tl.exp2(tl.minimum(exponent, 100.0)), 1)
    exponent = tl.where(is_past, key_levels[None, :] + relative[:, None], NONE)
    by_pair = by_pair * tl.exp2(tl.minimum(exponent, 100.0))
    # divide each row by its largest value, which can exceed float16 if query and key features hardly overlap
    largest = tl.maximum(tl.max(tl.abs(by_pair), 1), 1e-30)
    by_pair = (by_pair / largest[:, None]).to(q.dtype)
    if IS_EXPONENTIAL:
        by_key = tl.where(is_row, key_levels - norm * squares(k), -NONE)
        inverse = normaliser
    else:
        by_key = tl.full([CHUNK], 1.0, tl.float32)
        inverse = tl.exp2(-normaliser)
        top = tl.full([CHUNK], 1.0, tl.float32)
    neutral = tl.full([COLUMNS], 0.0 if IS_EXPONENTIAL else 1.0, tl.float32)
    gradient = tl.zeros([CHUNK, WIDTH], tl.float32)
    by_norm = tl.zeros([CHUNK], tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        weights = load_matrix(matrix, feature, features, WIDTH)
        state = slot * PADDED + feature
        means = tl.load(mean + state[:, None] * WIDTH + column[None, :])
        sizes = tl.load(size + state)
        u = product(q, tl.trans(weights))
        key_phi = weight(product(k, tl.trans(weights)), neutral[None, :], by_key[:, None], IS_EXPONENTIAL)
        by_u = product(upstream_rows, tl.trans(means)) - along[:, None]
        by_u = by_u * slope(u, sizes[None, :], inverse[:, None], IS_EXPONENTIAL)
        within = product(by_pair, key_phi.to(q.dtype)) * largest[:, None] + floor[:, None]
        within = within * slope(u, neutral[None, :], top[:, None], IS_EXPONENTIAL)
        by_u += tl.where((feature < features)[None, :], within, 0.0)
        by_norm += tl.sum(by_u, 1)
        gradient += product(narrow_to(by_u, weights), weights)
    gradient += norm_slope * by_norm[:, None] * q.to(tl.float32)
    positions = at[:, None] * WIDTH + column[None, :]
    tl.store(by_query + positions, gradient.to(by_query.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _key_gradient(
    query, key, value, upstream, matrix, first, length, size, later, later_along, floors,
    key_level, level, level_before, by_row, query_level, pair_weights, by_total, by_key_out, by_value_out,
    query_row, query_head, key_row, key_head, value_row, value_head, upstream_row, upstream_head,
    heads, features, norm, norm_slope, epsilon,
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
    v = load_rows(value, row, head, value_row, value_head, is_row, WIDTH)
    upstream_rows = load_rows(upstream, row, head, upstream_row, upstream_head, is_row, WIDTH)
    key_levels = tl.load(key_level + at, mask=is_row, other=0.0)
    normaliser = tl.load(by_row + at, mask=is_row, other=-NONE)
    top = tl.load(query_level + at, mask=is_row, other=0.0)
    along = tl.load(by_total + at, mask=is_row, other=0.0)
    # here rows are keys and columns are queries
    is_later = (position[None, :] >= position[:, None]) & is_row[:, None]
    relative = (top - normaliser)[None, :]
    key_factor = tl.exp2(tl.minimum(tl.where(is_later, key_levels[:, None] + relative, NONE), 100.0))
    by_pair = (product(v, tl.trans(upstream_rows)) - along[None, :]) * key_factor
    floor = epsilon * tl.sum(by_pair, 1)
    # divide each row by its largest value, which can exceed float16 if query and key features hardly overlap
    largest = tl.maximum(tl.max(tl.abs(by_pair), 1), 1e-30)
    by_pair = (by_pair / largest[:, None]).to(q.dtype)
    scale = range_scale(chunk, CHUNK)
    if IS_EXPONENTIAL:
        by_key = tl.where(is_row, key_levels - norm * squares(k), -NONE)
        by_norm_key = tl.where(is_row, -norm * squares(k), -NONE)
    else:
        by_key = tl.full([CHUNK], 1.0, tl.float32)
        by_norm_key = by_key
        top = tl.full([CHUNK], 1.0, tl.float32)
    neutral = tl.full([COLUMNS], 0.0 if IS_EXPONENTIAL else 1.0, tl.float32)
    pairs = tl.load(pair_weights + at[:, None] * CHUNK + position[None, :], mask=is_row[:, None], other=0.0)
    by_value = product(tl.trans(pairs), upstream_rows)
    gradient = tl.zeros([CHUNK, WIDTH], tl.float32)
    by_norm = tl.zeros([CHUNK], tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        is_feature = (feature < features)[None, :]
        weights = load_matrix(matrix, feature, features, WIDTH)
        state = slot * PADDED + feature
        later_sums = tl.load(later + state[:, None] * WIDTH + column[None, :])
        later_sums_along = tl.load(later_along + state)
        sizes = tl.load(size + state + heads * PADDED)
        if IS_EXPONENTIAL:
            shift = tl.where(sizes > NONE / 2, tl.log2(scale) - sizes, NONE)
        else:
            shift = tl.where(sizes > 0.0, scale / tl.where(sizes > 0.0, sizes, 1.0), 0.0)
        u = product(q, tl.trans(weights))
        phi = tl.where(is_feature, weight(u, neutral[None, :], top[:, None], IS_EXPONENTIAL), 0.0)
        key_u = product(k, tl.trans(weights))
        within = product(by_pair, phi.to(q.dtype)) * largest[:, None] + floor[:, None]
        within = within * tl.where(is_feature, slope(key_u, neutral[None, :], by_key[:, None], IS_EXPONENTIAL), 0.0)
        shares = weight(key_u, shift[None, :], by_norm_key[:, None], IS_EXPONENTIAL)
        by_value += product(narrow_to(shares, later_sums), later_sums)
        by_u = product(v, tl.trans(later_sums)) - later_sums_along[None, :]
        by_u = by_u * slope(key_u, shift[None, :], by_norm_key[:, None], IS_EXPONENTIAL) + within
        by_norm += tl.sum(by_u, 1)
        gradient += product(narrow_to(by_u, weights), weights)
    gradient += norm_slope * by_norm[:, None] * k.to(tl.float32)
    rest = tl.zeros([WIDTH], tl.float32)
    for block in range(BLOCKS):
        rest += tl.load(floors + (slot * BLOCKS + block) * WIDTH + column)
    if IS_EXPONENTIAL:
        levels = tl.load(level + at, mask=is_row, other=NONE)
        by_value += tl.exp2(levels - tl.load(level_before + slot + heads))[:, None] * rest[None, :]
    else:
        by_value += rest[None, :]
    positions = at[:, None] * WIDTH + column[None, :]
    tl.store(by_key_out + positions, gradient.to(by_key_out.dtype.element_ty), mask=is_row[:, None])
    tl.store(by_value_out + positions, by_value.to(by_value_out.dtype.element_ty), mask=is_row[:, None])


def query_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    upstream: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    states: ChunkStates,
    reading: ChunkReading,
    curve: Curve,
    chunk: int,
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the queries, and the product of each output row with its gradient: (tokens, heads)."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    (tokens, heads, width), padded = query.shape, states.mean.shape[2]
    by_query = sequences.empty(query, tokens, heads, width)
    by_total = sequences.empty(query, tokens, heads, dtype=torch.float32)
    chosen = chunk_tile(query, chunk, padded, tiling)
    if tokens * heads * max_length:
        _query_gradient[(triton.cdiv(max_length, chunk), heads, first.shape[0])](
            query, key, value, upstream, reading.mixed, matrix, first, length, states.mean, states.size,
            states.key_level, states.level, reading.by_row, reading.query_level, by_query, by_total,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            upstream.stride(0), upstream.stride(1),
            heads, matrix.shape[0], curve.in_exponents(width), curve.in_gradients(width), curve.epsilon,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, CHUNK=chunk, COLUMNS=chosen.columns,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return by_query, by_total


def key_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    upstream: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    states: ChunkStates,
    reading: ChunkReading,
    later: LaterSums,
    by_total: Tensor,
    curve: Curve,
    chunk: int,
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values, (tokens, heads, head_width)."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    (tokens, heads, width), padded = key.shape, states.size.shape[2]
    by_key, by_value = (sequences.empty(key, tokens, heads, width) for _ in range(2))
    chosen = chunk_tile(key, chunk, padded, tiling)
    if tokens * heads * max_length:
        _key_gradient[(triton.cdiv(max_length, chunk), heads, first.shape[0])](
            query, key, value, upstream, matrix, first, length, states.size, *later,
            states.key_level, states.level, states.level_before, reading.by_row, reading.query_level,
            reading.pair_weights, by_total, by_key, by_value,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            upstream.stride(0), upstream.stride(1),
            heads, matrix.shape[0], curve.in_exponents(width), curve.in_gradients(width), curve.epsilon,
            IS_EXPONENTIAL=curve.is_exponential, BLOCKS=later.floors.shape[2],
            PADDED=padded, WIDTH=width, CHUNK=chunk, COLUMNS=chosen.columns,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return by_key, by_value
