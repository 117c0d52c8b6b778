"""Comparison of a kernel with the reference in float64: outputs and all gradients."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from bertsmith.ops import kernel_support as support

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOM = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
"""Relative error that a kernel may have beyond the error of the reference in the same dtype."""

needs_triton = pytest.mark.skipif(
    support.unsupported(torch.empty(0, device=DEVICE)) is not None,
    reason=str(support.unsupported(torch.empty(0, device=DEVICE))),
)

Op = Callable[..., Tensor]
"""An op whose remaining arguments are its tensors and `backend`."""


def results(
    op: Op, tensors: Sequence[Tensor], backend: str, dtype: torch.dtype, is_token: Tensor | None = None
) -> list[Tensor]:
    """Return the output and the gradient of each tensor, computed in a dtype.

    The upstream gradient is the same for all dtypes and, with `is_token`, 0 at padding.
    """
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    mixed = op(*leaves, backend=backend)
    weight = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(mixed)
    if is_token is not None:
        trailing = (1,) * (mixed.dim() - is_token.dim())
        real = is_token.view(*is_token.shape, *trailing)
        weight, mixed = weight * real, torch.where(real, mixed, 0.0)
    gradients = torch.autograd.grad((mixed * weight).sum(), leaves)
    return [mixed.detach(), *gradients]


def assert_close_to_truth(
    op: Op,
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    fast: str = "triton",
    is_token: Tensor | None = None,
    room: float = 1.0,
) -> list[Tensor]:
    """Check that outputs and gradients are as close to float64 as the reference in the same dtype; return them.

    `tensors` are rounded to the dtype first, so that all backends start from the same numbers; `room` is a factor of
    the error allowed beyond the reference's.
    """
    rounded = [tensor.to(dtype) for tensor in tensors]
    actual = results(op, rounded, fast, dtype, is_token)
    reference = results(op, rounded, "reference", dtype, is_token)
    truth = results(op, rounded, "reference", torch.float64, is_token)
    for index, (ours, theirs, exact) in enumerate(zip(actual, reference, truth, strict=True)):
        assert ours.dtype == dtype
        assert ours.isfinite().all(), f"tensor {index} is not finite"
        scale = exact.norm() + 0.01 * exact.numel() ** 0.5  # some gradients are exactly 0
        error, allowed = ((tensor.double() - exact).norm() / scale for tensor in (ours, theirs))
        assert error <= 1.5 * allowed + room * ROOM[dtype], f"tensor {index}: {error:.2e}, reference {allowed:.2e}"
    return actual
