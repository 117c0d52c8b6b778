"""A kernel against its op's written-out form in float64: outputs and every gradient, with the rounding that is due."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from bertsmith.ops import kernel_support as support

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOM = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
"""What a kernel may be further from the truth than the written-out form, relative, by dtype."""

needs_triton = pytest.mark.skipif(
    support.unsupported(torch.empty(0, device=DEVICE)) is not None,
    reason=str(support.unsupported(torch.empty(0, device=DEVICE))),
)

Op = Callable[..., Tensor]
"""An op with everything but its tensors and `backend` given."""


def results(
    op: Op, tensors: Sequence[Tensor], backend: str, dtype: torch.dtype, is_token: Tensor | None = None
) -> list[Tensor]:
    """What the op gives and the gradient of each tensor, computed in a dtype.

    What is sent back is the same for all dtypes and, where `is_token` is given, 0 at pads: nobody reads what they get.
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
    """Outputs and gradients of the fast form are as near to float64 as the reference in the same dtype; the fast ones.

    `tensors` are rounded to the dtype first, so that all start from the same numbers; `room` widens what is allowed
    beyond the reference's own error.
    """
    rounded = [tensor.to(dtype) for tensor in tensors]
    found = results(op, rounded, fast, dtype, is_token)
    near = results(op, rounded, "reference", dtype, is_token)
    truth = results(op, rounded, "reference", torch.float64, is_token)
    for index, (ours, theirs, exact) in enumerate(zip(found, near, truth, strict=True)):
        assert ours.dtype == dtype
        assert ours.isfinite().all(), f"tensor {index} is not finite"
        scale = exact.norm() + 0.01 * exact.numel() ** 0.5  # some gradients are exactly 0
        error, allowed = ((tensor.double() - exact).norm() / scale for tensor in (ours, theirs))
        assert error <= 1.5 * allowed + room * ROOM[dtype], f"tensor {index}: {error:.2e}, reference {allowed:.2e}"
    return found
