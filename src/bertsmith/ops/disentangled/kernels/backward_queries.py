"""The backward pass by query tiles: gradients of near scores are read from the buffers, far ones are recomputed."""

import triton
import triton.language as tl

from bertsmith.ops.disentangled.kernels.common import (
    add_by_offset,
    add_ends,
    band_start,
    position_bias,
    score_gradient,
    store_ends,
)


@triton.jit
def _over_far_keys(
    total,
    far,
    queries,
    key,
    value,
    query_upstream,
    log_mass,
    agreement,
    far_query,
    far_key,
    local,
    position,
    is_query,
    keys_here,
    low,
    high,
    stream,
    seed,
    factor,
    rate,
    scale,
    KEY_STRIDE,
    VALUE_STRIDE,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    HAS_KEY: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Process one query tile with keys outside the buffers; return the sums of their score gradients, too."""
    width = tl.arange(0, WIDTH)
    for begin in range(low, high, COLUMNS):
        key_position = begin + tl.arange(0, COLUMNS)
        is_key = key_position < keys_here
        where = key_position[:, None] * KEY_STRIDE + width[None, :]
        keys = tl.load(key + where, mask=is_key[:, None], other=0.0)
        value_where = key_position[:, None] * VALUE_STRIDE + width[None, :]
        values = tl.load(value + value_where, mask=is_key[:, None], other=0.0)
        bias = position_bias(
            far_query, far_key, far_query, far_key, local, key_position, position, key_position, is_query, is_key, 0,
            0, 0, 0,
            HEADS, HAS_QUERY, HAS_KEY, SIDE, ROWS, COLUMNS,
        )  # fmt: skip
        _, by_score = score_gradient(
            queries, keys, values, query_upstream, bias, log_mass, agreement, position, local, key_position,
            is_query, is_key,
            seed, stream, factor, rate, CAUSAL, DROPS,
        )  # fmt: skip
        by_score = by_score * scale
        total += tl.dot(by_score.to(keys.dtype), keys, input_precision="ieee")
        far += tl.sum(by_score, 1)
    return total, far


@triton.jit(do_not_specialize=["least_offset", "offsets"])
def backward_queries(
    query,
    key,
    value,
    upstream,
    log_mass_of,
    agreement_of,
    by_query_out,
    by_ends_out,
    gradient_by_query,
    gradient_by_key,
    far_query,
    far_key,
    positions,
    first,
    length,
    key_first,
    key_length,
    seed_of,
    table,
    least_offset,
    offsets,
    factor,
    rate,
    reach,
    scale,
    QUERY_STRIDE,
    KEY_STRIDE,
    VALUE_STRIDE,
    TABLE_STRIDE,
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
    CHUNK: tl.constexpr,
):
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = block * ROWS
    queries_here, keys_here = tl.load(length + sequence), tl.load(key_length + sequence)
    if begin >= queries_here:
        return
    row, key_row = tl.load(first + sequence).to(tl.int64), tl.load(key_first + sequence).to(tl.int64)
    key += key_row * KEY_STRIDE + head * WIDTH
    value += key_row * VALUE_STRIDE + head * WIDTH
    if HAS_QUERY:
        gradient_by_query += (row * HEADS + head) * QUERY_COLUMNS
    if HAS_KEY:
        gradient_by_key += (key_row * HEADS + head) * KEY_COLUMNS
    width = tl.arange(0, WIDTH)
    local = begin + tl.arange(0, ROWS)
    is_query = local < queries_here
    position = local
    if HAS_POSITIONS:
        position = tl.load(positions + row + local, mask=is_query, other=0).to(tl.int32)
    start = band_start(begin, HALF)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    ahead = tl.zeros([ROWS], tl.float32)
    behind = tl.zeros([ROWS], tl.float32)
    end = keys_here
    if CAUSAL and not HAS_POSITIONS:
        end = tl.minimum(keys_here, begin + ROWS)
    near_low, near_high = 0, end
    if HALF > 0:
        near_low = tl.cdiv(tl.maximum(begin - reach - COLUMNS + 2, 0), COLUMNS) * COLUMNS
        near_high = tl.minimum(end, tl.cdiv(begin + ROWS - 1 + reach, COLUMNS) * COLUMNS)
    if HAS_QUERY or HAS_KEY:
        for key_begin in range(near_low, near_high, COLUMNS):
            key_begin = tl.multiple_of(key_begin, COLUMNS)
            key_position = key_begin + tl.arange(0, COLUMNS)
            is_key = key_position < keys_here
            where = key_position[:, None] * KEY_STRIDE + width[None, :]
            keys = tl.load(key + where, mask=is_key[:, None], other=0.0)
            if HAS_QUERY:
                source = local[:, None] * (HEADS * QUERY_COLUMNS) + (key_position - start)[None, :]
                by_score = tl.load(gradient_by_query + source, mask=is_query[:, None], other=0.0)
            else:
                columns = (position - band_start(key_begin, HALF))[None, :]
                source = key_position[:, None] * (HEADS * KEY_COLUMNS) + columns
                by_score = tl.trans(tl.load(gradient_by_key + source, mask=is_key[:, None], other=0.0))
            is_attended = is_query[:, None] & is_key[None, :]
            if CAUSAL:
                is_attended = is_attended & (position[:, None] >= key_position[None, :])
            by_score = tl.where(is_attended, by_score, 0.0)
            total += tl.dot(by_score.to(keys.dtype), keys, input_precision="ieee")
            if HALF > 0:
                offset = position[:, None] - key_position[None, :]
                ahead += tl.sum(tl.where(offset <= -reach, by_score, 0.0).to(tl.float32), 1)
                behind += tl.sum(tl.where(offset >= reach, by_score, 0.0).to(tl.float32), 1)
    if HALF > 0 or not (HAS_QUERY or HAS_KEY):
        query += row * QUERY_STRIDE + head * WIDTH
        queries = tl.load(query + local[:, None] * QUERY_STRIDE + width[None, :], mask=is_query[:, None], other=0.0)
        upstream += (row * HEADS + head) * WIDTH
        query_upstream = tl.load(
            upstream + local[:, None] * (HEADS * WIDTH) + width[None, :], mask=is_query[:, None], other=0.0
        )
        log_mass = tl.load(log_mass_of + row * HEADS + head + local * HEADS, mask=is_query, other=0.0)
        agreement = tl.load(agreement_of + row * HEADS + head + local * HEADS, mask=is_query, other=0.0)
        seed = 0
        if DROPS:
            seed = tl.load(seed_of)
        stream = sequence * HEADS + head
        if HAS_QUERY or HAS_KEY:
            if HAS_QUERY:
                far_query += (row * HEADS + head) * 2
            if HAS_KEY:
                far_key += (key_row * HEADS + head) * 2
            total, behind = _over_far_keys(
                total, behind, queries, key, value, query_upstream, log_mass, agreement, far_query, far_key, local,
                position,
                is_query, keys_here, 0, near_low, stream, seed, factor, rate, scale, KEY_STRIDE, VALUE_STRIDE, HEADS,
                WIDTH, HAS_QUERY, HAS_KEY, CAUSAL, DROPS, 1, ROWS, COLUMNS,
            )  # fmt: skip
            near_low = near_high
        total, ahead = _over_far_keys(
            total, ahead, queries, key, value, query_upstream, log_mass, agreement, far_query, far_key, local, position,
            is_query, keys_here, near_low, end, stream, seed, factor, rate, scale, KEY_STRIDE, VALUE_STRIDE, HEADS,
            WIDTH, HAS_QUERY, HAS_KEY, CAUSAL, DROPS, 0, ROWS, COLUMNS,
        )  # fmt: skip
    if HAS_QUERY:
        low_position, high_position = begin, begin + ROWS - 1
        if HAS_POSITIONS:
            low_position, high_position = begin * 0, keys_here - 1
        table += head * WIDTH
        total = add_by_offset(
            total, gradient_by_query, table, least_offset, offsets, local, position, is_query, low_position,
            high_position,
            keys_here, start, reach, QUERY_COLUMNS, TABLE_STRIDE, HEADS, WIDTH, 1, CAUSAL, HALF, CHUNK,
        )  # fmt: skip
        if HALF > 0:
            total = add_ends(total, table, offsets, ahead, behind, TABLE_STRIDE, WIDTH)
            out = by_ends_out + ((sequence * tl.num_programs(0) + block) * HEADS + head) * (2 * WIDTH)
            store_ends(out, queries, ahead, behind, WIDTH)
    target = (row * HEADS + head) * WIDTH + local[:, None] * (HEADS * WIDTH) + width[None, :]
    tl.store(by_query_out + target, total.to(by_query_out.dtype.element_ty), mask=is_query[:, None])
