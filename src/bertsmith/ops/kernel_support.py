"""Triton kernels as PyTorch ops: supported inputs, rows of sequences, tile sizes, registration.

Triton comes with PyTorch's CUDA builds. Its interpreter runs the same kernels on a CPU, slowly, for tests: set
TRITON_INTERPRET=1 before the first import of Triton.
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
    """Return why no kernel supports this tensor, or None if kernels do."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if not tensor.is_cuda and not is_interpreting():
        return f"the tensors are on {tensor.device.type}, but the kernel requires CUDA"
    if tensor.dtype not in DTYPES:
        return f"the tensors are {tensor.dtype}, but the kernel supports float16, bfloat16 and float32"
    return None


def is_interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_preferred(tensor: Tensor) -> bool:
    """Return whether "auto" should use a kernel: on a GPU only, because the interpreter is for tests."""
    return tensor.is_cuda


@dataclass(frozen=True)
class SequenceRows:
    """Sequence i occupies rows first[i] : first[i] + length[i] of tensors whose batch and length axes are merged.

    The following rows, up to first[i] + max_length, are padding in a padded batch and other sequences in a packed one.
    Shape: first, length (batch,), int32.
    """

    first: Tensor
    length: Tensor
    max_length: int
    has_padding: bool = False

    def empty(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for an output; zeros if there is padding, which no kernel writes."""
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


def to_rows(tensor: Tensor, layout: SequenceLayout) -> Tensor:
    """Merge batch and length: (batch, length, …) -> (batch · length, …); packed tensors stay unchanged."""
    return tensor if layout.is_packed else tensor.flatten(0, 1)


def from_rows(rows: Tensor, layout: SequenceLayout) -> Tensor:
    """The inverse of `to_rows`."""
    return rows if layout.is_packed else rows.unflatten(0, (layout.batch, layout.max_length))


@dataclass(frozen=True)
class Tile:
    """Launch settings of a kernel: rows and columns of a program's tile, its warps and its pipeline stages."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


Tiles = Mapping[tuple[int, int], Tile]
"""Tuned tiles by (bytes per element, head width)."""


def tile(tuned: Tiles, default: Tile, dtype: torch.dtype, head_width: int) -> Tile:
    """Return the tuned tile of a dtype and head width, or the default."""
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

    `forward` takes tensors (or None) first, then numbers. Its first output is the result; the others are for the
    backward pass only. `backward` takes the gradient of the result, the outputs (without the result, unless
    `saves_result`) and all arguments of `forward`, and returns the gradients of the first tensors. The fake functions
    return empty tensors with the shapes and dtypes of the outputs, for compilers and exporters.
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
        # do not allocate zero gradients for the other outputs: some have an element per pair of tokens
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = ctx.tensors + len(ctx.numbers)
        if upstream is None:
            return (None,) * arguments
        tensors = ctx.saved_tensors[len(ctx.saved_tensors) - ctx.tensors :]
        gradients = gradient_op(upstream, *ctx.saved_tensors, *ctx.numbers)
        returned = [None if tensor is None else grad for tensor, grad in zip(tensors, gradients, strict=False)]
        return *returned, *(None,) * (arguments - len(returned))

    op.register_autograd(differentiate, setup_context=save)
    return op
