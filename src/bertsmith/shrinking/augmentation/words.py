"""The words of a text that may be replaced, and how another word is written in the place of one."""

import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from bertsmith.answers.tagging import split_words
from bertsmith.settings import Record

Place = tuple[int, int]

_ENGLISH = """
a an the this that these those some any each every either neither both all such no none not nor only own same other
another one
i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself we us our
ours ourselves they them their theirs themselves who whom whose which what whoever whatever
am is are was were be been being have has had having do does did doing done will would shall should can cannot could may
might must ought
and or but if because as while until unless although though than so yet whether
of at by for with without about against between among into onto through during before after above below to from up down
in out on off over under upon within along across behind beyond near since toward towards per via
again further then once here there when where why how too very just also more most much many few less least quite rather
even still ever never now
"""
ENGLISH = frozenset(_ENGLISH.split())


@dataclass(frozen=True)
class Passage:
    """A text and where in its characters the words stand that may be replaced."""

    text: str
    places: tuple[Place, ...]

    @classmethod
    def of(cls, value: str | Sequence[str], stop_words: Collection[str]) -> "Passage":
        """That of a running text, or of a sentence that is given as a list of its words."""
        if isinstance(value, str):
            text, places = value, split_words(value)
        else:
            text, places, begin = " ".join(value), [], 0
            for item in value:
                places.append((begin, begin + len(item)))
                begin += len(item) + 1
        return cls(text, tuple(place for place in places if _is_free(text[slice(*place)], stop_words)))

    def replaced(self, words: Sequence[str | None]) -> str:
        """The text with other words, one or None for every place; all else stays, character by character."""
        parts, end = [], 0
        for (begin, after), word in zip(self.places, words, strict=True):
            if word is not None:
                parts += [self.text[end:begin], word]
                end = after
        return "".join([*parts, self.text[end:]])


def is_word(text: str) -> bool:
    """Whether this is letters only, of a script that puts spaces between words (no Chinese, Japanese or Korean)."""
    return bool(text) and all(
        unicodedata.category(character)[0] in "LM" and unicodedata.east_asian_width(character) not in "WF"
        for character in text
    )


def _is_free(word: str, stop_words: Collection[str]) -> bool:
    return is_word(word) and word.lower() not in stop_words


def written_like(word: str, example: str) -> str:
    """A word in capitals, or with a capital at its beginning, where the example is.

    >>> written_like("oak", "Elm"), written_like("oak", "ELM"), written_like("Rome", "town"), written_like("oak", "I")
    ('Oak', 'OAK', 'Rome', 'Oak')
    """
    if len(example) > 1 and example.isupper():
        return word.upper()
    return word[0].upper() + word[1:] if example[0].isupper() else word


# the copies that TinyBERT makes: 30 of CoLA, MRPC, STS-B and RTE (at most 8,551 rows), 20 of SST-2 and QNLI (at most
# 104,743), 10 of QQP and MNLI (363,846 and more)
_COPIES = ((20_000, 30), (200_000, 20))
_FEWEST = 10


class AugmentationConfig(Record):
    """New rows for distillation, words of the training rows being replaced; none unless a model is given."""

    model: str | None = None
    """A bundled model or the folder of one that says what may stand in a word's place; None for no new rows."""
    copies: int | None = Field(default=None, gt=0)
    """New rows of every text of a training row, fewer where some come out alike; None for 30, 20 or 10, the fewer the
    more rows there are (up to 20,000, up to 200,000, beyond)."""
    share: float = Field(default=0.4, gt=0, le=1)
    """The probability that a word is replaced."""
    candidates: int = Field(default=15, gt=0)
    """Words that one is replaced by: the likeliest in its place, drawn from evenly."""
    stop_words: Literal["english", "none"] = "english"
    """Words that always stay: the commonest English ones, which bear little meaning, or none."""
    long_words: Literal["replace", "keep"] = "replace"
    """What becomes of words of several pieces: one mask stands for the whole word, or they stay."""
    seed: int = Field(default=0, ge=0)
    """What the words are drawn by; not that of the run, so that runs of several seeds learn from the same rows."""

    def copies_of(self, rows: int) -> int:
        """New rows of every text where so many rows are trained on."""
        return self.copies or next((copies for most, copies in _COPIES if rows <= most), _FEWEST)
