"""Sums over the keys and values of a sequence: a mean of values per feature, and its weight.

Per sequence and head, with φ the features including ε, and n the number of keys:

    sum_m = Σ_k φ_km          mean_m = Σ_k φ_km v_k / sum_m      (a weight per query is φ_qm · sum_m)

A program processes a split of the keys for a block of features, like flash attention with w_m as queries. If it covers
all keys and features, it also finishes; otherwise a second kernel adds partial sums in a fixed order.
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
    load_matrix,
    load_rows,
    product,
    reload_rows,
    squares,
)
from bertsmith.ops.kernel_support import SequenceRows, Tile


@triton.jit
def _finish(level, total, sums, values, count, feature, features, epsilon, log_epsilon, IS_EXPONENTIAL: tl.constexpr):
    """Return (mean, bias, shift, feature sum of means, feature sum of ones) from sums without ε.

    bias: the logarithm of sum_m (for relu sum_m / n), the weight of a query's feature. shift: subtracted from a key's
    exponent to get its share of sum_m (for relu a factor, 1 / sum_m); shares are scaled by min(n, 1024), which keeps
    them in the range of float16. Feature sums: Σ_m sum_m · mean_m and Σ_m sum_m, which ε multiplies.
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
        log_sum = tl.where(has_sum, level - top + tl.log2(whole), NONE)
        floor = log_epsilon + tl.log2(keys)
        larger = tl.maximum(log_sum, floor)
        bias = larger + tl.log2(tl.exp2(log_sum - larger) + tl.exp2(floor - larger))
        mean = tl.exp2(log_sum - bias)[:, None] * (sums / whole[:, None])
        mean += tl.exp2(floor - bias)[:, None] * (values / keys)[None, :]
        is_valid = is_feature & (count > 0) & (bias > NONE / 2)
        shift = tl.where(is_valid, top + bias - tl.log2(share), -NONE)
        bias = tl.where(is_valid, bias, NONE)
        size = tl.exp2(bias)
    else:
        whole = total + epsilon * count
        is_valid = is_feature & (whole > 0.0)
        whole = tl.where(is_valid, whole, 1.0)
        mean = (sums + epsilon * values[None, :]) / whole[:, None]
        bias = tl.where(is_valid, whole / keys, 0.0)
        shift = tl.where(is_valid, share / whole, 0.0)
        size = bias
    mean = tl.where(is_valid[:, None], mean, 0.0)
    return mean, bias, shift, tl.sum(size[:, None] * mean, 0), tl.sum(size, 0)


