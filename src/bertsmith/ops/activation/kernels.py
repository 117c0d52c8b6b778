"""Bias and activation: one kernel forward; one backward, which also sums the gradient of the bias.

PyTorch's compiled code reads the gradient and the pre-activation twice: once for the gradient of the product, once for
the sum over the tokens. Here a program computes both for some columns of a range of rows, and the sums of the ranges
are added in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 8, 256, 4
"""Tile of a program: 16 bytes of half precision per thread and row."""
PROGRAMS = 2048
"""Programs of the backward kernel: each has a sum per column, written and read once more."""


@triton.jit
def _normal(x):
    """Return Φ(x) and φ(x), the distribution function and density of the normal distribution.

    1 − erf is Abramowitz & Stegun 7.1.26, with an absolute error of at most 1.5e-7. It shares the exponential with the
    density, which makes it half as expensive as erf and exp.
    """
    density = tl.exp2(x * x * -0.7213475204444817)  # exp(−x²/2)
    t = 1.0 / (1.0 + 0.23164190 * tl.abs(x))
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    series = t * (0.254829592 + t * (-0.284496736 + t * series))
    tail = 0.5 * series * density
    return tl.where(x < 0, tail, 1.0 - tail), density * 0.3989422804014327


@triton.jit
def _logistic(x):
    """Return the weight σ of x in the tanh form of GELU, x · σ, and the derivative of its argument."""
    argument = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    small = tl.exp2(tl.abs(argument) * -1.4426950408889634)  # at most 1
    weight = tl.where(argument < 0, small, 1.0) / (1.0 + small)
    return weight, 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == "gelu":
        weight, _ = _normal(x)
        result = x * weight
    elif KIND == "gelu_tanh":
        weight, _ = _logistic(x)
        result = x * weight
    else:
        result = tl.maximum(x, 0.0)
    return result


@triton.jit
def _slope(x, KIND: tl.constexpr):
    """Return the derivative of the activation."""
    if KIND == "gelu":
        weight, density = _normal(x)
        slope = weight + x * density
    elif KIND == "gelu_tanh":
        weight, inner = _logistic(x)
        slope = weight + x * weight * (1.0 - weight) * inner
    else:
        slope = tl.where(x > 0.0, 1.0, 0.0)
    return slope


@triton.jit(do_not_specialize=["rows"])
def _forward(
    product, bias, activated, rows, WIDTH: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # one axis, because the others have at most 65,535 programs
    blocks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    where = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    x = tl.load(product + where, mask=is_inside, other=0.0).to(tl.float32) + shift[None, :]
    tl.store(activated + where, _activated(x, KIND).to(activated.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def _backward(
    upstream,
    product,
    bias,
    by_product,
    shares,
    rows,
    rows_per_program,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """by_product = upstream · slope(product + bias), and its sums over the rows of each program."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < WIDTH)[None, :]
    shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tl.program_id(1) * rows_per_program
    end = tl.minimum(begin + rows_per_program, rows)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_inside = (row < end)[:, None] & is_column
        where = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        x = tl.load(product + where, mask=is_inside, other=0.0).to(tl.float32) + shift
        gradient = tl.load(upstream + where, mask=is_inside, other=0.0).to(tl.float32) * _slope(x, KIND)
        tl.store(by_product + where, gradient.to(by_product.dtype.element_ty), mask=is_inside)
        total += gradient
    tl.store(shares + tl.program_id(1) * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


def forward(product: Tensor, bias: Tensor, activation: str) -> Tensor:
    """Return activation(product + bias). Shape: product (rows, neurons), contiguous; bias (neurons,)."""
    rows, width = product.shape
    activated = product.new_empty(product.shape)
    if product.numel():
        _forward[(triton.cdiv(width, COLUMNS) * triton.cdiv(rows, ROWS),)](
            product, bias, activated, rows, WIDTH=width, KIND=activation, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
        )
    return activated


def backward(upstream: Tensor, product: Tensor, bias: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of product and bias."""
    rows, width = product.shape
    by_product = product.new_empty(product.shape)
    if not product.numel():
        return by_product, bias.new_zeros(bias.shape)
    columns = triton.cdiv(width, COLUMNS)
    blocks = triton.cdiv(rows, ROWS)
    rows_per_program = triton.cdiv(blocks, min(blocks, triton.cdiv(PROGRAMS, columns))) * ROWS
    programs = triton.cdiv(rows, rows_per_program)
    shares = product.new_empty(programs, width, dtype=torch.float32)
    _backward[columns, programs](
        upstream,
        product,
        bias,
        by_product,
        shares,
        rows,
        rows_per_program,
        WIDTH=width,
        KIND=activation,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
        num_stages=1,
    )
    return by_product, shares.sum(0).to(bias.dtype)
