"""Sentences as words, and what scores of their tokens mean: a tag for every word, the chunks that tags mark."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertsmith.errors import InputError
from bertsmith.runtime.rows import Table
from bertsmith.runtime.sequences import IGNORED, Features, Ragged
from bertsmith.runtime.tasks.tagging_schemes import chunks
from bertsmith.runtime.tasks.tagging_words import split_words
from bertsmith.runtime.tasks.texts import softmax

_DOCUMENT_MARK = "-DOCSTART-"


@dataclass(frozen=True)
class TaggedWords:
    """The words of a sentence and the numbers of their tags."""

    words: tuple[str, ...]
    tags: tuple[int, ...] = ()
    """Empty where they are not known."""
    document: int = 0
    """The number of the document it stands in."""
    text: str | None = None
    """The running text, where it was given as such …"""
    places: tuple[tuple[int, int], ...] = ()
    """… and where each word begins and ends in it."""
    is_changed: bool = False
    """Whether its tags were IOB1 and were changed to IOB2."""


def asked_words(table: Table, index: int, column: str, document: int) -> TaggedWords:
    """The sentence of a row that has no tags: a list of words, or running text."""
    given = table.value(index, column)
    if not isinstance(given, str):
        return TaggedWords(read_words(table, index, column), (), document)
    places = tuple(split_words(given))
    return TaggedWords(tuple(given[begin:end] for begin, end in places), (), document, given, places)


def read_words(table: Table, index: int, column: str) -> tuple[str, ...]:
    """The words of a row, which must be a list."""
    given = table.value(index, column)
    if not isinstance(given, list | tuple):
        raise InputError(f"{table.place(index)}: {column!r} is {given!r:.60}; it must be a list of words")
    for place, word in enumerate(given):
        if not isinstance(word, str):
            raise InputError(f"{table.place(index)}: {column!r} has {word!r} as word {place + 1}; not a string")
    return tuple(given)


def document_numbers(table: Table, words: str, document: str) -> list[int]:
    """The number of each row's document: rows side by side with one name; without names all, up to a mark."""
    numbers: list[int] = []
    for index, row in enumerate(table):
        is_new = index > 0 and (
            row.get(document, "") != table.rows[index - 1].get(document, "")
            or (document in row and row[document] is None)
        )
        given = row.get(words)
        is_new |= bool(index and isinstance(given, list | tuple) and given and given[0] == _DOCUMENT_MARK)
        numbers.append((numbers[-1] if numbers else 0) + is_new)
    return numbers


def tag_answers(
    examples: Sequence[TaggedWords],
    features: Features,
    outputs: Sequence[np.ndarray],
    labels: Sequence[str],
    *,
    has_chunks: bool,
) -> list[dict[str, Any]]:
    """The tags of each sentence and, if they mark any, its chunks; outputs (tokens, labels) item by item."""
    best = [np.zeros(len(example.words), dtype=np.int64) for example in examples]
    shares = [np.zeros(len(example.words)) for example in examples]
    words = features.targets["word"]
    assert isinstance(words, Ragged)
    for item, example in enumerate(features.example.tolist()):
        asked = words[item]
        is_asked = asked != IGNORED
        own = softmax(outputs[item][is_asked])  # (words of the item, labels)
        best[example][asked[is_asked]] = own.argmax(-1)
        shares[example][asked[is_asked]] = own.max(-1)
    found = []
    for example, numbers, own in zip(examples, best, shares, strict=True):
        tags = [labels[number] for number in numbers.tolist()]
        answer: dict[str, Any] = {"answer": tags, "score": float(own.mean()) if tags else 1.0}
        if has_chunks:
            answer["entities"] = [_entity(example, *chunk, own) for chunk in chunks(tags)]
        found.append({**answer, "words": list(example.words), "scores": own.tolist()})
    return found


def _entity(example: TaggedWords, kind: str, begin: int, end: int, shares: np.ndarray) -> dict[str, Any]:
    """A chunk as a person reads it: by characters where running text was given, else by words; as sure as its least
    sure word."""
    score = float(shares[begin:end].min())
    if example.text is None:
        return {"type": kind, "begin": begin, "end": end, "text": " ".join(example.words[begin:end]), "score": score}
    first, last = example.places[begin][0], example.places[end - 1][1]
    return {"type": kind, "begin": first, "end": last, "text": example.text[first:last], "score": score}
