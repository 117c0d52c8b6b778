"""The backward pass by key tiles: gradients of keys and values, and of every near score, left in the buffers."""

import triton
import triton.language as tl

from bertsmith.ops.disentangled.kernels.common import add_by_offset, band_start, position_bias
from bertsmith.ops.disentangled.kernels.score_gradient import score_gradient


@triton.jit
def backward_keys(
    query,
    key,
    value,
    upstream,
    log_mass_of,
    agreement_of,
    by_key_out,
    by_value_out,
    far_key_out,
    gradient_by_query,
    gradient_by_key,
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
    table,
    slots,
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
    HAS_PLACES: tl.constexpr,
    HALF: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_start = block * COLUMNS
    queries_here, keys_here = tl.load(length + sequence), tl.load(key_length_of + sequence)
    if key_start >= keys_here:
        return
    width = tl.arange(0, WIDTH)
    key_place = key_start + tl.arange(0, COLUMNS)
    is_key = key_place < keys_here
    key_row = (tl.load(key_first + sequence) + key_place).to(tl.int64)
    keys = tl.load(key + key_row[:, None] * KEY_STRIDE + head * WIDTH + width[None, :], mask=is_key[:, None], other=0.0)
    values = tl.load(
        value + key_row[:, None] * VALUE_STRIDE + head * WIDTH + width[None, :], mask=is_key[:, None], other=0.0
    )
    key_band = band_start(key_start, HALF)
    seed = 0
    if DROPS:
        seed = tl.load(seed_of)
    stream = sequence * HEADS + head
    query_first = tl.load(first + sequence)
    by_keys = tl.zeros([COLUMNS, WIDTH], tl.float32)
    by_values = tl.zeros([COLUMNS, WIDTH], tl.float32)
    ahead = tl.zeros([COLUMNS], tl.float32)
    behind = tl.zeros([COLUMNS], tl.float32)
    low = 0
    if CAUSAL and not HAS_PLACES:
        low = key_start // ROWS * ROWS
    near_low, near_high = low, queries_here
    if HALF > 0:
        near_low = tl.maximum(low, tl.cdiv(tl.maximum(key_start - reach - ROWS + 2, 0), ROWS) * ROWS)
        near_high = tl.minimum(queries_here, tl.cdiv(key_start + COLUMNS - 1 + reach, ROWS) * ROWS)
    for begin in range(low, queries_here, ROWS):
        begin = tl.multiple_of(begin, ROWS)
        local = begin + tl.arange(0, ROWS)
        is_query = local < queries_here
        row = (query_first + local).to(tl.int64)
        place = local
        if HAS_PLACES:
            place = tl.load(places + row, mask=is_query, other=0).to(tl.int32)
        where = row[:, None] * QUERY_STRIDE + head * WIDTH + width[None, :]
        queries = tl.load(query + where, mask=is_query[:, None], other=0.0)
        states = (row * HEADS + head)[:, None] * WIDTH + width[None, :]
        pulled = tl.load(upstream + states, mask=is_query[:, None], other=0.0)
        log_mass = tl.load(log_mass_of + row * HEADS + head, mask=is_query, other=0.0)
        agreement = tl.load(agreement_of + row * HEADS + head, mask=is_query, other=0.0)
        query_band = band_start(begin, HALF)
        if HALF > 0:
            is_near = (begin >= near_low) & (begin < near_high)
            if is_near:
                bias = position_bias(
                    by_query, by_key, far_query, far_key, row * HEADS + head, key_row * HEADS + head, place, key_place,
                    is_query, is_key, query_band, key_band, QUERY_COLUMNS, KEY_COLUMNS, HAS_QUERY, HAS_KEY, -1, ROWS,
                    COLUMNS,
                )  # fmt: skip
            else:
                if begin < near_low:
                    bias = position_bias(
                        by_query, by_key, far_query, far_key, row * HEADS + head, key_row * HEADS + head, place,
                        key_place, is_query, is_key, query_band, key_band, QUERY_COLUMNS, KEY_COLUMNS, HAS_QUERY,
                        HAS_KEY, 0, ROWS, COLUMNS,
                    )  # fmt: skip
                else:
                    bias = position_bias(
                        by_query, by_key, far_query, far_key, row * HEADS + head, key_row * HEADS + head, place,
                        key_place, is_query, is_key, query_band, key_band, QUERY_COLUMNS, KEY_COLUMNS, HAS_QUERY,
                        HAS_KEY, 1, ROWS, COLUMNS,
                    )  # fmt: skip
        else:
            bias = position_bias(
                by_query, by_key, far_query, far_key, row * HEADS + head, key_row * HEADS + head, place, key_place,
                is_query, is_key, query_band, key_band, QUERY_COLUMNS, KEY_COLUMNS, HAS_QUERY, HAS_KEY, -1, ROWS,
                COLUMNS,
            )  # fmt: skip
        shares, by_score = score_gradient(
            queries, keys, values, pulled, bias, log_mass, agreement, place, local, key_place, is_query, is_key, seed,
            stream, factor, rate, CAUSAL, DROPS,
        )  # fmt: skip
        by_values += tl.dot(tl.trans(shares.to(pulled.dtype)), pulled, input_precision="ieee")
        by_score = by_score * scale
        rounded = by_score.to(queries.dtype)
        by_keys += tl.dot(tl.trans(rounded), queries, input_precision="ieee")
        if HALF > 0:
            offset = place[:, None] - key_place[None, :]
            ahead += tl.sum(tl.where(offset <= -reach, by_score, 0.0), 0)
            behind += tl.sum(tl.where(offset >= reach, by_score, 0.0), 0)
            is_stored = is_near
        else:
            is_stored = True
        if HAS_QUERY:
            # columns are whole tiles wide, and what stands beyond the keys is never read
            target = (row * HEADS + head)[:, None] * QUERY_COLUMNS + (key_place - query_band)[None, :]
            tl.store(gradient_by_query + target, rounded, mask=is_query[:, None] & is_stored)
        if HAS_KEY:
            target = (key_row * HEADS + head)[:, None] * KEY_COLUMNS + (place - key_band)[None, :]
            is_row = is_key[:, None] & is_stored
            if HAS_PLACES:
                is_row = is_row & is_query[None, :]
            tl.store(gradient_by_key + target, tl.trans(rounded), mask=is_row)
    if HAS_KEY:
        tl.debug_barrier()  # what this program has written to its own rows is read again
        columns_here = queries_here
        if HAS_PLACES:
            columns_here = keys_here
        by_keys = add_by_offset(
            by_keys, gradient_by_key, table, slots, key_row * HEADS + head, key_place, is_key, key_start,
            key_start + COLUMNS - 1, columns_here, head, key_band, reach, KEY_COLUMNS, TABLE_STRIDE, WIDTH, -1, CAUSAL,
            HALF, CHUNK,
        )  # fmt: skip
        if HALF > 0:
            tl.store(far_key_out + (key_row * HEADS + head) * 2, ahead, mask=is_key)
            tl.store(far_key_out + (key_row * HEADS + head) * 2 + 1, behind, mask=is_key)
    target = (key_row * HEADS + head)[:, None] * WIDTH + width[None, :]
    tl.store(by_key_out + target, by_keys.to(by_key_out.dtype.element_ty), mask=is_key[:, None])
    tl.store(by_value_out + target, by_values.to(by_value_out.dtype.element_ty), mask=is_key[:, None])
