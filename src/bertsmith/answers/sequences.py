"""The sequences that examples become: ragged arrays of token ids, and what leads from them back to the examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bertsmith.text.tokenizer import Tokenizer

IGNORED = -100  # the target of a position that is not to be predicted


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

    @classmethod
    def joined(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """The sequences of all parts, one after the other."""
        tokens = np.concatenate([np.empty(0, dtype=np.int32), *(part.tokens for part in parts)])
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *(part.lengths for part in parts)])
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of every sequence, (sequences,)."""
        return np.diff(self.starts)


@dataclass(frozen=True)
class Features:
    """The sequences of examples as token ids with their special tokens, and what is to be said of them."""

    tokens: Ragged
    types: Ragged | None
    items: np.ndarray
    """The sequences of item i are items[i]:items[i + 1]; (items + 1,)."""
    example: np.ndarray
    """Which example an item was made from, (items,)."""
    targets: Mapping[str, "np.ndarray | Ragged"]
    """By name: (items, …) for items; for tokens as many sequences as `tokens`, each as long, IGNORED where nothing is
    to be said."""
    cut: int = 0
    """Sequences that lost tokens because they were too long."""
    whole_lengths: np.ndarray | None = None
    """The tokens each sequence would have if none were cut, where they were counted; (sequences,)."""

    def __len__(self) -> int:
        return len(self.example)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of every item, all its sequences together, (items,)."""
        return np.diff(self.tokens.starts[self.items])


@dataclass(frozen=True)
class TextEncoding:
    """How texts become the sequences of one model."""

    tokenizer: Tokenizer
    length: int
    has_types: bool
    """Whether the model tells the segments of a sequence apart by types."""
