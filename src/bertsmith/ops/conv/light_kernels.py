"""Lightweight convolution with one forward and one backward kernel: a program computes a block of tokens of one head.

Taps are not unfolded: each reads the block again, shifted, mostly from the L1 cache. The softmax over the taps is
never stored. Its log normaliser is, one float32 per token and head, so that the backward pass gets the weight of any
neighbour as exp(score − normaliser). The backward pass gathers as well and needs no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.kernel_dropout import is_kept
from bertsmith.ops.kernel_support import SequenceRows, Tile, Tiles, tile

FORWARD_TILES: Tiles = {(2, 64): Tile(rows=8, columns=64, warps=1)}
BACKWARD_TILES: Tiles = {(2, 64): Tile(rows=16, columns=64)}


@triton.jit
def _dropped(weight, seed, head, row, tap, rate, scale, IS_SHARED: tl.constexpr):
    """Return the weights after dropout; tokens that share a kernel share the mask."""
    keep = is_kept(tl.load(seed), head, row * (1 - IS_SHARED), tap, rate)
    return tl.where(keep, weight * scale, 0.0)


@triton.jit(do_not_specialize=["min_rows"])
def _forward(
    value,
    scores,
    mixed,
    normaliser,
    first,
    length,
    seed,
    value_token,
    value_head,
    scores_token,
    scores_head,
    heads,
    min_rows,
    rate,
    scale,
    KERNEL_SIZE: tl.constexpr,
    BEFORE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_SHARED: tl.constexpr,
):
    """mixed[t] = Σ_j w[t, j] · value[t + j − BEFORE] with w = softmax(scores), and the softmax's normaliser."""
    head, sequence = tl.program_id(0), tl.program_id(2)
    start = tl.load(first + sequence).to(tl.int64)
    count = tl.load(length + sequence)
    begin = tl.program_id(1) * ROWS
    if begin >= tl.maximum(count, min_rows):
        return
    position = begin + tl.arange(0, ROWS)
    is_token = position < count
    row = start + position
    column = tl.arange(0, COLUMNS)
    is_column = column < WIDTH

    score_row = scores + row * scores_token + head * scores_head
    top = tl.load(score_row, mask=is_token, other=0.0).to(tl.float32)
    for j in tl.static_range(1, KERNEL_SIZE):
        top = tl.maximum(top, tl.load(score_row + j, mask=is_token, other=0.0).to(tl.float32))

    value_column = value + head * value_head + column
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    weights = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(KERNEL_SIZE):
        neighbour = position + (j - BEFORE)
        is_inside = is_token & (neighbour >= 0) & (neighbour < count)
        loaded = tl.load(
            value_column[None, :] + ((start + neighbour) * value_token)[:, None],
            mask=is_inside[:, None] & is_column[None, :],
            other=0.0,
        )
        weight = tl.exp(tl.load(score_row + j, mask=is_token, other=0.0).to(tl.float32) - top)
        weights += weight
        if HAS_DROPOUT:
            weight = _dropped(weight, seed, head, row, tl.full((ROWS,), j, tl.int32), rate, scale, IS_SHARED)
        total += weight[:, None] * loaded.to(tl.float32)
    total = total / weights[:, None]
    tl.store(normaliser + row * heads + head, top + tl.log(weights), mask=is_token)

    # at padding everything was masked, so it gets zeros
    is_row = position < tl.maximum(count, min_rows)
    mixed_row = mixed + (row * heads + head) * WIDTH
    tl.store(
        mixed_row[:, None] + column[None, :], total.to(mixed.dtype.element_ty), is_row[:, None] & is_column[None, :]
    )


