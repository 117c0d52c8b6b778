"""What the keys and values before every chunk of a sequence leave behind for its queries.

A causal key is κ = exp(exponent) + ε · exp(level), its level being the largest exponent so far. As both ways (`memory`)
a state is, for every feature, a mean of values and the logarithm (for a curve the size) of the sum of κ; here there is
one before every chunk. Chunk c of a sequence has the slot first // CHUNK + its number in the batch + c, which no other
has, so that states take room for the tokens there are and not for the longest sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.features import LOG2_E, NONE, Curve, fitting, matrix_of, product, rows_of, squares
from bertsmith.ops.kernels.support import Tile


def chunk_tile(states: Tensor, chunk: int) -> Tile:
    """The tile of every causal kernel: no product of it has 64 rows, nor loads under way while others are multiplied.

    A tile that is both loaded ahead and read into registers has one buffer, and products of a warp group still read it
    when the next load comes in.
    """
    return Tile(chunk, 32, warps=4 if states.dtype.itemsize == 2 else 8, stages=1)


@triton.jit
def slot_of(first, sequence, chunk, CHUNK: tl.constexpr):
    """Where the states of a chunk lie; int64."""
    return (tl.load(first + sequence) // CHUNK + sequence + chunk).to(tl.int64)


@triton.jit
def _levels(
    key, matrix, first, length, own, largest, key_row, key_head, heads, features, norm,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest exponent of every key, and of every chunk."""
    chunk, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    if chunk * CHUNK >= count:
        return
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    is_row = row < count
    row += tl.load(first + sequence)
    k = rows_of(key, row, head, key_row, key_head, is_row, WIDTH)
    level = tl.full([CHUNK], NONE, tl.float32)
    for start in range(0, PADDED, COLUMNS):
        feature = start + tl.arange(0, COLUMNS)
        u = product(k, tl.trans(matrix_of(matrix, feature, features, WIDTH)))
        level = tl.maximum(level, tl.max(tl.where((feature < features)[None, :], u, NONE), 1))
    level = tl.where(is_row, level * LOG2_E + norm * squares(k), NONE)
    tl.store(own + row.to(tl.int64) * heads + head, level, mask=is_row)
    tl.store(largest + slot_of(first, sequence, chunk, CHUNK) * heads + head, tl.max(level, 0))


