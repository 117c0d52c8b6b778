"""What the kernels of disentangled attention share: where a row's band begins, the bias of a tile, sums by offset."""

import triton
import triton.language as tl

from bertsmith.ops.kernel_dropout import is_kept


@triton.jit
def band_start(position, HALF: tl.constexpr):
    """The first column a buffer holds for rows of this block of 64 places (plan.EDGE); HALF is 0 where it holds all."""
    if HALF == 0:
        return 0
    return tl.multiple_of(tl.maximum(position // 64 * 64 - HALF, 0), 64)


@triton.jit
def position_bias(
    by_query,
    by_key,
    far_query,
    far_key,
    query_index,
    key_index,
    query_place,
    key_place,
    is_query,
    is_key,
    query_start,
    key_start,
    QUERY_COLUMNS,
    KEY_COLUMNS,
    HEADS: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    HAS_KEY: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What positions add to the scores of a tile, (ROWS, COLUMNS), float32, undefined beyond the sequences.

    The pointers are those of the sequence and head. SIDE is −1 for a tile of the buffers, 0 for keys far ahead, 1 for
    keys far behind. Columns beyond the sequence are read unmasked (buffers are whole tiles wide): loads stay wide.
    """
    bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    if HAS_QUERY:
        if SIDE < 0:
            where = query_index[:, None] * (HEADS * QUERY_COLUMNS) + (key_place - query_start)[None, :]
            bias += tl.load(by_query + where, mask=is_query[:, None], other=0.0).to(tl.float32)
        else:
            bias += tl.load(far_query + query_index * (HEADS * 2) + SIDE, mask=is_query, other=0.0)[:, None]
    if HAS_KEY:
        if SIDE < 0:
            where = key_index[:, None] * (HEADS * KEY_COLUMNS) + (query_place - key_start)[None, :]
            bias += tl.trans(tl.load(by_key + where, mask=is_key[:, None], other=0.0)).to(tl.float32)
        else:
            bias += tl.load(far_key + key_index * (HEADS * 2) + SIDE, mask=is_key, other=0.0)[None, :]
    return bias


@triton.jit
def offset_range(low_place, high_place, first_column, last_column, reach, DIRECTION: tl.constexpr, HALF: tl.constexpr):
    """The least and the greatest offset (query − key) between rows of these places and these columns.

    DIRECTION is 1 where the rows are queries, −1 where they are keys. Of a band only the near offsets count.
    """
    least, greatest = low_place - last_column, high_place - first_column
    if DIRECTION < 0:
        least, greatest = -greatest, -least
    if HALF > 0:
        least, greatest = tl.maximum(least, 1 - reach), tl.minimum(greatest, reach - 1)
    return least, greatest


@triton.jit
def offsets_and_columns(position, least, greatest, done, DIRECTION: tl.constexpr, CHUNK: tl.constexpr):
    """The next offsets of a range after those that are done, (CHUNK,), and the column each row has there.

    They come in the order in which columns rise, and columns are written as a start and a step: so the compiler sees
    that neighbours lie side by side, without which each number is fetched by itself.
    Shape: place (rows,); column (rows, CHUNK).
    """
    step = tl.arange(0, CHUNK)
    if DIRECTION > 0:
        begin = greatest - done
        offset = begin - step
    else:
        begin = least + done
        offset = begin + step
    return offset, (position - DIRECTION * begin)[:, None] + step[None, :]


@triton.jit
def near_mask(column, is_row, offset, length, reach, CAUSAL: tl.constexpr, HALF: tl.constexpr):
    """Which (row, offset) stand for a pair whose score's gradient lies in the buffer.

    Shape: column (rows, offsets), is_row (rows,), offset (offsets,).
    """
    is_pair = is_row[:, None] & (column >= 0) & (column < length)
    if CAUSAL:
        is_pair = is_pair & (offset >= 0)[None, :]
    if HALF > 0:
        is_pair = is_pair & (tl.abs(offset) < reach)[None, :]
    return is_pair


@triton.jit
def table_rows(table, offset, least, offsets, TABLE_STRIDE, WIDTH: tl.constexpr):
    """The rows of a table that has one for every offset from `least` on: (offsets, WIDTH); 0 beyond its ends."""
    index = offset - least
    is_row = (index >= 0) & (index < offsets)
    return tl.load(
        table + index[:, None] * TABLE_STRIDE + tl.arange(0, WIDTH)[None, :], mask=is_row[:, None], other=0.0
    )


@triton.jit
def add_by_offset(
    total,
    buffer,
    table,
    least_offset,
    offsets,
    index,
    position,
    is_row,
    low_place,
    high_place,
    length,
    start,
    reach,
    BUFFER_COLUMNS,
    TABLE_STRIDE,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIRECTION: tl.constexpr,
    CAUSAL: tl.constexpr,
    HALF: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """total + Σ_offset buffer[index, offset] · table[offset]: the gradient of states through position scores.

    `buffer` points at the sequence and head, `table` at the head.
    Shape: total (rows, WIDTH), float32; index, place, is_row (rows,).
    """
    last = length - 1
    if HALF > 0:
        last = tl.minimum(last, start + BUFFER_COLUMNS - 1)
    least, greatest = offset_range(low_place, high_place, start, last, reach, DIRECTION, HALF)
    for done in range(0, greatest - least + 1, CHUNK):
        offset, column = offsets_and_columns(position, least, greatest, done, DIRECTION, CHUNK)
        is_pair = near_mask(column, is_row, offset, length, reach, CAUSAL, HALF)
        where = index[:, None] * (HEADS * BUFFER_COLUMNS) + (column - start)
        by_score = tl.load(buffer + where, mask=is_pair, other=0.0)
        rows = table_rows(table, offset, least_offset, offsets, TABLE_STRIDE, WIDTH)
        total += tl.dot(by_score, rows, input_precision="ieee")
    return total


@triton.jit
def add_ends(total, table, offsets, ahead, behind, TABLE_STRIDE, WIDTH: tl.constexpr):
    """total + what far pairs give: two numbers for every row times the table's first and last row."""
    width = tl.arange(0, WIDTH)
    first = tl.load(table + width).to(tl.float32)
    last = tl.load(table + (offsets - 1) * TABLE_STRIDE + width).to(tl.float32)
    return total + ahead[:, None] * first[None, :] + behind[:, None] * last[None, :]


@triton.jit
def store_ends(out, states, ahead, behind, WIDTH: tl.constexpr):
    """Writes a tile's part of the gradient of the table's rows for ahead and behind."""
    width, wide = tl.arange(0, WIDTH), states.to(tl.float32)
    tl.store(out + width, tl.sum(ahead[:, None] * wide, 0))
    tl.store(out + WIDTH + width, tl.sum(behind[:, None] * wide, 0))


@triton.jit
def score_gradient(
    queries,
    keys,
    values,
    upstream,
    bias,
    log_mass,
    agreement,
    position,
    local,
    key_place,
    is_query,
    is_key,
    seed,
    stream,
    factor,
    rate,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
):
    """The shares of a tile after dropout, and the gradient of its scores before the scale: (queries, keys), float32."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor + bias
    is_seen = is_query[:, None] & is_key[None, :]
    if CAUSAL:
        is_seen = is_seen & (position[:, None] >= key_place[None, :])
    shares = tl.exp2(tl.where(is_seen, scores - log_mass[:, None], float("-inf")))
    by_share = tl.dot(upstream, tl.trans(values), input_precision="ieee")
    kept_shares = shares
    if DROPS:
        kept = tl.where(is_kept(seed, stream, local[:, None], key_place[None, :], rate), 1.0 / (1.0 - rate), 0.0)
        by_share = by_share * kept
        kept_shares = shares * kept
    return kept_shares, shares * (by_share - agreement[:, None])
