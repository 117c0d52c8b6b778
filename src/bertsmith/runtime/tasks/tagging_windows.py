"""The sequences that sentences are tagged in: each word is asked for in exactly one of them.

A sentence that fits is one sequence. A longer one is split, and every part has some of its neighbours beside it. With
the context of the document all room that is left is filled with the sentences before and after.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from bertsmith.runtime.sequences import IGNORED, Features, Ragged, TextEncoding
from bertsmith.runtime.word_pieces import word_pieces

_SPECIAL = 2  # the tokens at both ends of a sequence
_PART = 0.75  # of a sequence, that a part of a split sentence fills at most, so that it has words around it


@dataclass(frozen=True)
class Stretch:
    """The tokens of sentences one after the other, and the word that each belongs to, counted through all of them."""

    tokens: np.ndarray
    owners: np.ndarray
    first: np.ndarray
    """Where each word begins, and at the end the number of tokens: (words + 1,)."""
    cut: int
    """Words that lost tokens because they were longer than a sequence."""

    @classmethod
    def of(cls, sentences: Sequence[tuple[np.ndarray, np.ndarray]], words: Sequence[int], most: int) -> "Stretch":
        """The stretch of sentences with so many words; a word has at most so many tokens."""
        begins = np.concatenate([[0], np.cumsum(words)])
        tokens = np.concatenate([ids for ids, _ in sentences])
        owners = np.concatenate([own + begin for (_, own), begin in zip(sentences, begins, strict=False)])
        first = np.searchsorted(owners, np.arange(begins[-1] + 1))
        rank = np.arange(len(owners)) - first[owners]  # of a token in its word
        if not len(owners) or rank.max() < most:
            return cls(tokens, owners, first, 0)
        kept = rank < most
        cut = int((np.diff(first) > most).sum())
        return cls(tokens[kept], owners[kept], np.searchsorted(owners[kept], np.arange(begins[-1] + 1)), cut)

    def parts(self, begin: int, end: int, room: int) -> list[tuple[int, int]]:
        """The words from `begin` to before `end` in stretches that sequences with so much room can hold."""
        size = int(self.first[end] - self.first[begin])
        if size <= room:
            return [(begin, end)]
        most = max(1, int(room * _PART))
        goal = size / -(-size // most)  # parts of about one size
        found, part = [], begin
        for word in range(begin + 1, end + 1):
            # the word before this place no longer fits: the part ends in front of it
            if word - 1 > part and self.first[word] - self.first[part] > goal:
                found.append((part, word - 1))
                part = word - 1
        return [*found, (part, end)]

    def around(self, part: tuple[int, int], within: tuple[int, int], room: int) -> tuple[int, int]:
        """The words of a part and as many of both sides as there is room for, as many tokens left as right.

        `within` are the words that may be taken; a side that has too few leaves its room to the other.
        """
        begin, end = (int(self.first[word]) for word in part)
        low, high = (int(self.first[word]) for word in within)
        spare = max(0, room - (end - begin))
        after = min(high - end, max(spare - spare // 2, spare - (begin - low)))
        before = min(begin - low, spare - after)
        left = int(np.searchsorted(self.first, begin - before))
        right = int(np.searchsorted(self.first, end + after, side="right")) - 1
        return min(left, part[0]), max(right, part[1])


@dataclass
class _Made:
    """The sequences made so far."""

    tokens: list[np.ndarray] = field(default_factory=list)
    words: list[np.ndarray] = field(default_factory=list)
    example: list[int] = field(default_factory=list)
    cut: int = 0


def tag_features(
    sentences: Sequence[Sequence[str]],
    documents: Sequence[int],
    tags: Sequence[Sequence[int]] | None,
    encoding: TextEncoding,
    *,
    has_context: bool,
) -> Features:
    """Every sentence as one item or several, each one sequence.

    Targets are "word", the index of the word that is asked for at its first token, and "tags", its tag, where there are
    any; IGNORED elsewhere. Sentences side by side with one number in `documents` are of one document.
    """
    made, room = _Made(), encoding.length - _SPECIAL
    encoded = word_pieces(encoding.tokenizer, sentences)
    lengths = [len(sentence) for sentence in sentences]
    for begin, end in _runs(documents) if has_context else [(index, index + 1) for index in range(len(sentences))]:
        stretch = Stretch.of(encoded[begin:end], lengths[begin:end], room)
        made.cut += stretch.cut
        edges = np.concatenate([[0], np.cumsum(lengths[begin:end])]).tolist()
        for index, own in zip(range(begin, end), pairwise(edges), strict=True):
            _add(made, stretch, index, own, (0, edges[-1]), encoding)
    tokens, words = Ragged.of(made.tokens), Ragged.of(made.words)
    targets = {"word": words}
    if tags is not None:
        flat = words.tokens.copy()
        for index, item in enumerate(made.example):
            asked = flat[words.starts[index] : words.starts[index + 1]]
            is_asked = asked != IGNORED
            asked[is_asked] = np.asarray(tags[item], dtype=np.int32)[asked[is_asked]]
        targets["tags"] = Ragged(flat, words.starts)
    types = Ragged(np.zeros_like(tokens.tokens), tokens.starts) if encoding.has_types else None
    count = len(made.example)
    return Features(tokens, types, np.arange(count + 1), np.array(made.example, dtype=np.int64), targets, made.cut)


def _add(
    made: _Made, stretch: Stretch, index: int, own: tuple[int, int], within: tuple[int, int], encoding: TextEncoding
) -> None:
    """Adds the sequences of one sentence, whose words are those of `own`."""
    room = encoding.length - _SPECIAL
    for part in stretch.parts(*own, room):
        left, right = stretch.around(part, within, room)
        begin, end = stretch.first[left], stretch.first[right]
        words = np.full(end - begin + _SPECIAL, IGNORED, dtype=np.int32)
        words[stretch.first[part[0] : part[1]] - begin + 1] = np.arange(part[0], part[1]) - own[0]
        ends = [encoding.tokenizer.start], [encoding.tokenizer.separator]
        made.tokens.append(np.concatenate([ends[0], stretch.tokens[begin:end], ends[1]]).astype(np.int32))
        made.words.append(words)
        made.example.append(index)


def _runs(documents: Sequence[int]) -> list[tuple[int, int]]:
    """Where the documents begin and end."""
    numbers = np.asarray(documents)
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return list(pairwise(edges))
