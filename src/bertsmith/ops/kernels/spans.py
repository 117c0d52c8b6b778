"""Where every sequence lies, in the one form all kernels read: packed and padded batches look alike to them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout


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
