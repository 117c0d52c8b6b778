"""The forward pass: scores tile by tile with a running maximum, as in flash attention."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.disentangled.kernels.common import band_start, position_bias
from bertsmith.ops.disentangled.kernels.launch import Launch
from bertsmith.ops.disentangled.kernels.plan import forward_tile
from bertsmith.ops.kernel_dropout import is_kept


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
    local,
    position,
    is_query,
    query_start,
    keys_here,
    low,
    high,
    stream,
    seed,
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
    """Process one query tile with the key tiles from `low` to `high`; pointers start at the sequence and head."""
    width, column = tl.arange(0, WIDTH), tl.arange(0, COLUMNS)
    for begin in range(low, high, COLUMNS):
        begin = tl.multiple_of(begin, COLUMNS)
        key_position = begin + column
        is_key = key_position < keys_here
        where = key_position[:, None] * KEY_STRIDE + width[None, :]
        keys = tl.load(key + where, mask=is_key[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * factor
        scores += position_bias(
            by_query, by_key, far_query, far_key, local, key_position, position, key_position, is_query, is_key,
            query_start,
            band_start(begin, HALF), QUERY_COLUMNS, KEY_COLUMNS, HEADS, HAS_QUERY, HAS_KEY, SIDE, ROWS, COLUMNS,
        )  # fmt: skip
        is_attended = is_query[:, None] & is_key[None, :]
        if CAUSAL:
            is_attended = is_attended & (position[:, None] >= key_position[None, :])
        scores = tl.where(is_attended, scores, float("-inf"))
        new_level = tl.maximum(level, tl.max(scores, 1))
        # rows without a key so far: −inf − −inf would be NaN
        safe_level = tl.where(new_level == float("-inf"), 0.0, new_level)
        probabilities = tl.exp2(scores - safe_level[:, None])
        shrink = tl.exp2(level - safe_level)
        mass = mass * shrink + tl.sum(probabilities, 1)
        if DROPS:
            probabilities = tl.where(
                is_kept(seed, stream, local[:, None], key_position[None, :], rate), probabilities, 0.0
            )
        value_where = key_position[:, None] * VALUE_STRIDE + width[None, :]
        values = tl.load(value + value_where, mask=is_key[:, None], other=0.0)
        total = total * shrink[:, None] + tl.dot(probabilities.to(values.dtype), values, input_precision="ieee")
        level = new_level
    return total, level, mass


@triton.jit
def _forward(
    query,
    key,
    value,
    out,
    log_mass_out,
    by_query,
    by_key,
    far_query,
    far_key,
    positions,
    first,
    length,
    key_first,
    key_length,
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
    HAS_POSITIONS: tl.constexpr,
    HALF: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = block * ROWS
    queries_here, keys_here = tl.load(length + sequence), tl.load(key_length + sequence)
    if begin >= queries_here:
        return
    # 64-bit offsets to the sequence, 32-bit offsets inside it, which are faster
    row, key_row = tl.load(first + sequence).to(tl.int64), tl.load(key_first + sequence).to(tl.int64)
    key += key_row * KEY_STRIDE + head * WIDTH
    value += key_row * VALUE_STRIDE + head * WIDTH
    if HAS_QUERY:
        by_query += (row * HEADS + head) * QUERY_COLUMNS
    if HAS_KEY:
        by_key += (key_row * HEADS + head) * KEY_COLUMNS
    if HALF > 0:
        if HAS_QUERY:
            far_query += (row * HEADS + head) * 2
        if HAS_KEY:
            far_key += (key_row * HEADS + head) * 2
    local = begin + tl.arange(0, ROWS)
    is_query = local < queries_here
    width = tl.arange(0, WIDTH)
    position = local
    if HAS_POSITIONS:
        position = tl.load(positions + row + local, mask=is_query, other=0).to(tl.int32)
    query += row * QUERY_STRIDE + head * WIDTH
    tile = tl.load(query + local[:, None] * QUERY_STRIDE + width[None, :], mask=is_query[:, None], other=0.0)
    seed = 0
    if DROPS:
        seed = tl.load(seed_of)
    stream = sequence * HEADS + head
    level = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    start = band_start(begin, HALF)
    end = keys_here
    if CAUSAL and not HAS_POSITIONS:
        end = tl.minimum(keys_here, begin + ROWS)
    near_low, near_high = 0, end
    if HALF > 0:
        near_low = tl.cdiv(tl.maximum(begin - reach - COLUMNS + 2, 0), COLUMNS) * COLUMNS
        near_high = tl.minimum(end, tl.cdiv(begin + ROWS - 1 + reach, COLUMNS) * COLUMNS)
        total, level, mass = _attend(
            total, level, mass, tile, key, value, by_query, by_key, far_query, far_key, local, position, is_query,
            start, keys_here, 0, near_low, stream, seed, factor, rate, KEY_STRIDE, VALUE_STRIDE, QUERY_COLUMNS,
            KEY_COLUMNS, HEADS, WIDTH, HAS_QUERY, HAS_KEY, HALF, CAUSAL, DROPS, 1, ROWS, COLUMNS,
        )  # fmt: skip
    total, level, mass = _attend(
        total, level, mass, tile, key, value, by_query, by_key, far_query, far_key, local, position, is_query, start,
        keys_here, near_low, near_high, stream, seed, factor, rate, KEY_STRIDE, VALUE_STRIDE, QUERY_COLUMNS,
        KEY_COLUMNS, HEADS, WIDTH, HAS_QUERY, HAS_KEY, HALF, CAUSAL, DROPS, -1, ROWS, COLUMNS,
    )  # fmt: skip
    if HALF > 0:
        total, level, mass = _attend(
            total, level, mass, tile, key, value, by_query, by_key, far_query, far_key, local, position, is_query,
            start, keys_here, near_high, end, stream, seed, factor, rate, KEY_STRIDE, VALUE_STRIDE, QUERY_COLUMNS,
            KEY_COLUMNS, HEADS, WIDTH, HAS_QUERY, HAS_KEY, HALF, CAUSAL, DROPS, 0, ROWS, COLUMNS,
        )  # fmt: skip
    has_keys = mass > 0
    keep_rate = 1.0
    if DROPS:
        keep_rate = 1.0 - rate
    mixed = total / (tl.where(has_keys, mass, 1.0) * keep_rate)[:, None]
    out += (row * HEADS + head) * WIDTH
    where = local[:, None] * (HEADS * WIDTH) + width[None, :]
    tl.store(out + where, mixed.to(out.dtype.element_ty), mask=is_query[:, None])
    log_mass = tl.where(has_keys, level + tl.log2(tl.where(has_keys, mass, 1.0)), 0.0)
    tl.store(log_mass_out + (row * HEADS + head) + local * HEADS, log_mass, mask=is_query)


def forward(launch: Launch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output, 0 at padding, and the tensors saved for the backward pass.

    These are the base-2 logarithm of every softmax denominator, (rows, heads), and the position scores by query and by
    key, empty if they do not exist or are not saved.
    """
    rows, heads, _ = launch.query.shape
    out = launch.empty(launch.query)
    log_mass = launch.query.new_empty(rows, heads, dtype=torch.float32)
    tile = forward_tile(launch.query)
    bias = launch.position_scores()
    _forward[triton.cdiv(launch.max_length, tile.rows), heads, len(launch.first)](
        launch.query,
        launch.key,
        launch.value,
        out,
        log_mass,
        *bias,
        *launch.where,
        *launch.numbers,
        *launch.strides,
        *launch.columns,
        **launch.constants,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    saved = [scores if launch.saves_scores and scores is not None else out.new_empty(0) for scores in bias[:2]]
    return out, log_mass, saved[0], saved[1]
