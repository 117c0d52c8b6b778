"""Loss, hits, samples and gradient of rows of scores: one program reads a row twice and overwrites it once.

A row of a usual vocabulary takes 60 KB, so that the second reading comes from the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.ops.kernel_support import Tile
from bertsmith.ops.token_loss.reference import Sampling, TargetWeights

_MIN_SCORE = tl.constexpr(-3.0e38)  # finite, so that the difference of two maxima is never NaN


def tile(columns: int) -> Tile:
    """Return the launch settings for rows of this many scores: a thread loads 16 bytes per row of the tile."""
    lanes = min(2048, triton.next_power_of_2(columns))
    return Tile(2, lanes, warps=max(1, lanes // 256))


@triton.jit
def _select(weights, index, draw):
    """Return the index that a draw from [0, 1) selects, and the draw's relative position in its interval."""
    cumulative = tl.cumsum(weights, 0)
    limit = draw * tl.max(cumulative, 0)
    # rounding must not select an index of weight 0 at the end
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    selected = tl.minimum(tl.sum((cumulative <= limit).to(tl.int32), 0), last)
    is_selected = index == selected
    weight = tl.sum(tl.where(is_selected, weights, 0.0), 0)
    below = tl.sum(tl.where(is_selected, cumulative, 0.0), 0) - weight
    rest = (limit - below) / tl.maximum(weight, 1e-37)
    return selected, tl.minimum(tl.maximum(rest, 0.0), 1 - 1.1920929e-07)


@triton.jit(do_not_specialize=["rows"])
def _rows(
    scores,
    targets,
    draws,
    results,
    samples,
    rows,
    vocabulary,
    columns,
    choices,
    inverse_temperature,
    on,
    off,
    IGNORED_TARGET: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SAMPLES: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
):
    """Results of one row as in `row_results`, a sample, and the gradient softmax − off − on · [target] in its place.

    Loads are masked by `columns`, a multiple of 64, because a mask that ends anywhere would make them narrow.
    """
    row = tl.program_id(0)
    line = scores + row.to(tl.int64) * columns
    size: tl.constexpr = ROWS * LANES
    # row after row of the tile: sums over its rows need no exchange between threads
    column = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    target = tl.load(targets + row).to(tl.int32)
    if target == IGNORED_TARGET:
        for result in tl.static_range(4):
            tl.store(results + result * rows + row, 0.0)
        if HAS_SAMPLES:
            tl.store(samples + row, 0)
        if HAS_GRADIENT:
            for begin in range(0, columns, size):
                zeros = tl.zeros((ROWS, LANES), scores.dtype.element_ty)
                tl.store(line + begin + column, zeros, mask=begin + column < columns)
        return

    right = tl.load(line + target).to(tl.float32)
    top = tl.full((LANES,), _MIN_SCORE, tl.float32)
    exponentials = tl.zeros((LANES,), tl.float32)
    higher = tl.zeros((LANES,), tl.int32)
    total = tl.zeros((LANES,), tl.float32)
    peak = tl.full((), _MIN_SCORE, tl.float32)
    tile_index = tl.arange(0, TILES)
    tile_weights = tl.zeros((TILES,), tl.float32)
    for begin in range(0, columns, size):
        entry = begin + column
        loaded = tl.load(line + entry, mask=entry < columns, other=0.0).to(tl.float32)
        score = tl.where(entry < vocabulary, loaded, -float("inf"))
        before, top = top, tl.maximum(top, tl.max(score, 0))
        exponentials = exponentials * tl.exp(before - top) + tl.sum(tl.exp(score - top[None, :]), 0)
        higher += tl.sum(((score > right) | ((score == right) & (entry < target))).to(tl.int32), 0)
        if HAS_SMOOTHING:
            total += tl.sum(tl.where(entry < vocabulary, loaded, 0.0), 0)
        if HAS_SAMPLES:
            choice = tl.where(entry < choices, score * inverse_temperature, -float("inf"))
            last, peak = peak, tl.maximum(peak, tl.max(choice))
            weight = tl.sum(tl.exp(choice - peak))
            tile_weights = tile_weights * tl.exp(last - peak) + tl.where(tile_index == begin // size, weight, 0.0)

    highest = tl.max(top, 0)
    normaliser = highest + tl.log(tl.sum(exponentials * tl.exp(top - highest), 0))
    loss = normaliser - right
    tl.store(results + rows + row, loss)
    if HAS_SMOOTHING:
        loss = normaliser - on * right - off * tl.sum(total, 0)
    tl.store(results + row, loss)
    tl.store(results + 2 * rows + row, (tl.sum(higher, 0) == 0).to(tl.float32))
    tl.store(results + 3 * rows + row, 1.0)

    if HAS_SAMPLES:
        # sample a tile of the vocabulary, then a token in it
        selected, rest = _select(tile_weights, tile_index, tl.load(draws + row).to(tl.float32))
        inside = tl.arange(0, size)
        again = tl.load(line + selected * size + inside, mask=selected * size + inside < columns, other=0.0)
        exponent = again.to(tl.float32) * inverse_temperature - peak
        exponent = tl.where(selected * size + inside < choices, exponent, -float("inf"))
        token, _ = _select(tl.exp(exponent), inside, rest)
        tl.store(samples + row, selected * size + token)

    if HAS_GRADIENT:
        # all warps have read `right` and the sample's tile, because they waited for each other in reductions since
        for begin in range(0, columns, size):
            entry = begin + column
            loaded = tl.load(line + entry, mask=entry < columns, other=0.0).to(tl.float32)
            gradient = tl.exp(tl.where(entry < vocabulary, loaded - normaliser, -float("inf")))
            if HAS_SMOOTHING:
                gradient -= tl.where(entry < vocabulary, off, 0.0)
            gradient = tl.where(entry == target, gradient - on, gradient)
            tl.store(line + entry, gradient.to(scores.dtype.element_ty), mask=entry < columns)


def losses(
    scores: Tensor,
    targets: Tensor,
    vocabulary: int,
    smoothing: float,
    sampling: Sampling | None,
    needs_gradients: bool,
    tiling: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of rows, (4, rows), their samples, and their gradients, which overwrite the scores.

    Shape: scores (rows, columns), contiguous, of which the first `vocabulary` columns are scores.
    """
    rows, columns = scores.shape
    weights, tiling = TargetWeights.of(smoothing, vocabulary), tiling or tile(columns)
    results = scores.new_empty(4, rows, dtype=torch.float32)
    samples = targets.new_empty(0 if sampling is None else rows)
    _rows[(rows,)](
        scores,
        targets,
        None if sampling is None else sampling.draw,
        results,
        samples,
        rows,
        vocabulary,
        columns,
        0 if sampling is None else sampling.vocabulary,
        1.0 if sampling is None else 1 / sampling.temperature,
        weights.on,
        weights.off,
        IGNORED_TARGET=IGNORED,
        ROWS=tiling.rows,
        LANES=tiling.columns,
        TILES=triton.next_power_of_2(triton.cdiv(columns, tiling.rows * tiling.columns)),
        HAS_SMOOTHING=smoothing > 0,
        HAS_SAMPLES=sampling is not None,
        HAS_GRADIENT=needs_gradients,
        num_warps=tiling.warps,
    )
    return results, samples, scores
