"""Depthwise convolution: a program takes a block of a sequence's tokens and some channels.

The gradient of the input is the same convolution the other way round. That of the kernel is a sum over all tokens: each
program adds up its share in registers and writes it to a place of its own, and the shares are added in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.kernel_support import SequenceRows, Tile, Tiles, tile

TILES: Tiles = {}
KERNEL_TILES: Tiles = {}
SHARES = 257
"""At most so many programs share the tokens of a kernel's gradient; a prime, so that ragged batches spread evenly."""
CHUNK = 32
"""Tokens of a sequence that a program of the kernel's gradient takes at a time."""


@triton.jit(do_not_specialize=["room"])
def _convolve(
    hidden,
    kernel,
    mixed,
    first,
    length,
    hidden_token,
    width,
    room,
    KERNEL_SIZE: tl.constexpr,
    BEFORE: tl.constexpr,
    SIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """mixed[t] = Σ_j kernel[j] · hidden[t + SIGN · (j − BEFORE)]; the kernel is (taps, width)."""
    sequence = tl.program_id(2)
    start = tl.load(first + sequence).to(tl.int64)
    count = tl.load(length + sequence)
    begin = tl.program_id(1) * ROWS
    if begin >= tl.maximum(count, room):
        return
    position = begin + tl.arange(0, ROWS)
    is_token = position < count
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for j in tl.static_range(KERNEL_SIZE):
        there = position + SIGN * (j - BEFORE)
        is_inside = is_token & (there >= 0) & (there < count)
        found = tl.load(
            hidden + ((start + there) * hidden_token)[:, None] + column[None, :],
            mask=is_inside[:, None] & is_column[None, :],
            other=0.0,
        )
        weight = tl.load(kernel + j * width + column, mask=is_column, other=0.0)
        total += weight.to(tl.float32)[None, :] * found.to(tl.float32)

    # pads are tokens of nobody: they get the zeros that they have found
    is_row = position < tl.maximum(count, room)
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

    A block of tokens is ROWS × GROUPS, a group to a warp, so that sums over the rows stay within a thread; the groups
    meet once, at the end.
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
            given = tl.load(
                gradient + ((start + position) * gradient_token)[:, :, None] + column[None, None, :],
                mask=is_token[:, :, None] & is_column,
                other=0.0,
            ).to(tl.float32)
            for j in tl.static_range(KERNEL_SIZE):
                there = position + (j - BEFORE)
                is_inside = is_token & (there >= 0) & (there < count)
                found = tl.load(
                    hidden + ((start + there) * hidden_token)[:, :, None] + column[None, None, :],
                    mask=is_inside[:, :, None] & is_column,
                    other=0.0,
                )
                product = tl.sum(given * found.to(tl.float32), 0)
                # the slot is known when this is compiled, so this is one sum of registers and no choice
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
    room: int,
    before: int,
    dtype: torch.dtype,
    is_turned: bool = False,
    cut: Tile | None = None,
) -> Tensor:
    """The convolved states, (tokens, width), in the given dtype.

    `is_turned` takes the neighbours the other way round, for the gradient. Sequences fill at least `room` rows,
    `sequences.longest` at most; `cut` is a tile to try instead of the tuned one.
    Shape: hidden (tokens, width), without gaps in the last axis; kernel (width, taps).
    """
    mixed = hidden.new_empty(hidden.shape, dtype=dtype)
    width, kernel_size = kernel.shape
    if hidden.numel() and sequences.max_length:
        cut = cut or tile(TILES, Tile(rows=16, columns=max(16, _columns(hidden) // 2)), hidden.dtype, width)
        _convolve[(triton.cdiv(width, cut.columns), triton.cdiv(sequences.max_length, cut.rows), len(sequences.first))](
            hidden,
            kernel.T.contiguous(),  # a few kilobytes; the weights of neighbouring channels are read together
            mixed,
            sequences.first,
            sequences.length,
            hidden.stride(0),
            width,
            room,
            KERNEL_SIZE=kernel_size,
            BEFORE=before,
            SIGN=-1 if is_turned else 1,
            ROWS=cut.rows,
            COLUMNS=cut.columns,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
    return mixed


def kernel_gradient(
    gradient: Tensor,
    hidden: Tensor,
    kernel_size: int,
    sequences: SequenceRows,
    before: int,
    cut: Tile | None = None,
    most_shares: int = SHARES,
) -> Tensor:
    """The gradient of the kernel, (width, taps), float32; rows of the tile are those of each warp.

    Shape: gradient and hidden (tokens, width), without gaps in the last axis.
    """
    width = hidden.shape[1]
    if not hidden.numel() or not sequences.max_length:
        return hidden.new_zeros(width, kernel_size, dtype=torch.float32)
    cut = cut or tile(KERNEL_TILES, _default_sum(hidden, kernel_size), hidden.dtype, width)
    chunks = triton.cdiv(sequences.max_length, CHUNK)
    programs = min(most_shares, len(sequences.first) * chunks)
    shares = hidden.new_empty(programs, kernel_size, width, dtype=torch.float32)
    _sum_kernel[(triton.cdiv(width, cut.columns), programs)](
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
        ROWS=cut.rows,
        GROUPS=cut.warps,
        COLUMNS=cut.columns,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return shares.sum(0).T


def _default_sum(hidden: Tensor, kernel_size: int) -> Tile:
    """Sixteen bytes of channels for each thread, which has a sum for each of them and each tap; half for many taps."""
    return Tile(rows=1, columns=_columns(hidden) if kernel_size <= 16 else max(16, _columns(hidden) // 2), warps=2)


def _columns(hidden: Tensor) -> int:
    """Channels of a tile: sixteen bytes for each thread of a warp."""
    return min(512 // hidden.element_size(), triton.next_power_of_2(hidden.shape[1]))
