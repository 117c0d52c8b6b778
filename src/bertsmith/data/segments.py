"""ELECTRA's examples: sentences packed up to a length and usually split into two segments near the middle.

All documents of a window are processed together. Every draw belongs to a sentence (the length of the example that
starts with it, whether it has one segment, the segment of a sentence in the middle), so an example depends only on
the seed, the epoch and its document.
"""

import numpy as np
import torch

from bertsmith.data.random import bits, key, uniform
from bertsmith.data.sequences import Documents, Sequences, samples

SINGLE_SHARE = 0.1  # fraction of examples with one segment, as in classification of single texts
SHORT_SHARE = 0.05  # fraction of examples with a random target length
SHORTEST_TARGET = 5


def segments(corpus: Documents, documents: np.ndarray, length: int, seed: int, epoch: int) -> Sequences:
    """Return the examples of Clark et al. (2020) and their data code, without next-sentence labels.

    Sentences are collected until they have `length` tokens, or sometimes a random number of tokens, or the document
    ends. A sentence goes to the first segment if that is empty or stays below half of the target with it, even after
    others went to the second; the first one that exceeds the half is assigned at random. Excess tokens are cut.
    """
    return _cut(corpus, documents, length, seed, epoch, is_inverted=False)


def inverted_segments(corpus: Documents, documents: np.ndarray, length: int, seed: int, epoch: int) -> Sequences:
    """Return the examples of ConvBERT's data code (Jiang et al. 2020), which tests for non-empty segments instead.

    All sentences go to the first segment once it has one; before that, a sentence of at least half of the target goes
    to the second. Nearly all examples have one segment, and in some the first is empty.
    """
    return _cut(corpus, documents, length, seed, epoch, is_inverted=True)


def _cut(
    corpus: Documents, documents: np.ndarray, length: int, seed: int, epoch: int, *, is_inverted: bool
) -> Sequences:
    starts = [corpus.sentence_starts(document) for document in documents.tolist()]
    counts = np.array([len(each) - 1 for each in starts])
    last = np.cumsum(counts)  # end of each document's sentences
    first = last - counts
    home = np.repeat(np.arange(len(documents)), counts)  # document index of each sentence
    edges = np.concatenate(starts)
    is_begin = np.ones(len(edges), dtype=bool)
    is_begin[last + np.arange(len(documents))] = False
    begin, size = edges[is_begin], np.diff(edges, append=0)[is_begin]

    stream = bits(key(seed, epoch, 5), torch.from_numpy(documents))[torch.from_numpy(home)]
    position = torch.from_numpy(np.arange(len(home)) - first[home])
    is_short, is_single, coin = (uniform(stream, position * 4 + purpose).numpy() for purpose in range(3))
    shorter = SHORTEST_TARGET + bits(stream, position * 4 + 3).numpy() % (length - SHORTEST_TARGET + 1)
    target = np.where(is_short < SHORT_SHARE, shorter, length)
    half = np.where(is_single < SINGLE_SHARE, np.iinfo(np.int64).max // 2, (target - 3) // 2)

    total = np.concatenate([[0], np.cumsum(size)])
    following = np.minimum(np.searchsorted(total, total[:-1] + target), last[home])
    opening = _first_sentences(first[counts > 0], following, last[home])
    is_second = _assign_second(opening, following[opening], size, half, coin, is_inverted=is_inverted)
    example = np.repeat(np.arange(len(opening)), following[opening] - opening)

    # sentences in their final order, truncated to the available room
    order = np.argsort(example * 2 + is_second, kind="stable")
    example, segment = example[order], example[order] * 2 + is_second[order]
    kept = _truncated_sizes(size[order], segment, len(opening), length)
    order, example, segment, kept = (array[kept > 0] for array in (order, example, segment, kept))
    opens = _changes(segment) | (np.diff(order, prepend=-2) != 1)
    closes = np.append(opens[1:], True)[: len(opens)]
    offsets = np.append(np.flatnonzero(_changes(example[opens])), opens.sum())
    document = documents[home[order[opens]]]
    head = opening[example[opens][offsets[:-1]]]  # first sentence of each example
    return Sequences(
        document,
        begin[order[opens]],
        (begin[order] + kept)[closes],
        is_second[order[opens]],
        offsets,
        samples(corpus, documents[home[head]], head - first[home[head]], epoch),
    )


def _first_sentences(first: np.ndarray, following: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the first sentences of all examples, ascending, by following each document from its first sentence."""
    openings = [first[:0]]
    while len(first):
        openings.append(first)
        after = following[first]
        first = after[after < last[first]]
    return np.sort(np.concatenate(openings))


def _assign_second(
    opening: np.ndarray, ending: np.ndarray, size: np.ndarray, half: np.ndarray, coin: np.ndarray, *, is_inverted: bool
) -> np.ndarray:
    """Return True for sentences of the second segment; loops over the n-th sentence of all examples.

    Shape: opening, ending (examples,); size, half, coin and the result (sentences,).
    """
    is_second = np.zeros(len(size), dtype=bool)
    filled = np.zeros((2, len(opening)), dtype=np.int64)
    active = np.arange(len(opening))
    sentence = opening
    while len(active):
        limit = half[opening[active]]
        in_first, in_second = filled[:, active]
        to_first = ((in_first == 0) != is_inverted) | (in_first + size[sentence] < limit)
        to_first |= ((in_second == 0) != is_inverted) & (in_first < limit) & (coin[sentence] < 0.5)
        is_second[sentence] = ~to_first
        filled[(~to_first).astype(np.int64), active] += size[sentence]
        has_more = sentence + 1 < ending[active]
        active, sentence = active[has_more], sentence[has_more] + 1
    return is_second


def _truncated_sizes(size: np.ndarray, segment: np.ndarray, examples: int, length: int) -> np.ndarray:
    """Return the number of tokens of each sentence that fit; the first segment has priority.

    Shape: all (sentences,), in their final order; segment is 2 · example, plus 1 for the second segment.
    """
    whole = np.bincount(segment, weights=size, minlength=2 * examples).astype(np.int64)
    first = np.minimum(whole[::2], length - 2)
    room = np.stack([first, np.maximum(length - 3 - first, 0)], axis=1).reshape(-1)  # (examples, 2) -> (segments,)
    before = np.cumsum(size) - size
    before -= np.maximum.accumulate(np.where(_changes(segment), before, 0))
    return np.clip(room[segment] - before, 0, size)


def _changes(numbers: np.ndarray) -> np.ndarray:
    """Return True where a non-negative number differs from its predecessor."""
    return np.diff(numbers, prepend=-1) != 0
