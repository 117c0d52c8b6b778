"""Fixed shapes of packed batches, and the assignment of sequences to them.

A CUDA graph computes one shape. There are two classes of shapes: of short sequences, of which a shape holds many, and
of sequences of any length. Padding sequences fill a shape up, so that no token is outside of all sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

SHORT = 128
"""Maximum length in the class of short sequences: one tile of the attention kernels."""
_MIN_TOKENS = 64
_FINE_TOKENS = 1024  # from here on the time grows with the tokens, so that shapes are closer to each other
_MIN_SEQUENCES = 8
_SHORT_RATIO, _LONG_RATIO = 8, 64  # tokens of a shape per sequence that it has room for
_REPLAY_TOKENS = 1024  # every forward pass takes as much additional time as this many tokens


@dataclass(frozen=True)
class PackedShape:
    """Numbers of tokens and sequences of a packed batch, padding included, and the maximum length of a sequence."""

    tokens: int
    sequences: int
    max_length: int

    def holds(self, sequences: int, tokens: int) -> bool:
        """Whether this many sequences with this many tokens fit, and padding sequences can fill the rest."""
        return tokens <= self.tokens and tokens + (self.sequences - sequences) * self.max_length >= self.tokens

    def starts(self, lengths: Sequence[int]) -> np.ndarray:
        """Return the starts of sequences, of the padding sequences after them, and of empty ones, (sequences + 1,)."""
        ends = np.cumsum(lengths, dtype=np.int32)
        tokens = int(ends[-1]) if len(lengths) else 0
        assert self.holds(len(lengths), tokens), f"{len(lengths)} sequences of {tokens} tokens do not fit {self}"
        padding = tokens + self.max_length * np.arange(1, self.sequences - len(lengths) + 1, dtype=np.int32)
        return np.concatenate([np.zeros(1, np.int32), ends, np.minimum(padding, self.tokens)])


ShapeClasses = tuple[tuple[PackedShape, ...], ...]
"""Shapes by class, shorter sequences first, and by size, smaller first. The last class holds every sequence."""


def shape_classes(batch_tokens: int, max_length: int) -> ShapeClasses:
    """Return the shapes for batches of at most `batch_tokens` tokens and for sequences of at most `max_length`."""
    sizes = list(_sizes(max(batch_tokens, max_length)))
    short = tuple(_shape(tokens, min(SHORT, max_length), _SHORT_RATIO) for tokens in sizes)
    if max_length <= SHORT:
        return (short,)
    return short, tuple(_shape(tokens, max_length, _LONG_RATIO) for tokens in sizes if tokens > SHORT)


def assign(lengths: Sequence[int], classes: ShapeClasses) -> list[tuple[PackedShape, list[int]]]:
    """Return the forward passes that compute sequences of these lengths: shapes with the indices of their sequences.

    Short and long sequences are separated where this takes less time.
    """
    together = _passes(range(len(lengths)), lengths, classes[-1])
    if len(classes) == 1:
        return together
    is_short = np.asarray(lengths) <= classes[0][-1].max_length
    apart = [
        one
        for indices, shapes in zip((np.flatnonzero(is_short), np.flatnonzero(~is_short)), classes, strict=True)
        for one in _passes(indices.tolist(), lengths, shapes)
    ]
    return min(apart, together, key=lambda passes: sum(shape.tokens + _REPLAY_TOKENS for shape, _ in passes))


def _passes(
    indices: Sequence[int], lengths: Sequence[int], shapes: Sequence[PackedShape]
) -> list[tuple[PackedShape, list[int]]]:
    """Fill the largest shape as often as needed; the last forward pass has the smallest shape that holds the rest."""
    passes: list[list[int]] = []
    tokens = 0
    for index in indices:
        tokens += lengths[index]
        if not passes or not shapes[-1].holds(len(passes[-1]) + 1, tokens):
            passes.append([])
            tokens = lengths[index]
        passes[-1].append(index)
    return [(_smallest([lengths[index] for index in one], shapes), one) for one in passes]


def _smallest(lengths: Sequence[int], shapes: Sequence[PackedShape]) -> PackedShape:
    tokens = sum(lengths)
    return next(shape for shape in shapes if shape.holds(len(lengths), tokens) and max(lengths) <= shape.max_length)


def _sizes(largest: int) -> Iterator[int]:
    """Yield numbers of tokens: powers of two, also their multiples by 1.5 for large ones, and the largest."""
    size = _MIN_TOKENS
    while size < largest:
        yield size
        if size >= _FINE_TOKENS and size * 3 // 2 < largest:
            yield size * 3 // 2
        size *= 2
    yield -(-largest // _MIN_TOKENS) * _MIN_TOKENS


def _shape(tokens: int, max_length: int, ratio: int) -> PackedShape:
    length = min(tokens, max_length)
    return PackedShape(tokens, max(_MIN_SEQUENCES, tokens // ratio) + -(-tokens // length), length)
