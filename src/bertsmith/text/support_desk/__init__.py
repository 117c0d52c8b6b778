"""Support desk data set, written for this package: labelled customer requests and unlabelled texts."""

from collections.abc import Iterator
from importlib.resources import files
from typing import Literal

from bertsmith.errors import InputError

SPLITS = ("train", "dev")


def support_desk(split: Literal["train", "dev"]) -> list[dict[str, str]]:
    """Return the rows of one split: a customer's message as "text" and its topic as "label"."""
    if split not in SPLITS:
        raise InputError(f"split is {split!r}; allowed: {', '.join(SPLITS)}")
    names, *rows = (line.split("\t") for line in _lines(f"{split}.tsv"))
    return [dict(zip(names, row, strict=True)) for row in rows]


def messages() -> Iterator[str]:
    """Yield texts for pre-training: the messages of train without labels, then answers, help pages and follow-ups."""
    yield from (row["text"] for row in support_desk("train"))
    yield from _lines("desk.txt")


def _lines(name: str) -> list[str]:
    return files(__name__).joinpath(name).read_text(encoding="utf-8").splitlines()
