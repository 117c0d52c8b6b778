"""A support desk's messages, written for this package: what customers want, labelled, and more without labels."""

from collections.abc import Iterator
from importlib.resources import files
from typing import Literal

from bertsmith.errors import InputError

PARTS = ("train", "dev")


def support_desk(part: Literal["train", "dev"]) -> list[dict[str, str]]:
    """The rows of one part: a customer's message as "text" and what it is about as "label"."""
    if part not in PARTS:
        raise InputError(f"part is {part!r}; allowed: {', '.join(PARTS)}")
    names, *rows = (line.split("\t") for line in _lines(f"{part}.tsv"))
    return [dict(zip(names, row, strict=True)) for row in rows]


def messages() -> Iterator[str]:
    """Texts to pre-train on: the messages of train without their labels, then answers, help pages and follow-ups."""
    yield from (row["text"] for row in support_desk("train"))
    yield from _lines("desk.txt")


def _lines(name: str) -> list[str]:
    return files(__name__).joinpath(name).read_text(encoding="utf-8").splitlines()
