"""The forward pass over pairs: scores tile by tile with a running maximum, as in flash attention."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.disentangled.kernels.call import Call
from bertsmith.ops.disentangled.kernels.common import band_start, position_bias
from bertsmith.ops.disentangled.kernels.plan import forward_tile
from bertsmith.ops.kernels.chance import is_kept


@triton.jit
def _attend(
    total,
    level,
    mass,
    query,
    key,
    value,
    by_query,
    by_key,
    far_query,
    far_key,
    query_row,
    place,
    is_query,
    query_start,
    key_begin,
    key_length,
    low,
    high,
    head,
    stream,
    seed,
    local,
    factor,
    rate,
    KEY_STRIDE,
    VALUE_STRIDE,
    QUERY_COLUMNS,
    KEY_COLUMNS,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    HAS_KEY: tl.constexpr,
    HALF: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One query tile over the keys from `low` to `high`, whole tiles."""
    width, column = tl.arange(0, WIDTH), tl.arange(0, COLUMNS)
    for begin in range(low, high, COLUMNS):
        begin = tl.multiple_of(begin, COLUMNS)
        key_place = begin + column
        is_key = key_place < key_length
        key_row = (key_begin + key_place).to(tl.int64)
        keys = tl.load(
            key + key_row[:, None] * KEY_STRIDE + head * WIDTH + width[None, :], mask=is_key[:, None], other=0.0
        )
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * factor
        scores += position_bias(
            by_query,
            by_key,
            far_query,
            far_key,
            query_row,
            key_row * HEADS + head,
            place,
            key_place,
            is_query,
            is_key,
            query_start,
            band_start(begin, HALF),
            QUERY_COLUMNS,
            KEY_COLUMNS,
            HAS_QUERY,
            HAS_KEY,
            SIDE,
            ROWS,
            COLUMNS,
        )
        is_seen = is_query[:, None] & is_key[None, :]
        if CAUSAL:
            is_seen = is_seen & (place[:, None] >= key_place[None, :])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_level = tl.maximum(level, tl.max(scores, 1))
        # rows that have seen nothing yet: −inf − −inf would be NaN
        safe_level = tl.where(new_level == float("-inf"), 0.0, new_level)
        shares = tl.exp2(scores - safe_level[:, None])
        shrink = tl.exp2(level - safe_level)
        mass = mass * shrink + tl.sum(shares, 1)
        if DROPS:
            shares = tl.where(is_kept(seed, stream, local[:, None], key_place[None, :], rate), shares, 0.0)
        values = tl.load(
            value + key_row[:, None] * VALUE_STRIDE + head * WIDTH + width[None, :], mask=is_key[:, None], other=0.0
        )
        total = total * shrink[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
        level = new_level
    return total, level, mass


@triton.jit
def _forward(
    query,
    key,
    value,
    out,
    level_out,
    by_query,
    by_key,
    far_query,
    far_key,
    places,
    first,
    length,
    key_first,
    key_length_of,
    seed_of,
    factor,
    rate,
    reach,
    QUERY_STRIDE,
    KEY_STRIDE,
    VALUE_STRIDE,
    QUERY_COLUMNS,
    KEY_COLUMNS,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    HAS_KEY: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HALF: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = block * ROWS
    queries, keys = tl.load(length + sequence), tl.load(key_length_of + sequence)
    if begin >= queries:
        return
    local = begin + tl.arange(0, ROWS)
    is_query = local < queries
    row = (tl.load(first + sequence) + local).to(tl.int64)
    key_begin = tl.load(key_first + sequence)
    width = tl.arange(0, WIDTH)
    place = local
    if HAS_PLACES:
        place = tl.load(places + row, mask=is_query, other=0).to(tl.int32)
    tile = tl.load(
        query + row[:, None] * QUERY_STRIDE + head * WIDTH + width[None, :], mask=is_query[:, None], other=0.0
    )
    seed = 0
    if DROPS:
        seed = tl.load(seed_of)
    stream = sequence * HEADS + head
    level = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    start = band_start(begin, HALF)
    end = keys
    if CAUSAL and not HAS_PLACES:
        end = tl.minimum(keys, begin + ROWS)
    near_low, near_high = 0, end
    if HALF > 0:
        near_low = tl.cdiv(tl.maximum(begin - reach - COLUMNS + 2, 0), COLUMNS) * COLUMNS
        near_high = tl.minimum(end, tl.cdiv(begin + ROWS - 1 + reach, COLUMNS) * COLUMNS)
        total, level, mass = _attend(
            total, level, mass, tile, key, value, by_query, by_key, far_query, far_key, row * HEADS + head, place,
            is_query, start, key_begin, keys, 0, near_low, head, stream, seed, local, factor, rate, KEY_STRIDE,
            VALUE_STRIDE, QUERY_COLUMNS, KEY_COLUMNS, HEADS, WIDTH, HAS_QUERY, HAS_KEY, HALF, CAUSAL, DROPS, 1, ROWS,
            COLUMNS,
        )  # fmt: skip
    total, level, mass = _attend(
        total, level, mass, tile, key, value, by_query, by_key, far_query, far_key, row * HEADS + head, place,
        is_query, start, key_begin, keys, near_low, near_high, head, stream, seed, local, factor, rate, KEY_STRIDE,
        VALUE_STRIDE, QUERY_COLUMNS, KEY_COLUMNS, HEADS, WIDTH, HAS_QUERY, HAS_KEY, HALF, CAUSAL, DROPS, -1, ROWS,
        COLUMNS,
    )  # fmt: skip
    if HALF > 0:
        total, level, mass = _attend(
            total, level, mass, tile, key, value, by_query, by_key, far_query, far_key, row * HEADS + head, place,
            is_query, start, key_begin, keys, near_high, end, head, stream, seed, local, factor, rate, KEY_STRIDE,
            VALUE_STRIDE, QUERY_COLUMNS, KEY_COLUMNS, HEADS, WIDTH, HAS_QUERY, HAS_KEY, HALF, CAUSAL, DROPS, 0, ROWS,
            COLUMNS,
        )  # fmt: skip
    has_seen = mass > 0
    kept = 1.0
    if DROPS:
        kept = 1.0 - rate
    mixed = total / (tl.where(has_seen, mass, 1.0) * kept)[:, None]
    target = out + (row * HEADS + head)[:, None] * WIDTH + width[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=is_query[:, None])
    log_mass = tl.where(has_seen, level + tl.log2(tl.where(has_seen, mass, 1.0)), 0.0)
    tl.store(level_out + row * HEADS + head, log_mass, mask=is_query)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """The mixed values, like the query, and the base-2 logarithm of every softmax's sum, (rows, heads); pads get 0."""
    rows, heads, width = call.query.shape
    out = call.query.new_zeros(rows, heads, width)
    log_mass = torch.zeros(rows, heads, dtype=torch.float32, device=out.device)
    tile = forward_tile(call.query)
    bias = call.position_scores()
    _forward[triton.cdiv(call.longest, tile.rows), heads, len(call.first)](
        call.query,
        call.key,
        call.value,
        out,
        log_mass,
        *bias,
        *call.where,
        *call.numbers,
        *call.strides,
        *call.columns,
        **call.constants,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out, log_mass
