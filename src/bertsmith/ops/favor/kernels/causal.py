"""Causal outputs: each query takes from the state before its chunk, and from the keys of its chunk up to itself.

Within a chunk a query has the features φ̂_q + ε, over exp(its level), and a key φ̂_k exp(own) + ε exp(level), with its
own largest exponent and the largest so far: products of φ̂ are a matrix product, and what ε adds are products of sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.causal_states import chunk_tile, slot_of
from bertsmith.ops.favor.kernels.features import LOG2_E, NONE, Curve, fitting, matrix_of, product, rows_of, squares
from bertsmith.ops.kernels.support import Tile


@triton.jit
def _read(
    query, key, value, matrix, first, length, mean, size, own, level, level_before, mixed, by_row, query_level,
    query_row, query_head, key_row, key_head, value_row, value_head, heads, features, norm, epsilon,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    if chunk * CHUNK >= count:
        return
    slot = slot_of(first, sequence, chunk, CHUNK) * heads + head
    place = tl.arange(0, CHUNK)
    row = chunk * CHUNK + place
    is_row = row < count
    row += tl.load(first + sequence)
    column = tl.arange(0, WIDTH)
    at = row.to(tl.int64) * heads + head
    q = rows_of(query, row, head, query_row, query_head, is_row, WIDTH)
    k = rows_of(key, row, head, key_row, key_head, is_row, WIDTH)
    mine = tl.load(own + at, mask=is_row, other=0.0)
    levels = tl.load(level + at, mask=is_row, other=-NONE)
    before = tl.load(level_before + slot)
    by_key = tl.where(is_row, norm * squares(k) - mine, NONE)
    # of the features of queries over exp(top), and of those times the sizes of the state over exp(peak)
    top = tl.full([CHUNK], NONE, tl.float32)
    peak = tl.full([CHUNK], NONE, tl.float32)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    query_sum = tl.zeros([CHUNK], tl.float32)
    key_sum = tl.zeros([CHUNK], tl.float32)
    state_sum = tl.zeros([CHUNK], tl.float32)
    sums = tl.zeros([CHUNK, WIDTH], tl.float32)
    reached = tl.zeros([WIDTH], tl.float32)
    ones = tl.sum(reached, 0)
    keys = tl.maximum(chunk * CHUNK, 1).to(tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        is_feature = feature < features
        weights = matrix_of(matrix, feature, features, WIDTH)
        state = slot * PADDED + feature
        means = tl.load(mean + state[:, None] * WIDTH + column[None, :])
        sizes = tl.load(size + state)
        u = product(q, tl.trans(weights))
        key_u = product(k, tl.trans(weights))
        if IS_EXPONENTIAL:
            exponent = tl.where(is_feature[None, :], u * LOG2_E, NONE)
            larger = tl.maximum(top, tl.max(exponent, 1))
            made = tl.exp2(exponent - larger[:, None])
            smaller = tl.exp2(top - larger)
            top = larger
            pairs = pairs * smaller[:, None]
            query_sum = query_sum * smaller
            key_made = tl.where(is_feature[None, :], tl.exp2(key_u * LOG2_E + by_key[:, None]), 0.0)
            exponent += sizes[None, :]
            larger = tl.maximum(peak, tl.max(exponent, 1))
            taken = tl.exp2(exponent - larger[:, None])
            smaller = tl.exp2(peak - larger)
            peak = larger
            sums = sums * smaller[:, None]
            state_sum = state_sum * smaller
            relative = tl.exp2(sizes - before)
        else:
            made = tl.maximum(u, 0.0)
            key_made = tl.maximum(key_u, 0.0)
            relative = sizes / keys
            taken = made * relative[None, :]
        pairs += product(made.to(q.dtype), tl.trans(key_made.to(q.dtype)))
        query_sum += tl.sum(made, 1)
        key_sum += tl.sum(key_made, 1)
        sums += product(taken.to(means.dtype), means)
        state_sum += tl.sum(taken, 1)
        reached += tl.sum(relative[:, None] * means.to(tl.float32), 0)
        ones += tl.sum(relative, 0)
    is_past = (place[None, :] <= place[:, None]) & is_row[None, :]
    if IS_EXPONENTIAL:
        own_factor = tl.exp2(tl.where(is_past, mine[None, :] - levels[:, None], NONE))
        level_factor = tl.exp2(tl.where(is_past, levels[None, :] - levels[:, None], NONE))
        state_factor = tl.exp2(tl.minimum(peak - top - levels, 120.0))
        floor_factor = epsilon * tl.exp2(before - levels)
    else:
        own_factor = tl.where(is_past, 1.0, 0.0)
        level_factor = own_factor
        state_factor = tl.zeros([CHUNK], tl.float32) + keys
        floor_factor = epsilon * state_factor
        top = tl.zeros([CHUNK], tl.float32)
    query_sum += epsilon * features
    pairs = (pairs + epsilon * key_sum[None, :]) * own_factor + epsilon * query_sum[:, None] * level_factor
    total = tl.sum(pairs, 1) + state_sum * state_factor + floor_factor * ones
    total = tl.where(total == 0.0, 1.0, total)
    v = rows_of(value, row, head, value_row, value_head, is_row, WIDTH)
    out = product((pairs / total[:, None]).to(v.dtype), v)
    out += sums * (state_factor / total)[:, None] + (floor_factor / total)[:, None] * reached[None, :]
    tl.store(mixed + at[:, None] * WIDTH + column[None, :], out.to(mixed.dtype.element_ty), mask=is_row[:, None])
    tl.store(by_row + at, top + levels + tl.log2(total), mask=is_row)
    tl.store(query_level + at, top, mask=is_row)


def read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    longest: int,
    mean: Tensor,
    size: Tensor,
    own: Tensor,
    level: Tensor,
    level_before: Tensor,
    curve: Curve,
    has_pads: bool,
    chunk: int,
    asked: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(mixed, by_row, query_level): the output, the logarithm of every row's sum, and of every query's largest feature.

    Shape: query, mixed (tokens, heads, head_width), by_row, query_level (tokens, heads); others as in `causal_states`.
    """
    (tokens, heads, width), padded = query.shape, mean.shape[2]
    new = query.new_zeros if has_pads else query.new_empty
    mixed = new(tokens, heads, width)
    by_row, query_level = (new(tokens, heads, dtype=torch.float32) for _ in range(2))
    tile = fitting(asked or chunk_tile(query, chunk), padded)
    if tokens * heads * longest:
        _read[(triton.cdiv(longest, chunk), heads, first.shape[0])](
            query, key, value, matrix, first, length, mean, size, own, level, level_before, mixed, by_row, query_level,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            heads, matrix.shape[0], curve.in_exponents(width), curve.epsilon,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, CHUNK=chunk, COLUMNS=tile.columns,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return mixed, by_row, query_level
