"""Functions that the kernels of disentangled attention share: bands, position bias of a tile, sums by offset."""

import triton
import triton.language as tl

from bertsmith.ops.kernel_dropout import is_kept


@triton.jit
def band_start(position, HALF: tl.constexpr):
    """Return the first buffer column of a block of 64 positions (plan.EDGE); 0 for whole rows (HALF is 0)."""
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
    query_position,
    key_position,
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
    """Return the position terms of the scores of a tile, (ROWS, COLUMNS), float32, undefined beyond the sequences.

    Pointers start at the sequence and head. SIDE is −1 for a tile of the buffers, 0 for keys far ahead, 1 for keys far
    behind. Columns beyond the sequence are read without a mask, so that loads stay wide; buffers are whole tiles wide.
    """
    bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    if HAS_QUERY:
        if SIDE < 0:
            where = query_index[:, None] * (HEADS * QUERY_COLUMNS) + (key_position - query_start)[None, :]
            bias += tl.load(by_query + where, mask=is_query[:, None], other=0.0).to(tl.float32)
        else:
            bias += tl.load(far_query + query_index * (HEADS * 2) + SIDE, mask=is_query, other=0.0)[:, None]
    if HAS_KEY:
        if SIDE < 0:
            where = key_index[:, None] * (HEADS * KEY_COLUMNS) + (query_position - key_start)[None, :]
            bias += tl.trans(tl.load(by_key + where, mask=is_key[:, None], other=0.0)).to(tl.float32)
        else:
            bias += tl.load(far_key + key_index * (HEADS * 2) + SIDE, mask=is_key, other=0.0)[None, :]
    return bias


@triton.jit
def offset_range(
    low_position, high_position, first_column, last_column, reach, DIRECTION: tl.constexpr, HALF: tl.constexpr
):
    """Return the least and the greatest offset (query − key) between rows and columns.

    DIRECTION is 1 if rows are queries, −1 if they are keys. In a band only near offsets count.
    """
    least, greatest = low_position - last_column, high_position - first_column
    if DIRECTION < 0:
        least, greatest = -greatest, -least
    if HALF > 0:
        least, greatest = tl.maximum(least, 1 - reach), tl.minimum(greatest, reach - 1)
    return least, greatest


@triton.jit
def offsets_and_columns(position, least, greatest, done, DIRECTION: tl.constexpr, CHUNK: tl.constexpr):
    """Return the next CHUNK offsets of a range, and the column of every row at each offset.

    Columns ascend and are written as a start plus a step, so that the compiler recognises contiguous loads.
    Shape: position (rows,); column (rows, CHUNK).
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
    """Return the mask of (row, offset) pairs whose score gradient is in the buffer.

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
    """Return table rows of offsets, (offsets, WIDTH), 0 beyond the table; the first row is for the offset `least`."""
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
    low_position,
    high_position,
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
    """Return total + Σ_offset buffer[index, offset] · table[offset]: the gradient of vectors through position scores.

    `buffer` starts at the sequence and head, `table` at the head.
    Shape: total (rows, WIDTH), float32; index, position, is_row (rows,).
    """
    last = length - 1
    if HALF > 0:
        last = tl.minimum(last, start + BUFFER_COLUMNS - 1)
    least, greatest = offset_range(low_position, high_position, start, last, reach, DIRECTION, HALF)
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
    """Add the contribution of far pairs: two numbers per row times the table's first and last row."""
    width = tl.arange(0, WIDTH)
    first = tl.load(table + width).to(tl.float32)
    last = tl.load(table + (offsets - 1) * TABLE_STRIDE + width).to(tl.float32)
    return total + ahead[:, None] * first[None, :] + behind[:, None] * last[None, :]


@triton.jit
def store_ends(out, vectors, ahead, behind, WIDTH: tl.constexpr):
    """Store a tile's contribution to the gradient of the table's first and last row."""
    width, wide = tl.arange(0, WIDTH), vectors.to(tl.float32)
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
    key_position,
    is_query,
    is_key,
    seed,
    stream,
    factor,
    rate,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
):
    """Return probabilities after dropout and the gradient of unscaled scores of a tile: (queries, keys), float32."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor + bias
    is_attended = is_query[:, None] & is_key[None, :]
    if CAUSAL:
        is_attended = is_attended & (position[:, None] >= key_position[None, :])
    probabilities = tl.exp2(tl.where(is_attended, scores - log_mass[:, None], float("-inf")))
    by_probability = tl.dot(upstream, tl.trans(values), input_precision="ieee")
    dropped_probabilities = probabilities
    if DROPS:
        factors = tl.where(is_kept(seed, stream, local[:, None], key_position[None, :], rate), 1.0 / (1.0 - rate), 0.0)
        by_probability = by_probability * factors
        dropped_probabilities = probabilities * factors
    return dropped_probabilities, probabilities * (by_probability - agreement[:, None])
