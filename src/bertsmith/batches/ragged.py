"""Sequences of different lengths, one after the other, and how they are laid out as a batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.runtime.sequences import Ragged

__all__ = ["Ragged", "packed", "padded"]


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
