"""Whether Triton's kernels can run on given tensors.

Triton comes with PyTorch's builds for CUDA. Its interpreter runs the same kernels on a CPU, slowly, for tests: set
TRITON_INTERPRET=1 before anything imports Triton.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout

HAS_TRITON = importlib.util.find_spec("triton") is not None
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
class Spans:
    """Sequence i is rows first[i] : first[i] + length[i] of tensors whose batch and length axes are one.

    Up to first[i] + `longest` a padded batch has pads, which are rows of nobody; a packed one has other sequences.
    Shape: first, length (batch,), int32.
    """

    first: Tensor
    length: Tensor
    longest: int

    @classmethod
    def of(cls, layout: SequenceLayout, device: torch.device) -> "Spans":
        if layout.starts is not None:
            starts = layout.starts.to(torch.int32)
            return cls(starts[:-1], starts.diff(), layout.longest)
        first = torch.arange(layout.batch, dtype=torch.int32, device=device) * layout.longest
        if layout.is_token is None:
            return cls(first, torch.full_like(first, layout.longest), layout.longest)
        return cls(first, layout.is_token.sum(-1, dtype=torch.int32), layout.longest)


def by_row(tensor: Tensor, layout: SequenceLayout) -> Tensor:
    """One axis for all tokens: (batch, length, …) -> (batch · length, …); packed tensors lie so already."""
    return tensor if layout.is_packed else tensor.flatten(0, 1)


def as_laid(rows: Tensor, layout: SequenceLayout) -> Tensor:
    """The inverse of `by_row`."""
    return rows if layout.is_packed else rows.unflatten(0, (layout.batch, layout.longest))


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
