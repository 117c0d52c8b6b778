"""Batches that the loader passes to objectives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from bertsmith.answers.sequences import Ragged
from bertsmith.data.layout import SequenceLayout


class TrainingBatch(Protocol):
    """The interface of batches that the trainer depends on."""

    @property
    def real_tokens(self) -> int: ...
    def to(self, device: torch.device | str) -> Self: ...
    def pin_memory(self) -> Self: ...


@dataclass(frozen=True)
class TokenBatch:
    """Uncorrupted sequences of a corpus, with special tokens.

    Shape: tokens and types (batch, length) or (tokens,); sample and is_next (batch,).
    """

    tokens: Tensor
    layout: SequenceLayout
    sample: Tensor
    """Id of each sequence for its random draws, independent of batching."""
    real_tokens: int
    """Number of tokens, including special tokens, without padding."""
    types: Tensor | None = None
    is_next: Tensor | None = None
    """For sentence pairs: 1 where the second segment follows the first, 0 where not, -100 for padding."""
    end: Tensor | None = None
    """The number of real tokens as a tensor, (), if the code that reads it is recorded and replayed."""

    @property
    def is_real(self) -> Tensor:
        """True where tokens are not padding, in the shape of the tokens."""
        if self.layout.is_token is not None:
            return self.layout.is_token
        # padding is at the end of a packed batch
        end = self.real_tokens if self.end is None else self.end
        return torch.arange(self.tokens.numel(), device=self.tokens.device).view_as(self.tokens) < end

    def recordable(self) -> "TokenBatch":
        """Return the batch with its number of real tokens as a tensor: a Python number would be recorded as a constant.

        `real_tokens` is 0 in it.
        """
        end = torch.full((), self.real_tokens, device=self.tokens.device)
        return replace(self, real_tokens=0, end=end)

    def to(self, device: torch.device | str) -> "TokenBatch":
        """Return the batch on another device."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            layout=self.layout.to(device),
            sample=self.sample.to(device, non_blocking=True),
            types=None if self.types is None else self.types.to(device, non_blocking=True),
            is_next=None if self.is_next is None else self.is_next.to(device, non_blocking=True),
        )

    def pin_memory(self) -> "TokenBatch":
        """Return the batch in pinned memory, for asynchronous copies to a GPU."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            layout=self.layout.pin_memory(),
            sample=self.sample.pin_memory(),
            types=None if self.types is None else self.types.pin_memory(),
            is_next=None if self.is_next is None else self.is_next.pin_memory(),
        )


def packed(sequences: Sequence[np.ndarray] | Ragged, padding: int) -> tuple[Tensor, SequenceLayout]:
    """Return the concatenated sequences, (tokens,), and their layout."""
    tokens, lengths = _flat(sequences)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return torch.from_numpy(tokens.astype(np.int64)), SequenceLayout.packed(starts, int(lengths.max()))


def padded(sequences: Sequence[np.ndarray] | Ragged, padding: int) -> tuple[Tensor, SequenceLayout]:
    """Return the sequences padded to the longest, (batch, length), and their layout."""
    tokens, lengths = _flat(sequences)
    is_token = np.arange(lengths.max()) < lengths[:, None]
    rows = np.full(is_token.shape, padding, dtype=np.int64)
    rows[is_token] = tokens
    return torch.from_numpy(rows), SequenceLayout.padded(torch.from_numpy(is_token))


def _flat(sequences: Sequence[np.ndarray] | Ragged) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated sequences and the length of each."""
    if isinstance(sequences, Ragged):
        return sequences.tokens, sequences.lengths
    return np.concatenate(sequences), np.array([len(sequence) for sequence in sequences])
