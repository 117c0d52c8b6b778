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
_TRIES = 3  # draws per pair before a document counts as too short
_HEADING = 10  # a line of one sentence with fewer words is a heading or a list item
_LETTERS = 0.7  # minimum share of letters among the non-space characters of a sentence
_CROPPED = (0.5, 0.9)  # minimum and maximum share of the words in a crop of a sentence
_ALTERED = 0.1  # probability that a word is dropped, and that it is repeated
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
        """Each line is a paragraph; if every line is one sentence, the document is one paragraph."""
        lines = [sentences for line in document.splitlines() if (sentences := split_sentences(line))]
        if all(len(sentences) == 1 for sentences in lines):
            # short lines count as sentences if they end like one
            lines = [[line[0] for line in lines if not _is_short(line[0]) or _STOP.search(line[0])]]
        else:
            lines = [sentences for sentences in lines if len(sentences) > 1 or not _is_short(sentences[0])]
        kept = (tuple(text for text in sentences if _is_prose(text, lengths)) for sentences in lines)
        return cls(tuple(sentences for sentences in kept if sentences), lengths, title)

    @cached_property
    def sentences(self) -> list[str]:
        return [sentence for paragraph in self.paragraphs for sentence in paragraph]

    @cached_property
    def next_to(self) -> list[Pair]:
        """All pairs of adjacent sentences of a paragraph."""
        return [pair for paragraph in self.paragraphs for pair in pairwise(paragraph)]

    @cached_property
    def long_paragraphs(self) -> list[tuple[str, ...]]:
        """Paragraphs with sentences that are not adjacent."""
        return [paragraph for paragraph in self.paragraphs if len(paragraph) > 2]

    @cached_property
    def words(self) -> list[list[str]]:
        """Words of the paragraphs that are longer than a span."""
        found = (" ".join(paragraph).split() for paragraph in self.paragraphs)
        return [words for words in found if len(words) >= 3 * self.lengths.min_words]


def _is_short(line: str) -> bool:
    return line.count(" ") + 1 < _HEADING


def _is_prose(sentence: str, lengths: Lengths) -> bool:
    """Whether a sentence has an allowed length and is not a formula or a table row."""
    if not lengths.allow(sentence):
        return False
    signs = len(sentence) - sentence.count(" ")
    return sum(map(str.isalpha, sentence)) >= _LETTERS * signs


def _title(passages: Passages, draw: Random) -> Pair | None:
    """The title and a sentence of the first paragraph."""
    if not passages.title or not passages.paragraphs:
        return None
    return passages.title, draw.choice(passages.paragraphs[0])


def _neighbours(passages: Passages, draw: Random) -> Pair | None:
    """A sentence and the next one."""
    return draw.choice(passages.next_to) if passages.next_to else None


def _together(passages: Passages, draw: Random) -> Pair | None:
    """Two sentences of one paragraph that are not next to each other."""
    if not passages.long_paragraphs:
        return None
    paragraph = draw.choice(passages.long_paragraphs)
    first = draw.randrange(len(paragraph) - 2)
    return paragraph[first], paragraph[draw.randrange(first + 2, len(paragraph))]


def _spans(passages: Passages, draw: Random) -> Pair | None:
    """Two runs of words of one paragraph that overlap, adjoin or hold each other (DeCLUTR; Giorgi et al. 2021)."""
    if not passages.words:
        return None
    words, lengths = draw.choice(passages.words), passages.lengths
    most = min(lengths.max_words, len(words) - lengths.min_words)
    anchor, positive = (draw.randint(lengths.min_words, most) for _ in range(2))
    begin = draw.randint(0, len(words) - anchor)
    other = draw.randint(max(0, begin - positive), min(len(words) - positive, begin + anchor))
    return " ".join(words[begin : begin + anchor]), " ".join(words[other : other + positive])


def _crop(passages: Passages, draw: Random) -> Pair | None:
    """A sentence and a run of its words (Contriever; Izacard et al. 2022, section 3.1)."""
    sentence = _sentence(passages, draw)
    words = sentence.split() if sentence else []
    kept = max(passages.lengths.min_words, round(draw.uniform(*_CROPPED) * len(words)))
    if sentence is None or kept >= len(words):
        return None
    begin = draw.randint(0, len(words) - kept)
    return sentence, " ".join(words[begin : begin + kept])


def _altered(passages: Passages, draw: Random) -> Pair | None:
    """A sentence and itself with some words dropped and some repeated (ConSERT, ESimCSE)."""
    sentence = _sentence(passages, draw)
    if sentence is None:
        return None
    chances = [(word, draw.random()) for word in sentence.split()]
    changed = (word if chance > 2 * _ALTERED else f"{word} {word}" for word, chance in chances if chance > _ALTERED)
    return sentence, " ".join(changed)


def _same(passages: Passages, draw: Random) -> Pair | None:
    """A sentence twice: only dropout tells the two apart (SimCSE; Gao et al. 2021)."""
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


def kinds_of(asked: list[str]) -> dict[str, int]:
    """Parse numbers of pairs by kind, such as "neighbours=4"; a bare name means the default number.

    >>> kinds_of(["title", "neighbours=4"])
    {'title': 1, 'neighbours': 4}
    """
    found: dict[str, int] = {}
    for word in asked:
        name, sign, number = word.partition("=")
        if name not in KINDS:
            raise InputError(f"--kinds names {name!r}; {nearest(name, KINDS)}")
        if sign and not (number.isdecimal() and int(number) > 0):
            raise InputError(f"--kinds is {word!r}; allowed after =: how many of a document, 1 or more")
        found[name] = int(number) if sign else DEFAULT_KINDS[name]
    return found


def pairs_of(passages: Passages, kinds: Mapping[str, int], draw: Random) -> Iterator[tuple[str, Pair]]:
    """Distinct pairs of a document with their kinds: as many as requested, or as its length allows."""
    for kind, wanted in kinds.items():
        seen: set[Pair] = set()
        for _ in range(wanted * _TRIES):
            pair = KINDS[kind](passages, draw)
            if pair is None or len(seen) == wanted:
                break
            if pair not in seen and (kind == "same" or pair[0] != pair[1]):
                seen.add(pair)
                yield kind, pair
