"""The backward pass by key tiles: gradients of keys and values, and of near scores, which are stored in the buffers."""

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
def _over_queries(
    by_keys,
    by_values,
    ahead,
    behind,
    query,
    keys,
    values,
    upstream,
    log_mass_of,
    agreement_of,
    gradient_by_query,
    gradient_by_key,
    by_query,
    by_key,
    far_query,
    far_key,
    positions,
    key_position,
    is_key,
    key_start,
    queries_here,
    low,
    high,
    stream,
    seed,
    factor,
    rate,
    reach,
    scale,
    QUERY_STRIDE,
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
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Process one key tile with the query tiles from `low` to `high`; pointers start at the sequence and head."""
    width = tl.arange(0, WIDTH)
    for begin in range(low, high, ROWS):
        begin = tl.multiple_of(begin, ROWS)
        local = begin + tl.arange(0, ROWS)
        is_query = local < queries_here
        position = local
        if HAS_POSITIONS:
            position = tl.load(positions + local, mask=is_query, other=0).to(tl.int32)
        where = local[:, None] * QUERY_STRIDE + width[None, :]
        queries = tl.load(query + where, mask=is_query[:, None], other=0.0)
        upstream_where = local[:, None] * (HEADS * WIDTH) + width[None, :]
        query_upstream = tl.load(upstream + upstream_where, mask=is_query[:, None], other=0.0)
        log_mass = tl.load(log_mass_of + local * HEADS, mask=is_query, other=0.0)
        agreement = tl.load(agreement_of + local * HEADS, mask=is_query, other=0.0)
        query_start = band_start(begin, HALF)
        bias = position_bias(
            by_query, by_key, far_query, far_key, local, key_position, position, key_position, is_query, is_key,
            query_start,
            key_start, QUERY_COLUMNS, KEY_COLUMNS, HEADS, HAS_QUERY, HAS_KEY, SIDE, ROWS, COLUMNS,
        )  # fmt: skip
        probabilities, by_score = score_gradient(
            queries, keys, values, query_upstream, bias, log_mass, agreement, position, local, key_position,
            is_query, is_key,
            seed, stream, factor, rate, CAUSAL, DROPS,
        )  # fmt: skip
        by_values += tl.dot(tl.trans(probabilities.to(query_upstream.dtype)), query_upstream, input_precision="ieee")
        by_score = by_score * scale
        rounded = by_score.to(queries.dtype)
        by_keys += tl.dot(tl.trans(rounded), queries, input_precision="ieee")
        if SIDE == 0:
            ahead += tl.sum(by_score, 0)
        if SIDE == 1:
            behind += tl.sum(by_score, 0)
        if SIDE < 0:
            if HALF > 0:
                offset = position[:, None] - key_position[None, :]
                ahead += tl.sum(tl.where(offset <= -reach, by_score, 0.0), 0)
                behind += tl.sum(tl.where(offset >= reach, by_score, 0.0), 0)
            if HAS_QUERY:
                # buffers are whole tiles wide, and columns beyond the keys are never read
                target = local[:, None] * (HEADS * QUERY_COLUMNS) + (key_position - query_start)[None, :]
                tl.store(gradient_by_query + target, rounded, mask=is_query[:, None])
            if HAS_KEY:
                target = key_position[:, None] * (HEADS * KEY_COLUMNS) + (position - key_start)[None, :]
                is_pair = is_key[:, None]
                if HAS_POSITIONS:
                    is_pair = is_pair & is_query[None, :]
                tl.store(gradient_by_key + target, tl.trans(rounded), mask=is_pair)
    return by_keys, by_values, ahead, behind


@triton.jit(do_not_specialize=["least_offset", "offsets"])
def backward_keys(
    query,
    key,
    value,
    upstream,
    log_mass,
    agreement,
    by_key_out,
    by_value_out,
    by_ends_out,
    gradient_by_query,
    gradient_by_key,
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
    begin = block * COLUMNS
    queries_here, keys_here = tl.load(length + sequence), tl.load(key_length + sequence)
    if begin >= keys_here:
        return
    row, key_row = tl.load(first + sequence).to(tl.int64), tl.load(key_first + sequence).to(tl.int64)
    query += row * QUERY_STRIDE + head * WIDTH
    upstream += (row * HEADS + head) * WIDTH
    log_mass += row * HEADS + head
    agreement += row * HEADS + head
    if HAS_POSITIONS:
        positions += row
    if HAS_QUERY:
        by_query += (row * HEADS + head) * QUERY_COLUMNS
        gradient_by_query += (row * HEADS + head) * QUERY_COLUMNS
    if HAS_KEY:
        by_key += (key_row * HEADS + head) * KEY_COLUMNS
        gradient_by_key += (key_row * HEADS + head) * KEY_COLUMNS
    if HALF > 0:
        if HAS_QUERY:
            far_query += (row * HEADS + head) * 2
        if HAS_KEY:
            far_key += (key_row * HEADS + head) * 2
    width = tl.arange(0, WIDTH)
    key_position = begin + tl.arange(0, COLUMNS)
    is_key = key_position < keys_here
    key += key_row * KEY_STRIDE + head * WIDTH
    keys = tl.load(key + key_position[:, None] * KEY_STRIDE + width[None, :], mask=is_key[:, None], other=0.0)
    value += key_row * VALUE_STRIDE + head * WIDTH
    values = tl.load(value + key_position[:, None] * VALUE_STRIDE + width[None, :], mask=is_key[:, None], other=0.0)
    start = band_start(begin, HALF)
    seed = 0
    if DROPS:
        seed = tl.load(seed_of)
    stream = sequence * HEADS + head
    by_keys = tl.zeros([COLUMNS, WIDTH], tl.float32)
    by_values = tl.zeros([COLUMNS, WIDTH], tl.float32)
    ahead = tl.zeros([COLUMNS], tl.float32)
    behind = tl.zeros([COLUMNS], tl.float32)
    low = 0
    if CAUSAL and not HAS_POSITIONS:
        low = begin // ROWS * ROWS
    near_low, near_high = low, queries_here
    if HALF > 0:
        near_low = tl.maximum(low, tl.cdiv(tl.maximum(begin - reach - ROWS + 2, 0), ROWS) * ROWS)
        near_high = tl.minimum(queries_here, tl.cdiv(begin + COLUMNS - 1 + reach, ROWS) * ROWS)
        by_keys, by_values, ahead, behind = _over_queries(
            by_keys, by_values, ahead, behind, query, keys, values, upstream, log_mass, agreement, gradient_by_query,
            gradient_by_key, by_query, by_key, far_query, far_key, positions, key_position, is_key, start, queries_here,
            low, near_low, stream, seed, factor, rate, reach, scale, QUERY_STRIDE, QUERY_COLUMNS, KEY_COLUMNS, HEADS,
            WIDTH, HAS_QUERY, HAS_KEY, HAS_POSITIONS, HALF, CAUSAL, DROPS, 0, ROWS, COLUMNS,
        )  # fmt: skip
    by_keys, by_values, ahead, behind = _over_queries(
        by_keys, by_values, ahead, behind, query, keys, values, upstream, log_mass, agreement, gradient_by_query,
        gradient_by_key, by_query, by_key, far_query, far_key, positions, key_position, is_key, start, queries_here,
        near_low, near_high, stream, seed, factor, rate, reach, scale, QUERY_STRIDE, QUERY_COLUMNS, KEY_COLUMNS, HEADS,
        WIDTH, HAS_QUERY, HAS_KEY, HAS_POSITIONS, HALF, CAUSAL, DROPS, -1, ROWS, COLUMNS,
    )  # fmt: skip
    if HALF > 0:
        by_keys, by_values, ahead, behind = _over_queries(
            by_keys, by_values, ahead, behind, query, keys, values, upstream, log_mass, agreement, gradient_by_query,
            gradient_by_key, by_query, by_key, far_query, far_key, positions, key_position, is_key, start, queries_here,
            near_high, queries_here, stream, seed, factor, rate, reach, scale, QUERY_STRIDE, QUERY_COLUMNS, KEY_COLUMNS,
            HEADS, WIDTH, HAS_QUERY, HAS_KEY, HAS_POSITIONS, HALF, CAUSAL, DROPS, 1, ROWS, COLUMNS,
        )  # fmt: skip
    if HAS_KEY:
        tl.debug_barrier()  # the rows written above are read below
        columns_here = queries_here
        if HAS_POSITIONS:
            columns_here = keys_here
        table += head * WIDTH
        by_keys = add_by_offset(
            by_keys, gradient_by_key, table, least_offset, offsets, key_position, key_position, is_key, begin,
            begin + COLUMNS - 1, columns_here, start, reach, KEY_COLUMNS, TABLE_STRIDE, HEADS, WIDTH, -1, CAUSAL, HALF,
            CHUNK,
        )  # fmt: skip
        if HALF > 0:
            by_keys = add_ends(by_keys, table, offsets, ahead, behind, TABLE_STRIDE, WIDTH)
            out = by_ends_out + ((sequence * tl.num_programs(0) + block) * HEADS + head) * (2 * WIDTH)
            store_ends(out, keys, ahead, behind, WIDTH)
    target = (key_row * HEADS + head) * WIDTH + key_position[:, None] * (HEADS * WIDTH) + width[None, :]
    tl.store(by_key_out + target, by_keys.to(by_key_out.dtype.element_ty), mask=is_key[:, None])
    tl.store(by_value_out + target, by_values.to(by_value_out.dtype.element_ty), mask=is_key[:, None])
