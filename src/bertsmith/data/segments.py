"""ELECTRA's examples: sentences packed up to a length and, most of the time, parted into two segments near the middle.

All documents of a window are worked on at once. Every draw belongs to a sentence (how long the example is that begins
with it, whether it has one segment, which side a sentence in the middle goes to), so an example depends only on the
seed, the epoch and its document.
"""

import numpy as np
import torch

from bertsmith.data.random import bits, key, uniform
from bertsmith.data.sequences import Documents, Sequences, samples

SINGLE_SHARE = 0.1  # examples of one segment, as in the classification of single texts
SHORT_SHARE = 0.05  # examples that end at a random length
SHORTEST_TARGET = 5


def segments(corpus: Documents, documents: np.ndarray, length: int, seed: int, epoch: int) -> Sequences:
    """The examples of Clark et al. (2020) and their data code, without next-sentence labels.

    Sentences are gathered until they have `length` tokens, or now and then a random number of them, or the document
    ends. A sentence goes to the first segment if that is empty or stays below half of the target with it, even after
    others went to the second; the first one that would not stay below tosses a coin. What exceeds `length` is cut off.
    """
    return _cut(corpus, documents, length, seed, epoch, is_inverted=False)


def inverted_segments(corpus: Documents, documents: np.ndarray, length: int, seed: int, epoch: int) -> Sequences:
    """The examples of ConvBERT's data code (Jiang et al. 2020), which asks whether segments are filled, not empty.

    So all goes to the first segment once that has a sentence, but one of half of the target or more that comes before
    goes to the second: nearly all examples have one segment, and in some the first is empty.
    """
    return _cut(corpus, documents, length, seed, epoch, is_inverted=True)


def _cut(
    corpus: Documents, documents: np.ndarray, length: int, seed: int, epoch: int, *, is_inverted: bool
) -> Sequences:
    starts = [corpus.sentence_starts(document) for document in documents.tolist()]
    counts = np.array([len(each) - 1 for each in starts])
    last = np.cumsum(counts)  # behind the last sentence of each document
    first = last - counts
    home = np.repeat(np.arange(len(documents)), counts)  # of each sentence
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
    opening = _openings(first[counts > 0], following, last[home])
    is_second = _second(opening, following[opening], size, half, coin, is_inverted=is_inverted)
    example = np.repeat(np.arange(len(opening)), following[opening] - opening)

    # in the order they will stand in; then each as far as there is room
    order = np.argsort(example * 2 + is_second, kind="stable")
    example, segment = example[order], example[order] * 2 + is_second[order]
    kept = _within(size[order], segment, len(opening), length)
    order, example, segment, kept = (array[kept > 0] for array in (order, example, segment, kept))
    opens = _changes(segment) | (np.diff(order, prepend=-2) != 1)
    closes = np.append(opens[1:], True)[: len(opens)]
    offsets = np.append(np.flatnonzero(_changes(example[opens])), opens.sum())
    document = documents[home[order[opens]]]
    head = opening[example[opens][offsets[:-1]]]  # the sentence each example begins with
    return Sequences(
        document,
        begin[order[opens]],
        (begin[order] + kept)[closes],
        is_second[order[opens]],
        offsets,
        samples(corpus, documents[home[head]], head - first[home[head]], epoch),
    )


def _openings(first: np.ndarray, following: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The sentences that begin an example, rising: the first of each document, and from one to the next."""
    found = [first[:0]]
    while len(first):
        found.append(first)
        after = following[first]
        first = after[after < last[first]]
    return np.sort(np.concatenate(found))


def _second(
    opening: np.ndarray, ending: np.ndarray, size: np.ndarray, half: np.ndarray, coin: np.ndarray, *, is_inverted: bool
) -> np.ndarray:
    """True for the sentences that go to the second segment; worked out for the n-th sentence of all examples at once.

    Shape: opening, ending (examples,); size, half, coin and what comes back (sentences,).
    """
    is_second = np.zeros(len(size), dtype=bool)
    filled = np.zeros((2, len(opening)), dtype=np.int64)
    going = np.arange(len(opening))
    sentence = opening
    while len(going):
        limit = half[opening[going]]
        in_first, in_second = filled[:, going]
        to_first = ((in_first == 0) != is_inverted) | (in_first + size[sentence] < limit)
        to_first |= ((in_second == 0) != is_inverted) & (in_first < limit) & (coin[sentence] < 0.5)
        is_second[sentence] = ~to_first
        filled[(~to_first).astype(np.int64), going] += size[sentence]
        has_more = sentence + 1 < ending[going]
        going, sentence = going[has_more], sentence[has_more] + 1
    return is_second


def _within(size: np.ndarray, segment: np.ndarray, examples: int, length: int) -> np.ndarray:
    """How many tokens of each sentence there is room for: the first segment goes first.

    Shape: all (sentences,), in the order they stand in; segment is 2 · example, or one more for the second one.
    """
    whole = np.bincount(segment, weights=size, minlength=2 * examples).astype(np.int64)
    first = np.minimum(whole[::2], length - 2)
    room = np.stack([first, np.maximum(length - 3 - first, 0)], axis=1).reshape(-1)  # (examples, 2) -> (segments,)
    before = np.cumsum(size) - size
    before -= np.maximum.accumulate(np.where(_changes(segment), before, 0))
    return np.clip(room[segment] - before, 0, size)


def _changes(numbers: np.ndarray) -> np.ndarray:
    """True where a number, none of them negative, is not the one before."""
    return np.diff(numbers, prepend=-1) != 0
