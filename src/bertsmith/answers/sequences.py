"""Features: the token sequences of examples, with the mapping from sequences back to examples; batches by length."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bertsmith.errors import InputError
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.word_cache import concatenated_ranges

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
    def of_flat(cls, tokens: np.ndarray, lengths: np.ndarray) -> "Ragged":
        """Return concatenated sequences of given lengths."""
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of every sequence, (sequences,)."""
        return np.diff(self.starts)

    def take(self, indices: np.ndarray) -> "Ragged":
        """Return some sequences, in the order of their indices."""
        starts, lengths = self.starts[indices], self.starts[indices + 1] - self.starts[indices]
        return Ragged.of_flat(self.tokens[concatenated_ranges(starts, lengths)], lengths)


def check_finite(outputs: Sequence[np.ndarray]) -> None:
    """Raise InputError if a model returned NaN or infinity; minus infinity excludes an answer and is allowed."""
    if not all(values.size == 0 or values.max() < np.inf for values in outputs):
        raise InputError("the model returned values that are not finite, so it has no answers; its weights are damaged")


def check_labels(count: int, labels: Sequence[str]) -> None:
    """Raise InputError unless the task of a model has a label for each of its outputs."""
    if count != len(labels):
        raise InputError(
            f"the model has {count} outputs, but task.labels in its task.json lists {len(labels)}; restore the file, "
            "or fine-tune the model again"
        )


def length_batches(lengths: np.ndarray, max_tokens: int, max_sequences: int | None = None) -> Iterator[np.ndarray]:
    """Yield the indices of sequences of similar length, longest first; each batch is one forward pass.

    A batch has at most `max_tokens` tokens, padding included, and at most `max_sequences` sequences, or one sequence.
    """
    order = np.argsort(-lengths, kind="stable")
    begin = 0
    while begin < len(order):
        # the first sequence of a batch is the longest and determines the length of padded rows
        count = max(1, max_tokens // max(1, int(lengths[order[begin]])))
        batch = order[begin : begin + min(count, max_sequences or count)]
        yield batch
        begin += len(batch)


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
    """Length of each sequence before truncation (`whole_lengths`), (sequences,); None if unknown."""

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

    def sequences(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[Ragged, Ragged | None]:
        """Return the tokens of texts, or pairs of texts, and their types if the model has any."""
        flat = self.tokenizer.encode_flat(texts, pairs, self.length, has_types=self.has_types)
        types = None if flat.types is None else Ragged.of_flat(flat.types, flat.lengths)
        return Ragged.of_flat(flat.ids, flat.lengths), types
