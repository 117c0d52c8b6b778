"""Cumulative sums that also run in PyTorch's deterministic mode on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def cumulative_sum(values: Tensor, dim: int) -> Tensor:
    """Return `values.cumsum(dim)`, bit-equal in every call.

    PyTorch's deterministic mode refuses all floating-point cumulative sums on a GPU. Only the sum of a single row,
    which is split over thread blocks, depends on their timing; sums of several rows have a fixed order.
    """
    if not (values.is_cuda and values.is_floating_point() and torch.are_deterministic_algorithms_enabled()):
        return values.cumsum(dim)
    result: Tensor = _row_sums(values, dim % values.dim())
    return result


@contextmanager
def _unchecked() -> Iterator[None]:
    """Allow operations that PyTorch's deterministic mode refuses."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


@torch.library.custom_op("bertsmith::cumulative_sum", mutates_args=())
def _row_sums(values: Tensor, dim: int) -> Tensor:
    with _unchecked():
        if values.numel() == values.shape[dim]:
            # a second row keeps the only one from being split
            return torch.stack([values, values]).cumsum(dim + 1)[0].clone()
        return values.cumsum(dim)


@_row_sums.register_fake
def _(values: Tensor, dim: int) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.dim = inputs[1]


def _differentiate(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
    return _row_sums(upstream.flip(ctx.dim), ctx.dim).flip(ctx.dim), None


_row_sums.register_autograd(_differentiate, setup_context=_save)
