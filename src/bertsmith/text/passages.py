"""Pairs of related passages of one document, to train text embeddings without labels."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random

from bertsmith.errors import InputError, nearest
from bertsmith.text.sentences import split_sentences

Pair = tuple[str, str]

DEFAULT_KINDS = {"title": 1, "neighbours": 5, "together": 2, "spans": 3, "crop": 2, "altered": 3, "same": 4}
"""Pairs per document by kind: 20 in total."""
_MAX_DRAWS = 3  # draws per pair before a document counts as too short
_MIN_LINE_WORDS = 10  # a line of one sentence with fewer words is a heading or a list item
_MIN_LETTERS = 0.7  # minimum fraction of letters among the non-space characters of a sentence
_CROP_RANGE = (0.5, 0.9)  # minimum and maximum fraction of words in a crop of a sentence
_WORD_NOISE = 0.1  # probability that a word is dropped, and that it is repeated
_STOP = re.compile(r"""[.!?…。！？｡।][\"'”’»)\]}」』】》〉]*$""")


@dataclass(frozen=True)
class Lengths:
    """Allowed numbers of words of a sentence or a span."""

    min_words: int = 5
    max_words: int = 40

    def __post_init__(self) -> None:
        if not 2 <= self.min_words <= self.max_words:
            raise InputError(
                f"min_words is {self.min_words} and max_words is {self.max_words}; allowed: 2 <= min_words <= max_words"
            )

    def allow(self, text: str) -> bool:
        """Whether a text has an allowed number of words."""
        return self.min_words <= text.count(" ") + 1 <= self.max_words


@dataclass(frozen=True)
class Passages:
    """The usable sentences of a document by paragraph; headings are dropped."""

    paragraphs: tuple[tuple[str, ...], ...]
    lengths: Lengths
    title: str | None = None

    @classmethod
    def of(cls, document: str, lengths: Lengths, title: str | None = None) -> "Passages":
        """Split a document: each line is a paragraph, or all are one paragraph if every line is one sentence."""
        lines = [sentences for line in document.splitlines() if (sentences := split_sentences(line))]
        if all(len(sentences) == 1 for sentences in lines):
            # short lines count as sentences if they end like one
            lines = [[line[0] for line in lines if not _is_short(line[0]) or _STOP.search(line[0])]]
        else:
            lines = [sentences for sentences in lines if len(sentences) > 1 or not _is_short(sentences[0])]
        paragraphs = (tuple(text for text in sentences if _is_prose(text, lengths)) for sentences in lines)
        return cls(tuple(sentences for sentences in paragraphs if sentences), lengths, title)

    @cached_property
    def sentences(self) -> list[str]:
        return [sentence for paragraph in self.paragraphs for sentence in paragraph]

    @cached_property
    def adjacent(self) -> list[Pair]:
        """All pairs of adjacent sentences of a paragraph."""
        return [pair for paragraph in self.paragraphs for pair in pairwise(paragraph)]

    @cached_property
    def long_paragraphs(self) -> list[tuple[str, ...]]:
        """Paragraphs with sentences that are not adjacent."""
        return [paragraph for paragraph in self.paragraphs if len(paragraph) > 2]

    @cached_property
    def words(self) -> list[list[str]]:
        """Words of the paragraphs that are long enough for two spans."""
        paragraphs = (" ".join(paragraph).split() for paragraph in self.paragraphs)
        return [words for words in paragraphs if len(words) >= 3 * self.lengths.min_words]


def _is_short(line: str) -> bool:
    return line.count(" ") + 1 < _MIN_LINE_WORDS


def _is_prose(sentence: str, lengths: Lengths) -> bool:
    """Whether a sentence has an allowed length and is not a formula or a table row."""
    if not lengths.allow(sentence):
        return False
    characters = len(sentence) - sentence.count(" ")
    return sum(map(str.isalpha, sentence)) >= _MIN_LETTERS * characters


def _title(passages: Passages, draw: Random) -> Pair | None:
    """The title and a sentence of the first paragraph."""
    if not passages.title or not passages.paragraphs:
        return None
    return passages.title, draw.choice(passages.paragraphs[0])