@triton.jit(do_not_specialize=["min_rows"])
def _backward(
    gradient,
    value,
    scores,
    normaliser,
    value_gradient,
    scores_gradient,
    first,
    length,
    seed,
    gradient_token,
    gradient_head,
    value_token,
    value_head,
    scores_token,
    scores_head,
    heads,
    min_rows,
    rate,
    scale,
    KERNEL_SIZE: tl.constexpr,
    TAP_SLOTS: tl.constexpr,
    BEFORE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_SHARED: tl.constexpr,
):
    """Gradients of the block's values and scores, gathered from neighbouring tokens.

    Values: Σ_j w[t − j + BEFORE, j] · gradient[t − j + BEFORE]. Scores: w · (dw − Σ_j w · dw) with
    dw[t, j] = ⟨gradient[t], value[t + j − BEFORE]⟩.
    """
    head, sequence = tl.program_id(0), tl.program_id(2)
    start = tl.load(first + sequence).to(tl.int64)
    count = tl.load(length + sequence)
    begin = tl.program_id(1) * ROWS
    if begin >= tl.maximum(count, min_rows):
        return
    position = begin + tl.arange(0, ROWS)
    is_token = position < count
    row = start + position
    column = tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    tap = tl.arange(0, TAP_SLOTS)

    value_column = value + head * value_head + column
    gradient_column = gradient + head * gradient_head + column
    upstream = tl.load(
        gradient_column[None, :] + (row * gradient_token)[:, None],
        mask=is_token[:, None] & is_column[None, :],
        other=0.0,
    ).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    weight_gradient = tl.zeros((ROWS, TAP_SLOTS), tl.float32)
    for j in tl.static_range(KERNEL_SIZE):
        neighbour = position + (j - BEFORE)  # read by tap j of the block
        is_inside = is_token & (neighbour >= 0) & (neighbour < count)
        loaded = tl.load(
            value_column[None, :] + ((start + neighbour) * value_token)[:, None],
            mask=is_inside[:, None] & is_column[None, :],
            other=0.0,
        )
        product = tl.sum(upstream * loaded.to(tl.float32), 1)
        weight_gradient = tl.where((tap == j)[None, :], product[:, None], weight_gradient)

        taker = position - (j - BEFORE)  # reads the block by its tap j
        is_inside = is_token & (taker >= 0) & (taker < count)
        taker_row = start + taker
        taker_upstream = tl.load(
            gradient_column[None, :] + (taker_row * gradient_token)[:, None],
            mask=is_inside[:, None] & is_column[None, :],
            other=0.0,
        )
        score = tl.load(scores + taker_row * scores_token + head * scores_head + j, mask=is_inside, other=0.0)
        norm = tl.load(normaliser + taker_row * heads + head, mask=is_inside, other=0.0)
        weight = tl.exp(score.to(tl.float32) - norm)
        if HAS_DROPOUT:
            weight = _dropped(weight, seed, head, taker_row, tl.full((ROWS,), j, tl.int32), rate, scale, IS_SHARED)
        total += weight[:, None] * taker_upstream.to(tl.float32)

    is_row = position < tl.maximum(count, min_rows)
    value_row = value_gradient + (row * heads + head) * WIDTH
    tl.store(
        value_row[:, None] + column[None, :],
        total.to(value_gradient.dtype.element_ty),
        is_row[:, None] & is_column[None, :],
    )

    is_score = is_token[:, None] & (tap < KERNEL_SIZE)[None, :]
    score_row = scores + row * scores_token + head * scores_head
    logits = tl.load(score_row[:, None] + tap[None, :], mask=is_score, other=0.0).to(tl.float32)
    norm = tl.load(normaliser + row * heads + head, mask=is_token, other=0.0)
    weights = tl.where(is_score, tl.exp(logits - norm[:, None]), 0.0)
    if HAS_DROPOUT:
        weight_gradient = _dropped(weight_gradient, seed, head, row[:, None], tap[None, :], rate, scale, IS_SHARED)
    score_gradient = weights * (weight_gradient - tl.sum(weights * weight_gradient, 1)[:, None])
    tl.store(
        scores_gradient + ((row * heads + head) * KERNEL_SIZE)[:, None] + tap[None, :],
        score_gradient.to(scores_gradient.dtype.element_ty),
        is_row[:, None] & (tap < KERNEL_SIZE)[None, :],
    )


