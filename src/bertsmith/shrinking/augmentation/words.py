"""The words of a text that may be replaced, and the settings of augmentation."""

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
    """A text and the character spans of its replaceable words."""

    text: str
    places: tuple[Place, ...]

    @classmethod
    def of(cls, value: str | Sequence[str], stop_words: Collection[str]) -> "Passage":
        """Return the passage of a text, or of a sentence given as a list of words."""
        if isinstance(value, str):
            text, places = value, split_words(value)
        else:
            text, places, begin = " ".join(value), [], 0
            for item in value:
                places.append((begin, begin + len(item)))
                begin += len(item) + 1
        return cls(text, tuple(place for place in places if _is_free(text[slice(*place)], stop_words)))

    def replaced(self, words: Sequence[str | None]) -> str:
        """Return the text with new words, one or None for every span; everything else stays the same."""
        parts, end = [], 0
        for (begin, after), word in zip(self.places, words, strict=True):
            if word is not None:
                parts += [self.text[end:begin], word]
                end = after
        return "".join([*parts, self.text[end:]])


def is_word(text: str) -> bool:
    """Whether the text has only letters of a script with spaces between words (not Chinese, Japanese, Korean)."""
    return bool(text) and all(
        unicodedata.category(character)[0] in "LM" and unicodedata.east_asian_width(character) not in "WF"
        for character in text
    )


def _is_free(word: str, stop_words: Collection[str]) -> bool:
    return is_word(word) and word.lower() not in stop_words


def written_like(word: str, example: str) -> str:
    """Return a word capitalised like an example.

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
    """Augmented rows for distillation; none unless a model is given."""

    model: str | None = None
    """A bundled model or the folder of a masked language model that replaces words; None for no new rows."""
    copies: int | None = Field(default=None, gt=0)
    """Copies of every text of a training row, before duplicates are removed; None for 30 (up to 20,000 rows), 20 (up to
    200,000 rows) or 10."""
    share: float = Field(default=0.4, gt=0, le=1)
    """The probability that a word is replaced."""
    candidates: int = Field(default=15, gt=0)
    """Number of the likeliest replacements of a word; one of them is drawn uniformly."""
    stop_words: Literal["english", "none"] = "english"
    """Words that are never replaced: common English function words, or none."""
    long_words: Literal["replace", "keep"] = "replace"
    """Whether words of several tokens are replaced, with one mask for the whole word, or kept."""
    seed: int = Field(default=0, ge=0)
    """Seed of the replacements; separate from run.seed, so that runs of several seeds share the rows."""

    def copies_of(self, rows: int) -> int:
        """Return the number of copies of every text for so many training rows."""
        return self.copies or next((copies for most, copies in _COPIES if rows <= most), _FEWEST)