@triton.jit
def _chunk_sums(
    key, value, matrix, first, length, own, largest, means, sizes, level, level_before,
    key_row, key_head, value_row, value_head, heads, blocks, features, norm, epsilon, log_epsilon,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """The state of each chunk alone; the level of every key, and that before the chunk."""
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head, sequence = tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    if chunk * CHUNK >= count:
        return
    slot = slot_of(first, sequence, chunk, CHUNK) * heads + head
    place = tl.arange(0, CHUNK)
    row = chunk * CHUNK + place
    is_row = row < count
    row += tl.load(first + sequence)
    feature = block * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    at = row.to(tl.int64) * heads + head
    k = rows_of(key, row, head, key_row, key_head, is_row, WIDTH)
    v = rows_of(value, row, head, value_row, value_head, is_row, WIDTH)
    u = product(matrix_of(matrix, feature, features, WIDTH), tl.trans(k))
    if IS_EXPONENTIAL:
        entering = NONE + tl.zeros([128], tl.float32)
        for start in range(0, chunk, 128):
            earlier = start + tl.arange(0, 128)
            places = slot_of(first, sequence, earlier, CHUNK) * heads + head
            entering = tl.maximum(entering, tl.load(largest + places, mask=earlier < chunk, other=NONE))
        before = tl.max(entering, 0)
        mine = tl.load(own + at, mask=is_row, other=NONE)
        so_far = tl.max(tl.where(place[None, :] <= place[:, None], mine[None, :], NONE), 1)
        levels = tl.maximum(so_far, before)
        if block == 0:
            tl.store(level + at, levels, mask=is_row)
            tl.store(level_before + slot, before)
        exponent = u * LOG2_E + tl.where(is_row, norm * squares(k), NONE)[None, :]
        top = tl.max(exponent, 1)
        made = tl.exp2(exponent - top[:, None])
        total = tl.sum(made, 1)
        lifted = tl.max(levels, 0)
        floors = tl.where(is_row, tl.exp2(levels - lifted), 0.0)
        floor = tl.sum(floors, 0)
        # the sums of ε · exp(level), the same for every feature
        rest = tl.sum(floors[:, None] * v.to(tl.float32), 0) / floor
        floor = log_epsilon + lifted + tl.log2(floor)
        size = top + tl.log2(total)
        larger = tl.maximum(size, floor)
        size_all = larger + tl.log2(tl.exp2(size - larger) + tl.exp2(floor - larger))
        mean = product(made.to(v.dtype), v) * tl.exp2(size - size_all - tl.log2(total))[:, None]
        mean += tl.exp2(floor - size_all)[:, None] * rest[None, :]
        size_all = tl.where(feature < features, size_all, NONE)
    else:
        made = tl.maximum(u, 0.0)
        size_all = tl.sum(made, 1) + epsilon * tl.sum(tl.where(is_row, 1.0, 0.0), 0)
        size_all = tl.where(feature < features, size_all, 0.0)
        mean = product(made.to(v.dtype), v) + epsilon * tl.sum(v.to(tl.float32), 0)[None, :]
        mean = mean / tl.where(size_all > 0.0, size_all, 1.0)[:, None]
    mean = tl.where((feature < features)[:, None], mean, 0.0)
    place = slot * PADDED + feature
    tl.store(means + place[:, None] * WIDTH + column[None, :], mean.to(means.dtype.element_ty))
    tl.store(sizes + place, size_all)


@triton.jit
def _carry(
    means, sizes, first, length, before, before_size, after_size, heads,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """The state before every chunk, and the sizes after it too."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    size = tl.full([FEATURES], NONE if IS_EXPONENTIAL else 0.0, tl.float32)
    mean = tl.zeros([FEATURES, WIDTH], tl.float32)
    for chunk in range(0, tl.cdiv(count, CHUNK)):  # noqa: PIE808
        at = (slot_of(first, sequence, chunk, CHUNK) * heads + head) * PADDED + feature
        places = at[:, None] * WIDTH + column[None, :]
        new = tl.load(means + places).to(tl.float32)
        new_size = tl.load(sizes + at)
        tl.store(before + places, mean.to(before.dtype.element_ty))
        tl.store(before_size + at, size)
        if IS_EXPONENTIAL:
            larger = tl.maximum(size, new_size)
            total = larger + tl.log2(tl.exp2(size - larger) + tl.exp2(new_size - larger))
            mean = mean * tl.exp2(size - total)[:, None] + new * tl.exp2(new_size - total)[:, None]
        else:
            total = size + new_size
            whole = tl.where(total > 0.0, total, 1.0)
            mean = mean * (size / whole)[:, None] + new * (new_size / whole)[:, None]
        size = total
        tl.store(after_size + at, size)


def states(
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    longest: int,
    curve: Curve,
    padded: int,
    chunk: int,
    asked: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(mean, size, size_after, own, level, level_before): states before each chunk, and levels of keys and chunks.

    Shape: mean (slots, heads, padded, head_width), size, size_after (slots, heads, padded), own, level (tokens, heads),
    level_before (slots, heads).
    """
    (tokens, heads, width), batch = key.shape, first.shape[0]
    slots = tokens // chunk + batch
    tile = fitting(asked or chunk_tile(key, chunk), padded)
    means, before = (key.new_empty(slots, heads, padded, width) for _ in range(2))
    sizes, before_size, after_size = (key.new_empty(slots, heads, padded, dtype=torch.float32) for _ in range(3))
    own, level = (key.new_zeros(tokens, heads, dtype=torch.float32) for _ in range(2))
    largest, level_before = (key.new_zeros(slots, heads, dtype=torch.float32) for _ in range(2))
    chunks = triton.cdiv(longest, chunk)
    if tokens * heads * longest:
        blocks, norm = padded // tile.columns, curve.in_exponents(width)
        if curve.is_exponential:
            _levels[(chunks, heads, batch)](
                key, matrix, first, length, own, largest, key.stride(0), key.stride(1), heads, matrix.shape[0], norm,
                PADDED=padded, WIDTH=width, CHUNK=chunk, COLUMNS=tile.columns,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        _chunk_sums[(chunks * blocks, heads, batch)](
            key, value, matrix, first, length, own, largest, means, sizes, level, level_before,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            heads, blocks, matrix.shape[0], norm, curve.epsilon, curve.logarithm,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, CHUNK=chunk, FEATURES=tile.columns,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        _carry[(padded // 16, heads, batch)](
            means, sizes, first, length, before, before_size, after_size, heads,
            IS_EXPONENTIAL=curve.is_exponential, PADDED=padded, WIDTH=width, CHUNK=chunk, FEATURES=16, num_warps=2,
        )  # fmt: skip
    return before, before_size, after_size, own, level, level_before
