"""Depthwise convolution: a program computes a block of a sequence's tokens and some channels.

The gradient of the input is the convolution with the flipped kernel. The gradient of the kernel is a sum over all
tokens: each program accumulates a partial sum in registers, and the partial sums are added in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.kernel_support import SequenceRows, Tile, Tiles, tile

TILES: Tiles = {}
KERNEL_TILES: Tiles = {}
SHARES = 257
"""Maximum number of partial sums of the kernel's gradient; a prime, so that ragged batches are distributed evenly."""
CHUNK = 32
"""Tokens of a sequence that a program of the kernel's gradient processes at a time."""


@triton.jit(do_not_specialize=["min_rows"])
def _convolve(
    hidden,
    kernel,
    mixed,
    first,
    length,
    hidden_token,
    width,
    min_rows,
    KERNEL_SIZE: tl.constexpr,
    BEFORE: tl.constexpr,
    SIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """mixed[t] = Σ_j kernel[j] · hidden[t + SIGN · (j − BEFORE)]; the kernel is (kernel_size, width)."""
    sequence = tl.program_id(2)
    start = tl.load(first + sequence).to(tl.int64)
    count = tl.load(length + sequence)
    begin = tl.program_id(1) * ROWS
    if begin >= tl.maximum(count, min_rows):
        return
    position = begin + tl.arange(0, ROWS)
    is_token = position < count
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for j in tl.static_range(KERNEL_SIZE):
        neighbour = position + SIGN * (j - BEFORE)
        is_inside = is_token & (neighbour >= 0) & (neighbour < count)
        loaded = tl.load(
            hidden + ((start + neighbour) * hidden_token)[:, None] + column[None, :],
            mask=is_inside[:, None] & is_column[None, :],
            other=0.0,
        )
        weight = tl.load(kernel + j * width + column, mask=is_column, other=0.0)
        total += weight.to(tl.float32)[None, :] * loaded.to(tl.float32)

    # at padding everything was masked, so it gets zeros
    is_row = position < tl.maximum(count, min_rows)
    tl.store(
        mixed + ((start + position) * width)[:, None] + column[None, :],
        total.to(mixed.dtype.element_ty),
        is_row[:, None] & is_column[None, :],
    )


@triton.jit(do_not_specialize=["sequences", "chunks"])
def _sum_kernel(
    gradient,
    hidden,
    shares,
    first,
    length,
    gradient_token,
    hidden_token,
    width,
    sequences,
    chunks,
    KERNEL_SIZE: tl.constexpr,
    TAP_SLOTS: tl.constexpr,
    BEFORE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """shares[program] = Σ_t gradient[t] · hidden[t + j − BEFORE], over the tokens of the program's chunks.

    A block of tokens is ROWS × GROUPS with one group per warp, so that sums over rows stay within a thread; the groups
    are added once, at the end.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < width)[None, None, :]
    tap = tl.arange(0, TAP_SLOTS)
    total = tl.zeros((TAP_SLOTS, GROUPS, COLUMNS), tl.float32)
    in_block = tl.arange(0, ROWS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    for chunk in range(tl.program_id(1), sequences * chunks, tl.num_programs(1)):
        start = tl.load(first + chunk % sequences).to(tl.int64)
        count = tl.load(length + chunk % sequences)
        begin = (chunk // sequences) * CHUNK
        for block in range(begin, tl.minimum(begin + CHUNK, count), ROWS * GROUPS):
            position = block + in_block
            is_token = position < tl.minimum(begin + CHUNK, count)
            upstream = tl.load(
                gradient + ((start + position) * gradient_token)[:, :, None] + column[None, None, :],
                mask=is_token[:, :, None] & is_column,
                other=0.0,
            ).to(tl.float32)
            for j in tl.static_range(KERNEL_SIZE):
                neighbour = position + (j - BEFORE)
                is_inside = is_token & (neighbour >= 0) & (neighbour < count)
                loaded = tl.load(
                    hidden + ((start + neighbour) * hidden_token)[:, :, None] + column[None, None, :],
                    mask=is_inside[:, :, None] & is_column,
                    other=0.0,
                )
                product = tl.sum(upstream * loaded.to(tl.float32), 0)
                # the slot is a compile-time constant, so this compiles to one addition without a branch
                total = tl.where((tap == j)[:, None, None], total + product[None, :, :], total)
    tl.store(
        shares + ((tl.program_id(1) * KERNEL_SIZE + tap) * width)[:, None] + column[None, :],
        tl.sum(total, 1),
        (tap < KERNEL_SIZE)[:, None] & (column < width)[None, :],
    )


def convolve(
    hidden: Tensor,
    kernel: Tensor,
    sequences: SequenceRows,
    min_rows: int,
    before: int,
    dtype: torch.dtype,
    is_flipped: bool = False,
    tiling: Tile | None = None,
) -> Tensor:
    """Return the convolved hidden states, (tokens, width), in the given dtype.

    `is_flipped` flips the kernel, for the gradient. At least `min_rows` rows of every sequence are written; `tiling`
    replaces the tuned tile.
    Shape: hidden (tokens, width), last axis contiguous; kernel (width, kernel_size).
    """
    mixed = hidden.new_empty(hidden.shape, dtype=dtype)
    width, kernel_size = kernel.shape
    if hidden.numel() and sequences.max_length:
        tiling = tiling or tile(TILES, Tile(rows=16, columns=max(16, _columns(hidden) // 2)), hidden.dtype, width)
        _convolve[
            (triton.cdiv(width, tiling.columns), triton.cdiv(sequences.max_length, tiling.rows), len(sequences.first))
        ](
            hidden,
            kernel.T.contiguous(),  # a few kilobytes; makes reads of neighbouring channels coalesced
            mixed,
            sequences.first,
            sequences.length,
            hidden.stride(0),
            width,
            min_rows,
            KERNEL_SIZE=kernel_size,
            BEFORE=before,
            SIGN=-1 if is_flipped else 1,
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return mixed


def kernel_gradient(
    gradient: Tensor,
    hidden: Tensor,
    kernel_size: int,
    sequences: SequenceRows,
    before: int,
    tiling: Tile | None = None,
    max_shares: int = SHARES,
) -> Tensor:
    """Return the gradient of the kernel, (width, kernel_size), float32; the tile's rows are per warp.

    Shape: gradient and hidden (tokens, width), last axis contiguous.
    """
    width = hidden.shape[1]
    if not hidden.numel() or not sequences.max_length:
        return hidden.new_zeros(width, kernel_size, dtype=torch.float32)
    tiling = tiling or tile(KERNEL_TILES, _default_sum(hidden, kernel_size), hidden.dtype, width)
    chunks = triton.cdiv(sequences.max_length, CHUNK)
    programs = min(max_shares, len(sequences.first) * chunks)
    shares = hidden.new_empty(programs, kernel_size, width, dtype=torch.float32)
    _sum_kernel[(triton.cdiv(width, tiling.columns), programs)](
        gradient,
        hidden,
        shares,
        sequences.first,
        sequences.length,
        gradient.stride(0),
        hidden.stride(0),
        width,
        len(sequences.first),
        chunks,
        KERNEL_SIZE=kernel_size,
        TAP_SLOTS=triton.next_power_of_2(kernel_size),
        BEFORE=before,
        CHUNK=CHUNK,
        ROWS=tiling.rows,
        GROUPS=tiling.warps,
        COLUMNS=tiling.columns,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return shares.sum(0).T


def _default_sum(hidden: Tensor, kernel_size: int) -> Tile:
    """Return a tile with 16 bytes of channels per thread, which keeps a sum per channel and tap; 8 for many taps."""
    return Tile(rows=1, columns=_columns(hidden) if kernel_size <= 16 else max(16, _columns(hidden) // 2), warps=2)


def _columns(hidden: Tensor) -> int:
    """Return the channels of a tile: 16 bytes per thread of a warp."""
    return min(512 // hidden.element_size(), triton.next_power_of_2(hidden.shape[1]))
