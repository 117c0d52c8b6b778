"""How many new rows are made of every training row, and how far they lie from it."""

from typing import Literal

from pydantic import Field

from bertsmith.settings import Record

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
