"""The backward pass by query tiles: near scores' gradients are read from the buffers, far ones computed anew."""

import triton
import triton.language as tl

from bertsmith.ops.disentangled.kernels.common import add_by_offset, band_start, position_bias
from bertsmith.ops.disentangled.kernels.score_gradient import score_gradient


@triton.jit
def backward_queries(
    query,
    key,
    value,
    upstream,
    log_mass_of,
    agreement_of,
    by_query_out,
    far_query_out,
    gradient_by_query,
    gradient_by_key,
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
    begin = block * ROWS
    queries_here, keys_here = tl.load(length + sequence), tl.load(key_length_of + sequence)
    if begin >= queries_here:
        return
    width = tl.arange(0, WIDTH)
    local = begin + tl.arange(0, ROWS)
    is_query = local < queries_here
    row = (tl.load(first + sequence) + local).to(tl.int64)
    place = local
    if HAS_PLACES:
        place = tl.load(places + row, mask=is_query, other=0).to(tl.int32)
    key_begin = tl.load(key_first + sequence)
    band = band_start(begin, HALF)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    ahead = tl.zeros([ROWS], tl.float32)
    behind = tl.zeros([ROWS], tl.float32)
    end = keys_here
    if CAUSAL and not HAS_PLACES:
        end = tl.minimum(keys_here, begin + ROWS)
    near_low, near_high = 0, end
    if HALF > 0:
        near_low = tl.cdiv(tl.maximum(begin - reach - COLUMNS + 2, 0), COLUMNS) * COLUMNS
        near_high = tl.minimum(end, tl.cdiv(begin + ROWS - 1 + reach, COLUMNS) * COLUMNS)
    if HAS_QUERY or HAS_KEY:
        for start in range(near_low, near_high, COLUMNS):
            start = tl.multiple_of(start, COLUMNS)
            key_place = start + tl.arange(0, COLUMNS)
            is_key = key_place < keys_here
            key_row = (key_begin + key_place).to(tl.int64)
            where = key_row[:, None] * KEY_STRIDE + head * WIDTH + width[None, :]
            keys = tl.load(key + where, mask=is_key[:, None], other=0.0)
            if HAS_QUERY:
                source = (row * HEADS + head)[:, None] * QUERY_COLUMNS + (key_place - band)[None, :]
                by_score = tl.load(gradient_by_query + source, mask=is_query[:, None], other=0.0)
            else:
                columns = (place - band_start(start, HALF))[None, :]
                source = (key_row * HEADS + head)[:, None] * KEY_COLUMNS + columns
                by_score = tl.trans(tl.load(gradient_by_key + source, mask=is_key[:, None], other=0.0))
            is_seen = is_query[:, None] & is_key[None, :]
            if CAUSAL:
                is_seen = is_seen & (place[:, None] >= key_place[None, :])
            by_score = tl.where(is_seen, by_score, 0.0)
            total += tl.dot(by_score.to(keys.dtype), keys, input_precision="ieee")
            if HALF > 0:
                offset = place[:, None] - key_place[None, :]
                ahead += tl.sum(tl.where(offset <= -reach, by_score, 0.0).to(tl.float32), 1)
                behind += tl.sum(tl.where(offset >= reach, by_score, 0.0).to(tl.float32), 1)
    if HALF > 0 or not (HAS_QUERY or HAS_KEY):
        query_where = row[:, None] * QUERY_STRIDE + head * WIDTH + width[None, :]
        queries = tl.load(query + query_where, mask=is_query[:, None], other=0.0)
        states = (row * HEADS + head)[:, None] * WIDTH + width[None, :]
        pulled = tl.load(upstream + states, mask=is_query[:, None], other=0.0)
        log_mass = tl.load(log_mass_of + row * HEADS + head, mask=is_query, other=0.0)
        agreement = tl.load(agreement_of + row * HEADS + head, mask=is_query, other=0.0)
        seed = 0
        if DROPS:
            seed = tl.load(seed_of)
        for part in tl.static_range(2):
            if HALF > 0:
                low, high = 0, near_low
                if part == 0:
                    low, high = near_high, end
            else:
                low, high = 0, end
                if part == 0:
                    low, high = 0, 0
            for start in range(low, high, COLUMNS):
                key_place = start + tl.arange(0, COLUMNS)
                is_key = key_place < keys_here
                key_row = (key_begin + key_place).to(tl.int64)
                where = key_row[:, None] * KEY_STRIDE + head * WIDTH + width[None, :]
                keys = tl.load(key + where, mask=is_key[:, None], other=0.0)
                value_where = key_row[:, None] * VALUE_STRIDE + head * WIDTH + width[None, :]
                values = tl.load(value + value_where, mask=is_key[:, None], other=0.0)
                bias = position_bias(
                    far_query, far_key, far_query, far_key, row * HEADS + head, key_row * HEADS + head, place, key_place,
                    is_query, is_key, 0, 0, QUERY_COLUMNS, KEY_COLUMNS, HAS_QUERY, HAS_KEY, part, ROWS, COLUMNS,
                )  # fmt: skip
                _, by_score = score_gradient(
                    queries, keys, values, pulled, bias, log_mass, agreement, place, local, key_place, is_query, is_key,
                    seed, sequence * HEADS + head, factor, rate, CAUSAL, DROPS,
                )  # fmt: skip
                by_score = by_score * scale
                total += tl.dot(by_score.to(keys.dtype), keys, input_precision="ieee")
                if HALF > 0:
                    if part == 0:
                        ahead += tl.sum(by_score, 1)
                    else:
                        behind += tl.sum(by_score, 1)
    if HAS_QUERY:
        low_place, high_place = begin, begin + ROWS - 1
        if HAS_PLACES:
            low_place, high_place = begin * 0, keys_here - 1
        total = add_by_offset(
            total, gradient_by_query, table, slots, row * HEADS + head, place, is_query, low_place, high_place,
            keys_here, head, band, reach, QUERY_COLUMNS, TABLE_STRIDE, WIDTH, 1, CAUSAL, HALF, CHUNK,
        )  # fmt: skip
        if HALF > 0:
            tl.store(far_query_out + (row * HEADS + head) * 2, ahead, mask=is_query)
            tl.store(far_query_out + (row * HEADS + head) * 2 + 1, behind, mask=is_query)
    target = (row * HEADS + head)[:, None] * WIDTH + width[None, :]
    tl.store(by_query_out + target, total.to(by_query_out.dtype.element_ty), mask=is_query[:, None])
