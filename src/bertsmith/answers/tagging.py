"""Sentences as words, and what scores of their tokens mean: a tag for every word, the chunks that tags mark."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from bertsmith.answers.sequences import IGNORED, Features, Ragged, TextEncoding
from bertsmith.answers.texts import softmax
from bertsmith.errors import InputError
from bertsmith.text.rows import Table
from bertsmith.text.tokenizer import Tokenizer

Scheme = Literal["iob", "bioes", "plain"]

OUTSIDE = "O"
_SAME = {"L": "E", "U": "S"}
_PLACES = {"iob": "BI", "bioes": "BIES"}


class Chunk(NamedTuple):
    """A stretch of words of one type: from word `begin` to before word `end`."""

    type: str
    begin: int
    end: int


def tag_parts(tag: str) -> tuple[str, str]:
    """The place in a chunk that a tag names and the chunk's type, which may be empty: B-PER gives B and PER."""
    place, _, kind = tag.partition("-")
    return _SAME.get(place, place), kind


def scheme_of(tags: Iterable[str]) -> Scheme:
    """The scheme of a set of tags; "plain" where they mark no chunks, as parts of speech do not."""
    places = {tag_parts(tag)[0] for tag in tags if tag != OUTSIDE}
    if not places or not places <= set("BIES"):
        return "plain"
    return "iob" if places <= set("BI") else "bioes"


def whole_labels(tags: Iterable[str], scheme: Scheme) -> tuple[str, ...]:
    """The labels to choose among: those seen, and with each type of chunk all of its places.

    A type whose chunks all had one word in training may have longer ones elsewhere.
    """
    seen = set(tags)
    if scheme == "plain":
        return tuple(sorted(seen))
    letters = {"E": "L", "S": "U"} if {tag.partition("-")[0] for tag in seen} & {"L", "U"} else {}
    kinds = sorted({tag.partition("-")[2] for tag in seen if tag != OUTSIDE})
    places = [letters.get(place, place) for place in _PLACES[scheme]]
    return (OUTSIDE, *(f"{place}-{kind}" if kind else place for kind in kinds for place in places))


def chunks(tags: Sequence[str]) -> list[Chunk]:
    """The chunks of a sentence, read as conlleval reads them.

    B and S always begin one; I and E do so after O, after the end of a chunk, and where the type changes. A chunk ends
    where another begins, at O, and at the end of the sentence.
    """
    found: list[Chunk] = []
    begin, before, kind_before = 0, OUTSIDE, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        place, kind = tag_parts(tag)
        begins = place != OUTSIDE and (place in "BS" or before in "OES" or kind != kind_before)
        if before != OUTSIDE and (begins or place == OUTSIDE):
            found.append(Chunk(kind_before, begin, index))
        if begins:
            begin = index
        before, kind_before = place, kind
    return found


def as_iob2(tags: Sequence[str]) -> list[str]:
    """Tags in IOB1 or IOB2 as IOB2: the same chunks, the first word of each with B."""
    changed = list(tags)
    for kind, begin, _ in chunks(tags):
        changed[begin] = f"B-{kind}" if kind else "B"
    return changed


# read off the shape of a text: a letter or digit is "w", space " ", any other character itself
_WORD = re.compile(
    r"(?:w\.){2,}(?!w)"  # U.S.
    r"|w+(?:[-.,/:&@_’']w+)*"  # all-rounder, 1,000, 12:30, O'Brien
    r"|(\S)\1*"  # a mark, or one several times over: …, --
)
_CLITIC = re.compile(r"(?<=\w)['’](?:s|m|d|re|ve|ll)\Z", re.IGNORECASE)


def split_words(text: str) -> list[tuple[int, int]]:
    """Where each word of a text begins and ends: by spaces, marks apart from letters, and as newswire has it 's alone.

    >>> text = "Ann's U.S. trip (2 days) cost $1,000."
    >>> [text[begin:end] for begin, end in split_words(text)]
    ['Ann', "'s", 'U.S.', 'trip', '(', '2', 'days', ')', 'cost', '$', '1,000', '.']
    """
    found = []
    for match in _WORD.finditer("".join(map(_shape, text))):
        begin, end = match.span()
        clitic = _CLITIC.search(text, begin, end)
        if clitic is not None:
            found += [(begin, clitic.start()), (clitic.start(), end)]
        else:
            found.append((begin, end))
    return found


def _shape(character: str) -> str:
    if character.isspace():
        return " "
    # marks of combination, numbers of any script and joiners without width belong to words
    category = unicodedata.category(character)
    return "w" if category[0] in "LMN" or category == "Cf" else character


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


def word_pieces(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each sentence the ids of its words as running text has them, and for every id the index of its word.

    A word that gives no id, such as a control character, has that of the unknown token.
    Shape: (ids,) both, the word indices never falling.
    """
    rows = tokenizer.encode_offsets([" ".join(words) for words in sentences])
    return [_owned(tokenizer, words, *row) for words, row in zip(sentences, rows, strict=True)]


def _owned(
    tokenizer: Tokenizer, words: Sequence[str], ids: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a sentence and the word that each belongs to: the one its last character stands in.

    Shape: ids (ids,), offsets (ids, 2).
    """
    ends = np.cumsum([len(word) + 1 for word in words])
    last = np.maximum(offsets[:, 1] - 1, offsets[:, 0])
    # the space before a word belongs to it, as in the marks of pieces that begin one
    owners = np.maximum.accumulate(np.searchsorted(ends[:-1] - 1, last, side="right"))
    ids = ids.astype(np.int64)
    missing = np.setdiff1d(np.arange(len(words)), owners)
    if not len(missing):
        return ids, owners
    places = np.searchsorted(owners, missing)
    return np.insert(ids, places, tokenizer.unknown), np.insert(owners, places, missing)


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
