"""Features: the token sequences of examples, with the mapping from sequences back to examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bertsmith.text.tokenizer import Tokenizer

IGNORED = -100  # target of a position that is not predicted

Answer: TypeAlias = Mapping[str, Any]
"""A JSON-ready answer; "answer" is its short form. Each task has its own TypedDict, such as `ClassAnswer`."""


@dataclass(frozen=True)
class Ragged:
    """Concatenated token sequences; sequence i is tokens[starts[i]:starts[i + 1]].

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
    def concatenate(cls, arrays: Sequence["Ragged"]) -> "Ragged":
        """Concatenate the sequences of several ragged arrays."""
        tokens = np.concatenate([np.empty(0, dtype=np.int32), *(array.tokens for array in arrays)])
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *(array.lengths for array in arrays)])
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of every sequence, (sequences,)."""
        return np.diff(self.starts)


@dataclass(frozen=True)
class Features:
    """Sequences of examples as token ids, special tokens included, and their targets."""

    tokens: Ragged
    types: Ragged | None
    items: np.ndarray
    """The sequences of item i are items[i]:items[i + 1]; (items + 1,)."""
    example: np.ndarray
    """Index of the example of each item, (items,)."""
    targets: Mapping[str, "np.ndarray | Ragged"]
    """Targets by name: (items, …) per item, or a Ragged with the lengths of `tokens` per token, IGNORED at tokens
    without a target."""
    cut: int = 0
    """Number of sequences that were truncated."""
    whole_lengths: np.ndarray | None = None
    """Length of each sequence before truncation, (sequences,); None if unknown."""

    def __len__(self) -> int:
        return len(self.example)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of every item, summed over its sequences, (items,)."""
        return np.diff(self.tokens.starts[self.items])


@dataclass(frozen=True)
class TextEncoding:
    """Tokenizer, maximum length and segment types of one model."""

    tokenizer: Tokenizer
    length: int
    has_types: bool
    """Whether the model has segment (token type) embeddings."""
