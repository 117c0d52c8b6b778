"""Triton kernels as PyTorch ops: whether they can run, where sequences lie, tile sizes, registration.

Triton comes with PyTorch's builds for CUDA. Its interpreter runs the same kernels on a CPU, slowly, for tests: set
TRITON_INTERPRET=1 before anything imports Triton.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout

HAS_TRITON = importlib.util.find_spec("triton") is not None
Outputs = Tensor | tuple[Tensor, ...]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported(tensor: Tensor) -> str | None:
    """Why no kernel can take this tensor; None if it can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if not tensor.is_cuda and not is_interpreting():
        return f"the tensors are on {tensor.device.type} and the kernel runs on CUDA"
    if tensor.dtype not in DTYPES:
        return f"the tensors are {tensor.dtype} and the kernel takes float16, bfloat16 or float32"
    return None


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_wanted(tensor: Tensor) -> bool:
    """Whether a kernel is the way to go where it can serve: on a GPU; the interpreter is for tests."""
    return tensor.is_cuda


@dataclass(frozen=True)
class SequenceRows:
    """Sequence i is rows first[i] : first[i] + length[i] of tensors whose batch and length axes are one.

    Up to first[i] + `longest` a padded batch has padding; a packed one has other sequences.
    Shape: first, length (batch,), int32.
    """

    first: Tensor
    length: Tensor
    max_length: int
    has_padding: bool = False

    def empty(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for a result by row; zeros if there is padding, which no kernel writes."""
        return like.new_zeros(shape, dtype=dtype) if self.has_padding else like.new_empty(shape, dtype=dtype)

    @classmethod
    def of(cls, layout: SequenceLayout, device: torch.device) -> "SequenceRows":
        if layout.starts is not None:
            starts = layout.starts.to(torch.int32)
            return cls(starts[:-1], starts.diff(), layout.max_length)
        first = torch.arange(layout.batch, dtype=torch.int32, device=device) * layout.max_length
        if layout.is_token is None:
            return cls(first, torch.full_like(first, layout.max_length), layout.max_length)
        return cls(first, layout.is_token.sum(-1, dtype=torch.int32), layout.max_length, has_padding=True)


def by_row(tensor: Tensor, layout: SequenceLayout) -> Tensor:
    """One axis for all tokens: (batch, length, …) -> (batch · length, …); packed tensors lie so already."""
    return tensor if layout.is_packed else tensor.flatten(0, 1)


def as_laid(rows: Tensor, layout: SequenceLayout) -> Tensor:
    """The inverse of `by_row`."""
    return rows if layout.is_packed else rows.unflatten(0, (layout.batch, layout.max_length))


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work: rows and columns of one program's tile, warps of a program, loads under way."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


Tiles = Mapping[tuple[int, int], Tile]
"""Tuned tiles by (bytes of a number, head width)."""


def tile(tuned: Tiles, default: Tile, dtype: torch.dtype, head_width: int) -> Tile:
    """The tuned tile of a shape, or the default."""
    return tuned.get((dtype.itemsize, head_width), default)


def register_op(
    name: str,
    *,
    forward: Callable[..., Outputs],
    fake_forward: Callable[..., Outputs],
    backward: Callable[..., Outputs],
    fake_backward: Callable[..., Outputs],
    saves_result: bool = True,
) -> Callable[..., Any]:
    """Register the differentiable op bertsmith::{name} and its gradient bertsmith::{name}_backward, and return the op.

    Arguments of `forward` are tensors (or None) first, then numbers. Its first output is the result; others are read
    by the backward pass alone. `backward` takes the gradient of the result, the outputs (without the result, unless
    `saves_result`) and all arguments of `forward`, and returns the gradients of the first tensors. The fake functions
    return empty tensors of the shapes and dtypes of the outputs, for compilers and exporters.
    """
    op = torch.library.custom_op(f"bertsmith::{name}", forward, mutates_args=())
    op.register_fake(fake_forward)
    gradient_op = torch.library.custom_op(f"bertsmith::{name}_backward", backward, mutates_args=())
    gradient_op.register_fake(fake_backward)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        tensors = [value for value in inputs if value is None or isinstance(value, Tensor)]
        outputs = (output,) if isinstance(output, Tensor) else output
        ctx.tensors, ctx.numbers = len(tensors), inputs[len(tensors) :]
        ctx.save_for_backward(*(outputs if saves_result else outputs[1:]), *tensors)
        # no gradients of zeros for the outputs that only the backward pass reads: some are as large as all pairs
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = ctx.tensors + len(ctx.numbers)
        if upstream is None:
            return (None,) * arguments
        tensors = ctx.saved_tensors[len(ctx.saved_tensors) - ctx.tensors :]
        gradients = gradient_op(upstream, *ctx.saved_tensors, *ctx.numbers)
        given = [None if tensor is None else own for tensor, own in zip(tensors, gradients, strict=False)]
        return *given, *(None,) * (arguments - len(given))

    op.register_autograd(differentiate, setup_context=save)
    return op
