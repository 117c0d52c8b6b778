"""What all keys and values of a sequence leave behind for queries: for every feature a mean of values, and its weight.

Per sequence and head, with φ = bare feature + ε, L the largest exponent and n the number of keys:

    sum_m = Σ_k φ_km          mean_m = Σ_k φ_km v_k / sum_m      (a weight per query is φ_qm · sum_m)

One program goes over a split of the keys for a block of features, as flash attention would with w_m as queries. If it
saw all of both, it also finishes; else partial sums are joined in a fixed order by a second kernel.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.features import (
    LOG2_E,
    NONE,
    Curve,
    RowSplits,
    matrix_of,
    product,
    rows_again,
    rows_of,
    squares,
)
from bertsmith.ops.kernel_support import SequenceRows, Tile


@triton.jit
def _finished(level, total, sums, values, count, feature, features, epsilon, log_epsilon, IS_EXPONENTIAL: tl.constexpr):
    """(mean, bias, shift, reach, reach of ones) of sums without ε.

    bias: the logarithm of sum_m (for a curve sum_m / n), which weighs a feature of a query. shift: what is subtracted
    from a key's exponent to get its share of sum_m (for a curve 1 / sum_m, a factor), shares being times min(n, 1024),
    which keeps them in the range of float16. reach: Σ_m of sum_m · mean_m, of what ε reaches; the same for ones.
    Shape: level, total (features,), sums (features, columns), values (columns,).
    """
    is_feature = feature < features
    keys = tl.maximum(count, 1).to(tl.float32)
    share = tl.minimum(keys, 1024.0)
    if IS_EXPONENTIAL:
        has_sum = is_feature & (total > 0.0)
        level = tl.where(has_sum, level, NONE)
        top = tl.max(level, 0)
        top = tl.where(top > NONE / 2, top, 0.0)
        whole = tl.where(has_sum, total, 1.0)
        own = tl.where(has_sum, level - top + tl.log2(whole), NONE)
        floor = log_epsilon + tl.log2(keys)
        larger = tl.maximum(own, floor)
        bias = larger + tl.log2(tl.exp2(own - larger) + tl.exp2(floor - larger))
        mean = tl.exp2(own - bias)[:, None] * (sums / whole[:, None])
        mean += tl.exp2(floor - bias)[:, None] * (values / keys)[None, :]
        is_there = is_feature & (count > 0) & (bias > NONE / 2)
        shift = tl.where(is_there, top + bias - tl.log2(share), -NONE)
        bias = tl.where(is_there, bias, NONE)
        size = tl.exp2(bias)
    else:
        whole = total + epsilon * count
        is_there = is_feature & (whole > 0.0)
        whole = tl.where(is_there, whole, 1.0)
        mean = (sums + epsilon * values[None, :]) / whole[:, None]
        bias = tl.where(is_there, whole / keys, 0.0)
        shift = tl.where(is_there, share / whole, 0.0)
        size = bias
    mean = tl.where(is_there[:, None], mean, 0.0)
    return mean, bias, shift, tl.sum(size[:, None] * mean, 0), tl.sum(size, 0)


@triton.jit
def _gather(
    key, value, matrix, first, length,
    mean, bias, shift, reach, partial_sums, partial_level, partial_total, partial_values,
    key_row, key_head, value_row, value_head,
    heads, splits, split_rows, features, norm, epsilon, log_epsilon,
    IS_EXPONENTIAL: tl.constexpr, IS_WHOLE: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    head, split, sequence = tl.program_id(0), tl.program_id(1) % splits, tl.program_id(1) // splits
    position = (sequence * heads + head).to(tl.int64)
    begin = tl.load(first + sequence)
    count = tl.load(length + sequence)
    feature = tl.program_id(2) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    weights = matrix_of(matrix, feature, features, WIDTH)
    level = tl.full([FEATURES], NONE, tl.float32)
    total = tl.zeros([FEATURES], tl.float32)
    sums = tl.zeros([FEATURES, WIDTH], tl.float32)
    values = tl.zeros([WIDTH], tl.float32)
    end = tl.minimum(count, (split + 1) * split_rows)
    for start in range(split * split_rows, end, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = row < end
        k = rows_of(key, begin + row, head, key_row, key_head, is_row, WIDTH)
        v = rows_of(value, begin + row, head, value_row, value_head, is_row, WIDTH)
        u = product(weights, tl.trans(k))
        if IS_EXPONENTIAL:
            again = rows_again(key, begin + row, head, key_row, key_head, is_row, WIDTH)
            exponent = u * LOG2_E + tl.where(is_row, norm * squares(again), NONE)[None, :]
            larger = tl.maximum(level, tl.max(exponent, 1))
            made = tl.exp2(exponent - larger[:, None])
            smaller = tl.exp2(level - larger)
            level = larger
            total = total * smaller + tl.sum(made, 1)
            sums = sums * smaller[:, None]
        else:
            made = tl.maximum(u, 0.0)
            total += tl.sum(made, 1)
        sums += product(made.to(v.dtype), v)
        again = rows_again(value, begin + row, head, value_row, value_head, is_row, WIDTH)
        values += tl.sum(again.to(tl.float32), 0)
    if IS_WHOLE:
        means, biases, shifts, reached, ones = _finished(
            level, total, sums, values, count, feature, features, epsilon, log_epsilon, IS_EXPONENTIAL
        )
        tl.store(
            mean + (position * PADDED + feature)[:, None] * WIDTH + column[None, :], means.to(mean.dtype.element_ty)
        )
        tl.store(bias + position * PADDED + feature, biases)
        tl.store(shift + position * PADDED + feature, shifts)
        tl.store(reach + position * (WIDTH + 1) + column, reached)
        tl.store(reach + position * (WIDTH + 1) + WIDTH, ones)
    else:
        part = position * splits + split
        at = part * PADDED + feature
        tl.store(partial_sums + at[:, None] * WIDTH + column[None, :], sums)
        tl.store(partial_level + at, level)
        tl.store(partial_total + at, total)
        # every block of features has the same
        if tl.program_id(2) == 0:
            tl.store(partial_values + part * WIDTH + column, values)


@triton.jit
def _join(
    partial_sums, partial_level, partial_total, partial_values, length, mean, bias, shift, reach,
    heads, splits, features, epsilon, log_epsilon,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    position = (sequence * heads + head).to(tl.int64)
    count = tl.load(length + sequence)
    feature = tl.arange(0, ALL)
    is_kept = feature < PADDED
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    level = tl.full([ALL], NONE, tl.float32)
    for split in range(splits):
        at = (position * splits + split) * PADDED + feature
        level = tl.maximum(level, tl.load(partial_level + at, mask=is_kept, other=NONE))
    total = tl.zeros([ALL], tl.float32)
    sums = tl.zeros([ALL, COLUMNS], tl.float32)
    values = tl.zeros([COLUMNS], tl.float32)
    for split in range(splits):
        part = position * splits + split
        at = part * PADDED + feature
        smaller = tl.exp2(tl.load(partial_level + at, mask=is_kept, other=NONE) - level)
        total += smaller * tl.load(partial_total + at, mask=is_kept, other=0.0)
        own = tl.load(partial_sums + at[:, None] * WIDTH + column[None, :], mask=is_kept[:, None], other=0.0)
        sums += smaller[:, None] * own
        values += tl.load(partial_values + part * WIDTH + column)
    means, biases, shifts, reached, ones = _finished(
        level, total, sums, values, count, feature, features, epsilon, log_epsilon, IS_EXPONENTIAL
    )
    at = position * PADDED + feature
    tl.store(mean + at[:, None] * WIDTH + column[None, :], means.to(mean.dtype.element_ty), mask=is_kept[:, None])
    tl.store(reach + position * (WIDTH + 1) + column, reached)
    # all blocks of columns have the same
    if tl.program_id(0) == 0:
        tl.store(bias + at, biases, mask=is_kept)
        tl.store(shift + at, shifts, mask=is_kept)
        tl.store(reach + position * (WIDTH + 1) + WIDTH, ones)


class KeyMemory(NamedTuple):
    """The sums over keys and values that queries read.

    Shape: mean (batch, heads, padded, head_width), bias, shift (batch, heads, padded), reach (batch, heads,
    head_width + 1).
    """

    mean: Tensor
    bias: Tensor
    shift: Tensor
    reach: Tensor


def remember(
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    curve: Curve,
    padded: int,
    asked: Tile | None = None,
) -> KeyMemory:
    """Sum up the keys and values of every sequence and head.

    Shape: key, value (tokens, heads, head_width), matrix (features, head_width).
    """
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    batch, (heads, width) = first.shape[0], key.shape[1:]
    cut = RowSplits.of(key, batch * heads, max_length, padded, asked)
    mean = key.new_empty(batch, heads, padded, width)
    bias, shift = (key.new_empty(batch, heads, padded, dtype=torch.float32) for _ in range(2))
    reach = key.new_empty(batch, heads, width + 1, dtype=torch.float32)
    parts = 0 if cut.is_whole else cut.count
    sums = key.new_empty(batch, heads, parts, padded, width, dtype=torch.float32)
    level, total = (key.new_empty(batch, heads, parts, padded, dtype=torch.float32) for _ in range(2))
    values = key.new_empty(batch, heads, parts, width, dtype=torch.float32)
    if batch * heads == 0:
        return KeyMemory(mean, bias, shift, reach)
    _gather[(heads, batch * cut.count, cut.blocks)](
        key, value, matrix, first, length,
        mean, bias, shift, reach, sums, level, total, values,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        heads, cut.count, cut.rows, matrix.shape[0], curve.in_exponents(width), curve.epsilon, curve.logarithm,
        IS_EXPONENTIAL=curve.is_exponential, IS_WHOLE=cut.is_whole,
        PADDED=padded, WIDTH=width, ROWS=cut.tile.rows, FEATURES=cut.tile.columns,
        num_warps=cut.tile.warps, num_stages=cut.tile.stages,
    )  # fmt: skip
    if not cut.is_whole:
        _join[(width // 16, heads, batch)](
            sums, level, total, values, length, mean, bias, shift, reach,
            heads, cut.count, matrix.shape[0], curve.epsilon, curve.logarithm,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, ALL=triton.next_power_of_2(padded), COLUMNS=16,
        )  # fmt: skip
    return KeyMemory(mean, bias, shift, reach)
