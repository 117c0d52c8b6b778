"""Gradients of causal queries, keys and values, from the states before and the sums after every chunk.

Within a chunk, with Σ_i the row sum of query i, δ_i the product of output row i with its gradient, and features as in
`causal`, H_ij = (gradient_i · value_j − δ_i) · exp(key_level_j + level_i) / Σ_i for j ≤ i is the gradient of φ̂_i · φ̂_j.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.causal import ChunkStates, chunk_slot, chunk_tile
from bertsmith.ops.favor.kernels.features import (
    NONE,
    Curve,
    fit_tile,
    load_matrix,
    load_rows,
    narrow_to,
    product,
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
def _chunk_sums(
    query, upstream, matrix, first, length, size, level_before, by_row, query_level, by_total, sums, along,
    query_row, query_head, upstream_row, upstream_head, heads, blocks, features, epsilon,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head, sequence = tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    if chunk * CHUNK >= count:
        return
    slot = chunk_slot(first, sequence, chunk, CHUNK) * heads + head
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    is_row = row < count
    row += tl.load(first + sequence)
    feature = block * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    at = row.to(tl.int64) * heads + head
    q = load_rows(query, row, head, query_row, query_head, is_row, WIDTH)
    upstream_rows = load_rows(upstream, row, head, upstream_row, upstream_head, is_row, WIDTH)
    normaliser = tl.load(by_row + at, mask=is_row, other=-NONE)
    levels = tl.load(query_level + at, mask=is_row, other=0.0)
    delta = tl.load(by_total + at, mask=is_row, other=0.0)
    position = slot * PADDED + feature
    sizes = tl.load(size + position)
    u = product(load_matrix(matrix, feature, features, WIDTH), tl.trans(q))
    if IS_EXPONENTIAL:
        before = tl.load(level_before + slot)
        inverse = normaliser
        relative = tl.where(feature < features, tl.exp2(sizes - before), 0.0)
        share = epsilon * tl.exp2(tl.minimum(levels + before - normaliser, 120.0))
    else:
        inverse = tl.exp2(-normaliser)
        relative = sizes
        share = epsilon * inverse
    phi = weight(u, sizes[:, None], inverse[None, :], IS_EXPONENTIAL)
    chunk_sum = product(phi.to(upstream_rows.dtype), upstream_rows)
    chunk_sum += relative[:, None] * tl.sum(share[:, None] * upstream_rows.to(tl.float32), 0)[None, :]
    chunk_along = tl.sum(phi * delta[None, :], 1) + relative * tl.sum(share * delta, 0)
    # divided here and multiplied again in the carry, because chunks have different scales
    scale = range_scale(chunk, CHUNK)
    tl.store(sums + position[:, None] * WIDTH + column[None, :], (chunk_sum / scale).to(sums.dtype.element_ty))
    tl.store(along + position, chunk_along / scale)


@triton.jit
def _carry(
    sums, along, before_size, after_size, first, length, later, later_along, heads,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    chunks = tl.cdiv(tl.load(length + sequence), CHUNK)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([FEATURES, WIDTH], tl.float32)
    total_along = tl.zeros([FEATURES], tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        at = (chunk_slot(first, sequence, chunk, CHUNK) * heads + head) * PADDED + feature
        positions = at[:, None] * WIDTH + column[None, :]
        new = tl.load(sums + positions).to(tl.float32)
        new_along = tl.load(along + at)
        before = tl.load(before_size + at)
        after = tl.load(after_size + at)
        scale = range_scale(chunk, CHUNK)
        tl.store(later + positions, (total / scale).to(later.dtype.element_ty))
        tl.store(later_along + at, total_along / scale)
        factor = tl.exp2(before - after) if IS_EXPONENTIAL else before / tl.where(after > 0.0, after, 1.0)
        total = total * factor[:, None] + new * scale
        total_along = total_along * factor + new_along * scale


def sums_after(
    query: Tensor,
    upstream: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    states: ChunkStates,
    by_row: Tensor,
    query_level: Tensor,
    by_total: Tensor,
    curve: Curve,
    chunk: int,
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sums over the queries after each chunk: of the output's gradient, and of its product with the output.

    Both are divided by min(keys so far, 1024). Shape: (slots, heads, padded, head_width), and (slots, heads, padded).
    """
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    size, size_after, level_before = states.size, states.size_after, states.level_before
    (tokens, heads, width), (slots, _, padded) = query.shape, size.shape
    tile = fit_tile(tiling or chunk_tile(query, chunk), padded)
    sums, later = (query.new_empty(slots, heads, padded, width) for _ in range(2))
    along, later_along = (query.new_empty(slots, heads, padded, dtype=torch.float32) for _ in range(2))
    batch, blocks = first.shape[0], padded // tile.columns
    if tokens * heads * max_length:
        _chunk_sums[(triton.cdiv(max_length, chunk) * blocks, heads, batch)](
            query, upstream, matrix, first, length, size, level_before, by_row, query_level, by_total, sums, along,
            query.stride(0), query.stride(1), upstream.stride(0), upstream.stride(1),
            heads, blocks, matrix.shape[0], curve.epsilon,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, CHUNK=chunk, FEATURES=tile.columns,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        _carry[(padded // 16, heads, batch)](
            sums, along, size, size_after, first, length, later, later_along, heads,
            IS_EXPONENTIAL=curve.is_exponential, PADDED=padded, WIDTH=width, CHUNK=chunk, FEATURES=16, num_warps=2,
        )  # fmt: skip
    return later, later_along


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
    query, key, value, upstream, matrix, first, length, size_after, later, later_along,
    key_level, level, by_row, query_level, by_total, by_key_out, by_value_out,
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
    key_levels = tl.load(key_level + at, mask=is_row, other=0.0)
    levels = tl.load(level + at, mask=is_row, other=NONE)
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
    end = tl.max(levels, 0)
    if IS_EXPONENTIAL:
        by_key = tl.where(is_row, key_levels - norm * squares(k), -NONE)
        by_norm_key = tl.where(is_row, -norm * squares(k), -NONE)
    else:
        by_key = tl.full([CHUNK], 1.0, tl.float32)
        by_norm_key = by_key
        top = tl.full([CHUNK], 1.0, tl.float32)
    neutral = tl.full([COLUMNS], 0.0 if IS_EXPONENTIAL else 1.0, tl.float32)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    query_sum = tl.zeros([CHUNK], tl.float32) + epsilon * features
    key_sum = tl.zeros([CHUNK], tl.float32)
    gradient = tl.zeros([CHUNK, WIDTH], tl.float32)
    by_value = tl.zeros([CHUNK, WIDTH], tl.float32)
    by_norm = tl.zeros([CHUNK], tl.float32)
    rest = tl.zeros([WIDTH], tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        is_feature = (feature < features)[None, :]
        weights = load_matrix(matrix, feature, features, WIDTH)
        state = slot * PADDED + feature
        later_sums = tl.load(later + state[:, None] * WIDTH + column[None, :])
        later_sums_along = tl.load(later_along + state)
        sizes = tl.load(size_after + state)
        if IS_EXPONENTIAL:
            is_valid = sizes > NONE / 2
            shift = tl.where(is_valid, tl.log2(scale) - sizes, NONE)
            part = tl.where(is_valid, epsilon * scale * tl.exp2(tl.minimum(end - sizes, 100.0)), 0.0)
        else:
            shift = tl.where(sizes > 0.0, scale / tl.where(sizes > 0.0, sizes, 1.0), 0.0)
            part = epsilon * shift
        u = product(q, tl.trans(weights))
        phi = tl.where(is_feature, weight(u, neutral[None, :], top[:, None], IS_EXPONENTIAL), 0.0)
        query_sum += tl.sum(phi, 1)
        phi = phi.to(q.dtype)
        key_u = product(k, tl.trans(weights))
        key_phi = tl.where(is_feature, weight(key_u, neutral[None, :], by_key[:, None], IS_EXPONENTIAL), 0.0)
        key_sum += tl.sum(key_phi, 1)
        pairs += product(key_phi.to(q.dtype), tl.trans(phi))
        within = product(by_pair, phi) * largest[:, None] + floor[:, None]
        within = within * tl.where(is_feature, slope(key_u, neutral[None, :], by_key[:, None], IS_EXPONENTIAL), 0.0)
        shares = weight(key_u, shift[None, :], by_norm_key[:, None], IS_EXPONENTIAL)
        by_value += product(narrow_to(shares, later_sums), later_sums)
        rest += tl.sum(part[:, None] * later_sums.to(tl.float32), 0)
        by_u = product(v, tl.trans(later_sums)) - later_sums_along[None, :]
        by_u = by_u * slope(key_u, shift[None, :], by_norm_key[:, None], IS_EXPONENTIAL) + within
        by_norm += tl.sum(by_u, 1)
        gradient += product(narrow_to(by_u, weights), weights)
    gradient += norm_slope * by_norm[:, None] * k.to(tl.float32)
    level_factor = tl.exp2(tl.minimum(tl.where(is_later, levels[:, None] + relative, NONE), 100.0))
    pairs = (pairs + epsilon * key_sum[:, None]) * key_factor + epsilon * query_sum[None, :] * level_factor
    by_value += product(pairs.to(upstream_rows.dtype), upstream_rows)
    by_value += tl.exp2(levels - end)[:, None] * rest[None, :]
    positions = at[:, None] * WIDTH + column[None, :]
    tl.store(by_key_out + positions, gradient.to(by_key_out.dtype.element_ty), mask=is_row[:, None])
    tl.store(by_value_out + positions, by_value.to(by_value_out.dtype.element_ty), mask=is_row[:, None])


def query_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    upstream: Tensor,
    mixed: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    states: ChunkStates,
    by_row: Tensor,
    query_level: Tensor,
    curve: Curve,
    chunk: int,
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the queries, and the product of each output row with its gradient: (tokens, heads)."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    mean, size, _, key_level, level, _ = states
    (tokens, heads, width), padded = query.shape, mean.shape[2]
    by_query = sequences.empty(query, tokens, heads, width)
    by_total = sequences.empty(query, tokens, heads, dtype=torch.float32)
    tile = fit_tile(tiling or chunk_tile(query, chunk), padded)
    if tokens * heads * max_length:
        _query_gradient[(triton.cdiv(max_length, chunk), heads, first.shape[0])](
            query, key, value, upstream, mixed, matrix, first, length, mean, size, key_level, level, by_row,
            query_level,
            by_query, by_total,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            upstream.stride(0), upstream.stride(1),
            heads, matrix.shape[0], curve.in_exponents(width), curve.in_gradients(width), curve.epsilon,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, CHUNK=chunk, COLUMNS=tile.columns,
            num_warps=tile.warps, num_stages=tile.stages,
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
    later: Tensor,
    later_along: Tensor,
    by_row: Tensor,
    query_level: Tensor,
    by_total: Tensor,
    curve: Curve,
    chunk: int,
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values, (tokens, heads, head_width)."""
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    size_after, key_level, level = states.size_after, states.key_level, states.level
    (tokens, heads, width), padded = key.shape, size_after.shape[2]
    by_key, by_value = (sequences.empty(key, tokens, heads, width) for _ in range(2))
    tile = fit_tile(tiling or chunk_tile(key, chunk), padded)
    if tokens * heads * max_length:
        _key_gradient[(triton.cdiv(max_length, chunk), heads, first.shape[0])](
            query, key, value, upstream, matrix, first, length, size_after, later, later_along,
            key_level, level, by_row, query_level, by_total, by_key, by_value,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            upstream.stride(0), upstream.stride(1),
            heads, matrix.shape[0], curve.in_exponents(width), curve.in_gradients(width), curve.epsilon,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, CHUNK=chunk, COLUMNS=tile.columns,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return by_key, by_value