@triton.jit(do_not_specialize=["splits", "split_rows"])
def _gather(
    key, value, matrix, first, length,
    mean, bias, shift, feature_sums, partial_sums, partial_level, partial_total, partial_values,
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
    weights = load_matrix(matrix, feature, features, WIDTH)
    level = tl.full([FEATURES], NONE, tl.float32)
    total = tl.zeros([FEATURES], tl.float32)
    sums = tl.zeros([FEATURES, WIDTH], tl.float32)
    values = tl.zeros([WIDTH], tl.float32)
    end = tl.minimum(count, (split + 1) * split_rows)
    for start in range(split * split_rows, end, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = row < end
        k = load_rows(key, begin + row, head, key_row, key_head, is_row, WIDTH)
        v = load_rows(value, begin + row, head, value_row, value_head, is_row, WIDTH)
        u = product(weights, tl.trans(k))
        if IS_EXPONENTIAL:
            again = reload_rows(key, begin + row, head, key_row, key_head, is_row, WIDTH)
            exponent = u * LOG2_E + tl.where(is_row, norm * squares(again), NONE)[None, :]
            larger = tl.maximum(level, tl.max(exponent, 1))
            phi = tl.exp2(exponent - larger[:, None])
            smaller = tl.exp2(level - larger)
            level = larger
            total = total * smaller + tl.sum(phi, 1)
            sums = sums * smaller[:, None]
        else:
            phi = tl.maximum(u, 0.0)
            total += tl.sum(phi, 1)
        sums += product(phi.to(v.dtype), v)
        again = reload_rows(value, begin + row, head, value_row, value_head, is_row, WIDTH)
        values += tl.sum(again.to(tl.float32), 0)
    if IS_WHOLE:
        means, biases, shifts, feature_sum, ones = _finish(
            level, total, sums, values, count, feature, features, epsilon, log_epsilon, IS_EXPONENTIAL
        )
        tl.store(
            mean + (position * PADDED + feature)[:, None] * WIDTH + column[None, :], means.to(mean.dtype.element_ty)
        )
        tl.store(bias + position * PADDED + feature, biases)
        tl.store(shift + position * PADDED + feature, shifts)
        tl.store(feature_sums + position * (WIDTH + 1) + column, feature_sum)
        tl.store(feature_sums + position * (WIDTH + 1) + WIDTH, ones)
    else:
        part = position * splits + split
        at = part * PADDED + feature
        tl.store(partial_sums + at[:, None] * WIDTH + column[None, :], sums)
        tl.store(partial_level + at, level)
        tl.store(partial_total + at, total)
        # the same for every block of features
        if tl.program_id(2) == 0:
            tl.store(partial_values + part * WIDTH + column, values)


@triton.jit(do_not_specialize=["splits"])
def _join(
    partial_sums, partial_level, partial_total, partial_values, length, mean, bias, shift, feature_sums,
    heads, splits, features, epsilon, log_epsilon,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    position = (sequence * heads + head).to(tl.int64)
    count = tl.load(length + sequence)
    feature = tl.arange(0, ALL)
    is_feature = feature < PADDED
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    level = tl.full([ALL], NONE, tl.float32)
    for split in range(splits):
        at = (position * splits + split) * PADDED + feature
        level = tl.maximum(level, tl.load(partial_level + at, mask=is_feature, other=NONE))
    total = tl.zeros([ALL], tl.float32)
    sums = tl.zeros([ALL, COLUMNS], tl.float32)
    values = tl.zeros([COLUMNS], tl.float32)
    for split in range(splits):
        part = position * splits + split
        at = part * PADDED + feature
        smaller = tl.exp2(tl.load(partial_level + at, mask=is_feature, other=NONE) - level)
        total += smaller * tl.load(partial_total + at, mask=is_feature, other=0.0)
        loaded = tl.load(partial_sums + at[:, None] * WIDTH + column[None, :], mask=is_feature[:, None], other=0.0)
        sums += smaller[:, None] * loaded
        values += tl.load(partial_values + part * WIDTH + column)
    means, biases, shifts, feature_sum, ones = _finish(
        level, total, sums, values, count, feature, features, epsilon, log_epsilon, IS_EXPONENTIAL
    )
    at = position * PADDED + feature
    tl.store(mean + at[:, None] * WIDTH + column[None, :], means.to(mean.dtype.element_ty), mask=is_feature[:, None])
    tl.store(feature_sums + position * (WIDTH + 1) + column, feature_sum)
    # the same for all blocks of columns
    if tl.program_id(0) == 0:
        tl.store(bias + at, biases, mask=is_feature)
        tl.store(shift + at, shifts, mask=is_feature)
        tl.store(feature_sums + position * (WIDTH + 1) + WIDTH, ones)


class KeyMemory(NamedTuple):
    """Sums over keys and values that queries read.

    Shape: mean (batch, heads, padded, head_width), bias, shift (batch, heads, padded), feature_sums (batch, heads,
    head_width + 1).
    """

    mean: Tensor
    bias: Tensor
    shift: Tensor
    feature_sums: Tensor


def build_memory(
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    sequences: SequenceRows,
    curve: Curve,
    padded: int,
    tiling: Tile | None = None,
) -> KeyMemory:
    """Sum over the keys and values of every sequence and head.

    Shape: key, value (tokens, heads, head_width), matrix (features, head_width).
    """
    first, length, max_length = sequences.first, sequences.length, sequences.max_length
    batch, (heads, width) = first.shape[0], key.shape[1:]
    splits = RowSplits.of(key, batch * heads, max_length, padded, tiling)
    mean = key.new_empty(batch, heads, padded, width)
    bias, shift = (key.new_empty(batch, heads, padded, dtype=torch.float32) for _ in range(2))
    feature_sums = key.new_empty(batch, heads, width + 1, dtype=torch.float32)
    parts = 0 if splits.is_whole else splits.count
    sums = key.new_empty(batch, heads, parts, padded, width, dtype=torch.float32)
    level, total = (key.new_empty(batch, heads, parts, padded, dtype=torch.float32) for _ in range(2))
    values = key.new_empty(batch, heads, parts, width, dtype=torch.float32)
    if batch * heads == 0:
        return KeyMemory(mean, bias, shift, feature_sums)
    _gather[(heads, batch * splits.count, splits.blocks)](
        key, value, matrix, first, length,
        mean, bias, shift, feature_sums, sums, level, total, values,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        heads, splits.count, splits.rows, matrix.shape[0], curve.in_exponents(width), curve.epsilon, curve.logarithm,
        IS_EXPONENTIAL=curve.is_exponential, IS_WHOLE=splits.is_whole,
        PADDED=padded, WIDTH=width, ROWS=splits.tile.rows, FEATURES=splits.tile.columns,
        num_warps=splits.tile.warps, num_stages=splits.tile.stages,
    )  # fmt: skip
    if not splits.is_whole:
        _join[(width // 16, heads, batch)](
            sums, level, total, values, length, mean, bias, shift, feature_sums,
            heads, splits.count, matrix.shape[0], curve.epsilon, curve.logarithm,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, ALL=triton.next_power_of_2(padded), COLUMNS=16,
        )  # fmt: skip
    return KeyMemory(mean, bias, shift, feature_sums)
