"""Sequences of different lengths, one after the other, and how they are laid out as a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout


@dataclass(frozen=True)
class Ragged:
    """Token sequences one after the other; sequence i lies at starts[i]:starts[i + 1].

    Shape: tokens (tokens,), int32; starts (sequences + 1,), int64.
    """

    tokens: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int] | np.ndarray]) -> "Ragged":
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        empty = np.empty(0, dtype=np.int32)
        tokens = np.concatenate([empty, *(np.asarray(sequence, dtype=np.int32) for sequence in sequences)])
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of every sequence, (sequences,)."""
        return np.diff(self.starts)


def packed(sequences: Sequence[np.ndarray], filling: int) -> tuple[Tensor, SequenceLayout]:
    """The sequences one after the other, (tokens,), and their layout."""
    lengths = [len(sequence) for sequence in sequences]
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return torch.from_numpy(np.concatenate(sequences).astype(np.int64)), SequenceLayout.packed(starts, max(lengths))


def padded(sequences: Sequence[np.ndarray], filling: int) -> tuple[Tensor, SequenceLayout]:
    """The sequences as rows filled up to the longest, (batch, length), and their layout."""
    lengths = np.array([len(sequence) for sequence in sequences])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    rows = np.full(is_token.shape, filling, dtype=np.int64)
    rows[is_token] = np.concatenate(sequences)
    return torch.from_numpy(rows), SequenceLayout.padded(torch.from_numpy(is_token))