def _neighbours(passages: Passages, draw: Random) -> Pair | None:
    """A sentence and the next one."""
    return draw.choice(passages.adjacent) if passages.adjacent else None


def _together(passages: Passages, draw: Random) -> Pair | None:
    """Two sentences of one paragraph that are not adjacent."""
    if not passages.long_paragraphs:
        return None
    paragraph = draw.choice(passages.long_paragraphs)
    first = draw.randrange(len(paragraph) - 2)
    return paragraph[first], paragraph[draw.randrange(first + 2, len(paragraph))]


def _spans(passages: Passages, draw: Random) -> Pair | None:
    """Two spans of words of one paragraph that overlap, adjoin or contain each other (DeCLUTR; Giorgi et al. 2021)."""
    if not passages.words:
        return None
    words, lengths = draw.choice(passages.words), passages.lengths
    limit = min(lengths.max_words, len(words) - lengths.min_words)
    anchor, positive = (draw.randint(lengths.min_words, limit) for _ in range(2))
    start = draw.randint(0, len(words) - anchor)
    positive_start = draw.randint(max(0, start - positive), min(len(words) - positive, start + anchor))
    return " ".join(words[start : start + anchor]), " ".join(words[positive_start : positive_start + positive])


def _crop(passages: Passages, draw: Random) -> Pair | None:
    """A sentence and a span of its words (Contriever; Izacard et al. 2022, section 3.1)."""
    sentence = _sentence(passages, draw)
    words = sentence.split() if sentence else []
    length = max(passages.lengths.min_words, round(draw.uniform(*_CROP_RANGE) * len(words)))
    if sentence is None or length >= len(words):
        return None
    start = draw.randint(0, len(words) - length)
    return sentence, " ".join(words[start : start + length])


def _altered(passages: Passages, draw: Random) -> Pair | None:
    """A sentence and a copy with some words dropped and some repeated (ConSERT, ESimCSE)."""
    sentence = _sentence(passages, draw)
    if sentence is None:
        return None
    draws = [(word, draw.random()) for word in sentence.split()]
    changed = (word if value > 2 * _WORD_NOISE else f"{word} {word}" for word, value in draws if value > _WORD_NOISE)
    return sentence, " ".join(changed)


def _same(passages: Passages, draw: Random) -> Pair | None:
    """A sentence twice; dropout makes the two vectors differ (SimCSE; Gao et al. 2021)."""
    sentence = _sentence(passages, draw)
    return None if sentence is None else (sentence, sentence)


def _sentence(passages: Passages, draw: Random) -> str | None:
    return draw.choice(passages.sentences) if passages.sentences else None


KINDS: dict[str, Callable[[Passages, Random], Pair | None]] = {
    "title": _title,
    "neighbours": _neighbours,
    "together": _together,
    "spans": _spans,
    "crop": _crop,
    "altered": _altered,
    "same": _same,
}


def parse_kinds(values: list[str]) -> dict[str, int]:
    """Parse numbers of pairs by kind, such as "neighbours=4"; a bare name means the default number.

    >>> parse_kinds(["title", "neighbours=4"])
    {'title': 1, 'neighbours': 4}
    """
    kinds: dict[str, int] = {}
    for value in values:
        name, equals, number = value.partition("=")
        if name not in KINDS:
            raise InputError(f"--kinds names {name!r}; {nearest(name, KINDS)}")
        if equals and not (number.isdecimal() and int(number) > 0):
            raise InputError(f"--kinds is {value!r}; allowed after =: the number of pairs per document, 1 or more")
        kinds[name] = int(number) if equals else DEFAULT_KINDS[name]
    return kinds


def pairs_of(passages: Passages, kinds: Mapping[str, int], draw: Random) -> Iterator[tuple[str, Pair]]:
    """Yield distinct pairs of a document with their kinds: as many as requested, or as its length allows."""
    for kind, count in kinds.items():
        seen: set[Pair] = set()
        for _ in range(count * _MAX_DRAWS):
            pair = KINDS[kind](passages, draw)
            if pair is None or len(seen) == count:
                break
            if pair not in seen and (kind == "same" or pair[0] != pair[1]):
                seen.add(pair)
                yield kind, pair