def forward(
    value: Tensor,
    scores: Tensor,
    sequences: SequenceRows,
    seed: Tensor | None,
    min_rows: int,
    before: int,
    dropout: float,
    is_shared: bool,
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the convolved values, (tokens, heads, head_width), and the log normalisers, (tokens, heads), float32.

    At least `min_rows` rows of every sequence are written. Shared kernels (`is_shared`) drop the same taps at all
    tokens; `tiling` replaces the tuned tile.
    Shape: value (tokens, heads, head_width), scores (tokens, heads, kernel_size), last axes contiguous.
    """
    mixed = value.new_empty(value.shape)
    normaliser = value.new_empty(value.shape[:2], dtype=torch.float32)
    heads, width = value.shape[1:]
    kernel_size = scores.shape[-1]
    if value.numel() and sequences.max_length:
        tiling = tiling or tile(FORWARD_TILES, _default(value, kernel_size), value.dtype, width)
        _forward[(heads, triton.cdiv(sequences.max_length, tiling.rows), len(sequences.first))](
            value,
            scores,
            mixed,
            normaliser,
            sequences.first,
            sequences.length,
            sequences.first if seed is None else seed,
            *value.stride()[:2],
            *scores.stride()[:2],
            heads,
            min_rows,
            *_rates(dropout),
            **_constants(width, kernel_size, before, tiling, dropout, is_shared),
        )
    return mixed, normaliser


def backward(
    gradient: Tensor,
    value: Tensor,
    scores: Tensor,
    normaliser: Tensor,
    sequences: SequenceRows,
    seed: Tensor | None,
    min_rows: int,
    before: int,
    dropout: float,
    is_shared: bool,
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of value and scores, contiguous and in their dtypes."""
    value_gradient = value.new_empty(value.shape)
    scores_gradient = scores.new_empty(scores.shape)
    heads, width = value.shape[1:]
    kernel_size = scores.shape[-1]
    if value.numel() and sequences.max_length:
        tiling = tiling or tile(BACKWARD_TILES, _default(value, kernel_size), value.dtype, width)
        _backward[(heads, triton.cdiv(sequences.max_length, tiling.rows), len(sequences.first))](
            gradient,
            value,
            scores,
            normaliser,
            value_gradient,
            scores_gradient,
            sequences.first,
            sequences.length,
            sequences.first if seed is None else seed,
            *gradient.stride()[:2],
            *value.stride()[:2],
            *scores.stride()[:2],
            heads,
            min_rows,
            *_rates(dropout),
            TAP_SLOTS=triton.next_power_of_2(kernel_size),
            **_constants(width, kernel_size, before, tiling, dropout, is_shared),
        )
    return value_gradient, scores_gradient


def _default(value: Tensor, kernel_size: int) -> Tile:
    """Return a tile of 4 KiB of values, or less for many taps, because the backward pass would spill registers."""
    columns = triton.next_power_of_2(value.shape[-1])
    elements = 4096 // value.element_size() // (1 if kernel_size <= 16 else 2)
    return Tile(rows=min(64 if kernel_size <= 16 else 16, max(2, elements // columns)), columns=columns)


def _rates(dropout: float) -> tuple[float, float]:
    """Return the dropout rate and the scale of the remaining weights."""
    return dropout, 1 / (1 - dropout) if dropout < 1 else 0.0


def _constants(
    width: int, kernel_size: int, before: int, tiling: Tile, dropout: float, is_shared: bool
) -> dict[str, int]:
    return {
        "KERNEL_SIZE": kernel_size,
        "BEFORE": before,
        "WIDTH": width,
        "COLUMNS": triton.next_power_of_2(width),
        "ROWS": tiling.rows,
        "HAS_DROPOUT": dropout > 0,
        "IS_SHARED": is_shared,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
