"""Products of queries or keys with the relative table, and the gradient of that table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.disentangled.kernels.common import (
    band_start,
    near_mask,
    offset_range,
    offsets_and_columns,
    table_rows,
)
from bertsmith.ops.disentangled.kernels.plan import Buffer, Expanded, Side, positions_tile, products_tile


@triton.jit(do_not_specialize=["least_offset"])
def _expand(table, slots, out, least_offset, reach, TABLE_STRIDE, WIDTH: tl.constexpr, LANES: tl.constexpr):
    number, lane = tl.program_id(0), tl.arange(0, LANES)
    offset = tl.minimum(tl.maximum(least_offset + number, -reach), reach)
    row = tl.load(table + tl.load(slots + offset + reach) * TABLE_STRIDE + lane, mask=lane < WIDTH)
    tl.store(out + number * WIDTH + lane, row, mask=lane < WIDTH)


@triton.jit(do_not_specialize=["least_offset", "offsets"])
def _products(
    vectors,
    table,
    least_offset,
    offsets,
    positions,
    first,
    length,
    column_length,
    out,
    factor,
    reach,
    VECTOR_STRIDE,
    TABLE_STRIDE,
    COLUMNS,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIRECTION: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = block * ROWS
    rows_here, columns_here = tl.load(length + sequence), tl.load(column_length + sequence)
    if begin >= rows_here:
        return
    local = begin + tl.arange(0, ROWS)
    is_row = local < rows_here
    row = tl.load(first + sequence).to(tl.int64)
    vectors += row * VECTOR_STRIDE + head * WIDTH
    out += (row * HEADS + head) * COLUMNS
    table += head * WIDTH
    width = tl.arange(0, WIDTH)
    tile = tl.load(vectors + local[:, None] * VECTOR_STRIDE + width[None, :], mask=is_row[:, None], other=0.0)
    start = band_start(begin, HALF)
    last = columns_here - 1
    low, high, position = begin, begin + ROWS - 1, local
    if HAS_POSITIONS:
        position = tl.load(positions + row + local, mask=is_row, other=0).to(tl.int32)
        low, high = begin * 0, last
    if HALF > 0:
        last = tl.minimum(last, start + COLUMNS - 1)
    # a band holds clamped values, too, which tiles at its edge read
    least, greatest = offset_range(low, high, start, last, reach, DIRECTION, 0)
    target = out + local[:, None] * (HEADS * COLUMNS)
    for done in range(0, greatest - least + 1, CHUNK):
        offset, column = offsets_and_columns(position, least, greatest, done, DIRECTION, CHUNK)
        rows = table_rows(table, offset, least_offset, offsets, TABLE_STRIDE, WIDTH)
        product = tl.dot(tile, tl.trans(rows), input_precision="ieee") * factor
        is_pair = is_row[:, None] & (column >= start) & (column <= last)
        tl.store(target + (column - start), product.to(out.dtype.element_ty), mask=is_pair)


@triton.jit(do_not_specialize=["least_offset", "offsets", "batch", "sequence_splits", "block_splits"])
def _table_partial(
    buffer,
    vectors,
    positions,
    first,
    length,
    column_length,
    partial,
    least_offset,
    offsets,
    batch,
    sequence_splits,
    block_splits,
    reach,
    VECTOR_STRIDE,
    COLUMNS,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIRECTION: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width = tl.arange(0, WIDTH)
    low_offset = least_offset + chunk * CHUNK
    high_offset = low_offset + CHUNK - 1
    total = tl.zeros([CHUNK, WIDTH], tl.float32)
    for sequence in range(split // block_splits, batch, sequence_splits):
        rows_here, columns_here = tl.load(length + sequence), tl.load(column_length + sequence)
        row = tl.load(first + sequence).to(tl.int64)
        # rows that have a column at one of these offsets
        low_row, high_row = 0, rows_here
        if not HAS_POSITIONS:
            if DIRECTION > 0:
                low_row = tl.maximum(0, low_offset)
                high_row = tl.minimum(rows_here, columns_here + high_offset)
            else:
                low_row = tl.maximum(0, -high_offset)
                high_row = tl.minimum(rows_here, columns_here - low_offset)
        low_block = low_row // ROWS
        # blocks are distributed over the splits round-robin
        low_block += (split % block_splits + block_splits - low_block % block_splits) % block_splits
        for block in range(low_block, tl.cdiv(high_row, ROWS), block_splits):
            begin = block * ROWS
            local = begin + tl.arange(0, ROWS)
            is_row = local < rows_here
            position = local
            if HAS_POSITIONS:
                position = tl.load(positions + row + local, mask=is_row, other=0).to(tl.int32)
            start = band_start(begin, HALF)
            offset, column = offsets_and_columns(position, low_offset, high_offset, 0, DIRECTION, CHUNK)
            is_pair = near_mask(column, is_row, offset, columns_here, reach, CAUSAL, HALF)
            of_pairs = buffer + (row * HEADS + head) * COLUMNS
            where = local[:, None] * (HEADS * COLUMNS) + (column - start)
            by_score = tl.load(of_pairs + where, mask=is_pair, other=0.0)
            of_vectors = vectors + row * VECTOR_STRIDE + head * WIDTH
            tile = tl.load(
                of_vectors + local[:, None] * VECTOR_STRIDE + width[None, :], mask=is_row[:, None], other=0.0
            )
            total += tl.dot(tl.trans(by_score), tile, input_precision="ieee")
    number = chunk * CHUNK + tl.arange(0, CHUNK)
    if DIRECTION > 0:
        number = chunk * CHUNK + CHUNK - 1 - tl.arange(0, CHUNK)
    target = partial + ((split * offsets + number) * HEADS + head)[:, None] * WIDTH + width[None, :]
    tl.store(target, total, mask=(number < offsets)[:, None])


@triton.jit
def _first_at_least(slots, target, count, STEPS: tl.constexpr):
    """Return the index of the first entry of a sorted list that is at least the target; or the count."""
    low = target * 0
    high = low + count
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_below = tl.load(slots + tl.minimum(middle, count - 1)) < target
        is_open = low < high
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["least_offset", "offsets"])
def _fold(
    by_offset,
    slots,
    out,
    least_offset,
    offsets,
    reach,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Sum over the offsets of each slot, in a fixed order.

    Slots ascend with the offset, so each has a contiguous range; the first and the last also cover offsets beyond.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    width, lane = tl.arange(0, WIDTH), tl.arange(0, LANES)
    count = 2 * reach + 1
    low = _first_at_least(slots, slot, count, STEPS)
    high = _first_at_least(slots, slot + 1, count, STEPS)
    begin = tl.where(low == 0, 0, tl.minimum(tl.maximum(low - reach - least_offset, 0), offsets))
    end = tl.where(high == count, offsets, tl.minimum(tl.maximum(high - reach - least_offset, 0), offsets))
    end = tl.where(low == high, begin, end)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(begin, end, LANES):
        offset = start + lane
        source = by_offset + (offset * HEADS + head)[:, None] * WIDTH + width[None, :]
        total += tl.sum(tl.load(source, mask=(offset < end)[:, None], other=0.0), 0)
    tl.store(out + (slot * HEADS + head) * WIDTH + width, total.to(out.dtype.element_ty))


def expand(table: Tensor, slots: Tensor, least: int, greatest: int) -> Expanded:
    """Return the table with one row per offset from `least` to `greatest`."""
    reach, (_, heads, width) = slots.shape[0] // 2, table.shape
    out = table.new_empty(greatest - least + 1, heads, width)
    lanes = triton.next_power_of_2(heads * width)
    _expand[(len(out),)](table, slots, out, least, reach, table.stride(0), WIDTH=heads * width, LANES=lanes)
    return Expanded(out, least, reach)


def products(side: Side, table: Expanded, buffer: Buffer, factor: float) -> Tensor:
    """Return the products of the vectors with the table's row of every pair, times a factor: (rows, heads, columns).

    Entries beyond a sequence or its band are not written.
    """
    rows, heads, width = side.vectors.shape
    out = side.vectors.new_empty(rows, heads, buffer.columns)
    tile = products_tile(side.vectors)
    _products[triton.cdiv(side.max_length, tile.rows), heads, len(side.first)](
        side.vectors,
        table.rows,
        table.least,
        len(table.rows),
        side.positions,
        side.first,
        side.length,
        side.column_length,
        out,
        factor,
        table.reach,
        side.vectors.stride(0),
        table.rows.stride(0),
        buffer.columns,
        HEADS=heads,
        WIDTH=width,
        DIRECTION=side.direction,
        HAS_POSITIONS=side.positions is not None,
        HALF=buffer.half,
        ROWS=tile.rows,
        CHUNK=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def table_gradient(
    side: Side, by_score: Tensor, slots: Tensor, rows: int, buffer: Buffer, *, is_causal: bool
) -> Tensor:
    """Return the gradient of the table, (rows, heads, width), float32, from the gradient of the scores.

    Partial sums over fixed sets of sequences and blocks are added in a fixed order, without atomics.
    """
    _, heads, width = side.vectors.shape
    batch, reach, device = len(side.first), slots.shape[0] // 2, slots.device
    tile = positions_tile(side.vectors)
    blocks = triton.cdiv(side.max_length, tile.rows)
    # all offsets query − key that a pair can have
    queries, keys = (side.max_length, side.columns) if side.direction > 0 else (side.columns, side.max_length)
    if side.positions is not None:
        queries = keys
    least, greatest = 1 - keys, queries - 1
    if buffer.half:
        least, greatest = max(least, 1 - reach), min(greatest, reach - 1)
    offsets = greatest - least + 1
    chunks = triton.cdiv(offsets, tile.columns)
    min_splits = max(1, triton.cdiv(1024, chunks * heads))
    sequence_splits = min(batch, min_splits)
    block_splits = max(1, min(blocks, triton.cdiv(min_splits, sequence_splits)))
    splits = sequence_splits * block_splits
    partial = torch.empty(splits, offsets, heads, width, dtype=torch.float32, device=device)
    _table_partial[chunks, heads, splits](
        by_score,
        side.vectors,
        side.positions,
        side.first,
        side.length,
        side.column_length,
        partial,
        least,
        offsets,
        batch,
        sequence_splits,
        block_splits,
        reach,
        side.vectors.stride(0),
        buffer.columns,
        HEADS=heads,
        WIDTH=width,
        DIRECTION=side.direction,
        HAS_POSITIONS=side.positions is not None,
        CAUSAL=is_causal,
        HALF=buffer.half,
        ROWS=tile.rows,
        CHUNK=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    out = torch.empty(rows, heads, width, dtype=torch.float32, device=device)
    steps = slots.shape[0].bit_length()
    _fold[rows, heads](
        partial.sum(0), slots, out, least, offsets, reach, HEADS=heads, WIDTH=width, STEPS=steps, LANES=16
    )
    return out
