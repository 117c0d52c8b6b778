"""Cut documents into sequences, represented as arrays of token ranges; only lengths are read here.

The result depends only on the seed, the epoch and the given documents.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Protocol

import numpy as np

from bertsmith.data.random import generator, key

SHORTEST = 8  # minimum tokens of text; shorter pieces are dropped, and another epoch cuts elsewhere


class Documents(Protocol):
    """The interface of a corpus that sequences are cut from, such as a TokenCorpus."""

    @property
    def lengths(self) -> np.ndarray: ...

    def sentence_starts(self, document: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Sequences:
    """Sequences of one or two segments, each concatenated from runs of documents.

    A run is the token range start:stop of a document. The runs of sequence i are offsets[i]:offsets[i + 1], at least
    one, with the runs of the second segment last.

    Shape: document, start, stop, is_second, breaks (runs,); offsets (sequences + 1,); sample, is_next (sequences,).
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    is_second: np.ndarray
    offsets: np.ndarray
    sample: np.ndarray
    is_next: np.ndarray | None = None
    breaks: np.ndarray | None = None
    """True for a run with a [SEP] before it, because it begins another document; None if there are no such runs."""

    def __len__(self) -> int:
        return len(self.sample)

    @cached_property
    def owner(self) -> np.ndarray:
        """Index of each run's sequence, (runs,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def run_lengths(self) -> np.ndarray:
        """The tokens of each run, a [SEP] before it included, (runs,)."""
        sizes = self.stop - self.start
        return sizes if self.breaks is None else sizes + self.breaks

    @cached_property
    def segment_lengths(self) -> np.ndarray:
        """Tokens of each segment, [SEP]s before runs included, (sequences, 2); 0 for a missing one."""
        segment = self.owner * 2 + self.is_second
        sizes = np.bincount(segment, weights=self.run_lengths, minlength=2 * len(self))
        return sizes.astype(np.int64).reshape(-1, 2)

    @property
    def lengths(self) -> np.ndarray:
        """Length of each sequence, [CLS] a [SEP] or [CLS] a [SEP] b [SEP]; (sequences,)."""
        return self.segment_lengths.sum(1) + 2 + (self.segment_lengths[:, 1] > 0)

    def take(self, index: np.ndarray) -> "Sequences":
        """Return the sequences at these indices, in this order."""
        counts = np.diff(self.offsets)[index]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        runs = np.repeat(self.offsets[index] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Sequences(
            self.document[runs],
            self.start[runs],
            self.stop[runs],
            self.is_second[runs],
            offsets,
            self.sample[index],
            None if self.is_next is None else self.is_next[index],
            None if self.breaks is None else self.breaks[runs],
        )


def chunks(corpus: Documents, documents: np.ndarray, length: int, seed: int, epoch: int) -> Sequences:
    """Cut every document into chunks of `length` tokens, including [CLS] and [SEP], at another offset each epoch."""
    body = length - 2
    sizes = corpus.lengths[documents]
    shift = generator(seed, epoch, int(documents[0]), 1).integers(0, body, size=len(documents))
    # a document that fits stays whole; avoid a first run that would be too short to keep
    shift = np.where((sizes <= body) | (shift < SHORTEST), 0, shift)
    counts = -(-np.maximum(sizes - shift, 0) // body) + (shift > 0)
    owner = np.repeat(np.arange(len(documents)), counts)
    position = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    stop = np.where(shift[owner] > 0, shift[owner] + position * body, (position + 1) * body)
    start = np.maximum(stop - body, 0)
    stop = np.minimum(stop, sizes[owner])
    is_kept = (stop - start >= SHORTEST) | ((counts[owner] == 1) & (stop > start))
    owner, position, start, stop = owner[is_kept], position[is_kept], start[is_kept], stop[is_kept]
    document = documents[owner]
    is_second, offsets = np.zeros(len(document), dtype=bool), np.arange(len(document) + 1)
    return Sequences(document, start, stop, is_second, offsets, samples(corpus, document, position, epoch))


def sentence_pairs(
    corpus: Documents, documents: np.ndarray, length: int, seed: int, epoch: int, *, short_share: float = 0.1
) -> Sequences:
    """Return BERT's pairs for next-sentence prediction (Devlin et al. 2019 and its data code).

    A run of sentences of about `length` tokens is split in two; half of the time the second part is replaced by one
    from another document, and the replaced sentences are used again. With probability `short_share` a document is cut
    into shorter runs.
    """
    rows: list[tuple[int, ...]] = []
    for document in documents.tolist():
        rows += _document_pairs(corpus, document, length - 3, Random(key(seed, epoch, document, 2)), short_share)
    table = np.array(rows, dtype=np.int64).reshape(-1, 8)
    position, is_next, document = table.T[:3]
    runs = table[:, 2:].reshape(-1, 3)  # (pairs, 2 of document, start and stop) -> (2 pairs, 3)
    is_second, offsets = np.arange(len(runs)) % 2 == 1, np.arange(0, len(runs) + 1, 2)
    sample = samples(corpus, document, position, epoch)
    return Sequences(runs[:, 0], runs[:, 1], runs[:, 2], is_second, offsets, sample, is_next)


def _document_pairs(
    corpus: Documents, document: int, room: int, draw: Random, short_share: float
) -> list[tuple[int, ...]]:
    """Return rows (index, is_next, document, start, stop, and the last three for the second segment)."""
    starts = corpus.sentence_starts(document).tolist()
    sentences, total = len(starts) - 1, len(corpus.lengths)
    target = room if draw.random() >= short_share else draw.randint(2, room)
    rows: list[tuple[int, ...]] = []
    sentence = 0
    while sentence < sentences:
        # sentences until the target is reached, at least one
        end = bisect_left(starts, starts[sentence] + target, sentence)
        end = min(max(end, sentence + 1), sentences)
        cut = sentence + 1 if end - sentence < 2 else draw.randrange(sentence + 1, end)
        first = (starts[sentence], starts[cut])
        is_random = total > 1 and (end - sentence == 1 or draw.random() < 0.5)
        if is_random:
            other = draw.randrange(total - 1)
            other += other >= document
            second = _random_run(corpus, other, target - (first[1] - first[0]), draw)
            following = cut  # use the replaced sentences again
        else:
            other, second, following = document, (starts[cut], starts[end]), end
        if first[1] > first[0] and second[1] > second[0]:
            first, second = _truncate(first, second, room, draw)
            rows.append((len(rows), int(not is_random), document, *first, other, *second))
        sentence = following
    return rows


def _random_run(corpus: Documents, document: int, target: int, draw: Random) -> tuple[int, int]:
    """Return the token range of consecutive sentences from a random one on, about `target` tokens."""
    starts = corpus.sentence_starts(document)
    begin = draw.randrange(max(1, len(starts) - 1))
    end = int(np.searchsorted(starts, starts[begin] + max(1, target), side="left"))
    return int(starts[begin]), int(starts[min(max(end, begin + 1), len(starts) - 1)])


def _truncate(
    first: tuple[int, int], second: tuple[int, int], room: int, draw: Random
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Remove tokens from the longer segment, each from a random end, until both fit."""
    sizes = [first[1] - first[0], second[1] - second[0]]
    surplus = sum(sizes) - room
    if surplus <= 0:
        return first, second
    # removing tokens from the longer one is the same as making them equal first and then alternating
    difference = sizes[0] - sizes[1]
    levelled = min(surplus, abs(difference))
    lost = [levelled, 0] if difference > 0 else [0, levelled]
    lost[0] += (surplus - levelled) // 2
    lost[1] += (surplus - levelled + 1) // 2
    result = []
    for (start, stop), loss in zip((first, second), lost, strict=True):
        front = draw.getrandbits(loss).bit_count() if loss else 0  # one coin flip per token
        result.append((start + front, stop - (loss - front)))
    return result[0], result[1]


def samples(corpus: Documents, document: np.ndarray, position: np.ndarray, epoch: int) -> np.ndarray:
    """Return a unique id for each sequence across all epochs."""
    return ((epoch * len(corpus.lengths) + document) << 24) + position
