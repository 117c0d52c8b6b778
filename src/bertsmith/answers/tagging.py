"""Tagging: one tag per word, and the chunks (entities) that tags mark."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from bertsmith.answers.sequences import IGNORED, Features, Ragged, TextEncoding, check_labels
from bertsmith.answers.texts import softmax
from bertsmith.errors import InputError
from bertsmith.text.rows import Table
from bertsmith.text.tokenizer import Tokenizer

Scheme = Literal["iob", "bioes", "plain"]

OUTSIDE = "O"
_BILOU_TO_BIOES = {"L": "E", "U": "S"}
_PREFIXES = {"iob": "BI", "bioes": "BIES"}


class Chunk(NamedTuple):
    """A chunk of words of one type: from word `begin` to before word `end`."""

    type: str
    begin: int
    end: int


def tag_parts(tag: str) -> tuple[str, str]:
    """Split a tag into its prefix and the chunk type, which may be empty: B-PER into B and PER."""
    prefix, _, kind = tag.partition("-")
    return _BILOU_TO_BIOES.get(prefix, prefix), kind


def tagging_scheme(tags: Iterable[str]) -> Scheme:
    """Detect the scheme of a set of tags; "plain" if they mark no chunks, such as parts of speech."""
    prefixes = {tag_parts(tag)[0] for tag in tags if tag != OUTSIDE}
    if not prefixes or not prefixes <= set("BIES"):
        return "plain"
    return "iob" if prefixes <= set("BI") else "bioes"


def complete_labels(tags: Iterable[str], scheme: Scheme) -> tuple[str, ...]:
    """Return the label set: the tags seen, completed with every prefix of the scheme for each chunk type.

    A type whose chunks all have one word in training may have longer chunks elsewhere.
    """
    seen = set(tags)
    if scheme == "plain":
        return tuple(sorted(seen))
    letters = {"E": "L", "S": "U"} if {tag.partition("-")[0] for tag in seen} & {"L", "U"} else {}
    kinds = sorted({tag.partition("-")[2] for tag in seen if tag != OUTSIDE})
    prefixes = [letters.get(prefix, prefix) for prefix in _PREFIXES[scheme]]
    return (OUTSIDE, *(f"{prefix}-{kind}" if kind else prefix for kind in kinds for prefix in prefixes))


def chunks(tags: Sequence[str]) -> list[Chunk]:
    """Return the chunks of a sentence, by the rules of conlleval.

    B and S always begin a chunk; I and E do so after O, after the end of a chunk, and where the type changes. A chunk
    ends where another begins, at O, and at the end of the sentence.
    """
    result: list[Chunk] = []
    begin, previous, previous_kind = 0, OUTSIDE, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = tag_parts(tag)
        begins = prefix != OUTSIDE and (prefix in "BS" or previous in "OES" or kind != previous_kind)
        if previous != OUTSIDE and (begins or prefix == OUTSIDE):
            result.append(Chunk(previous_kind, begin, index))
        if begins:
            begin = index
        previous, previous_kind = prefix, kind
    return result


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Convert IOB1 or IOB2 tags to IOB2: the first word of each chunk gets B."""
    converted = list(tags)
    for kind, begin, _ in chunks(tags):
        converted[begin] = f"B-{kind}" if kind else "B"
    return converted


# matched against the shape of a text: letters and digits are "w", white space is " ", other characters stay
_WORD = re.compile(
    r"(?:w\.){2,}(?!w)"  # U.S.
    r"|w+(?:[-.,/:&@_’']w+)*"  # all-rounder, 1,000, 12:30, O'Brien
    r"|(\S)\1*"  # a punctuation mark, repeated or not: …, --
)
_CLITIC = re.compile(r"(?<=\w)['’](?:s|m|d|re|ve|ll)\Z", re.IGNORECASE)


def split_words(text: str) -> list[tuple[int, int]]:
    """Return the offsets of words: split at spaces and punctuation, with clitics such as 's separate (as in CoNLL).

    >>> text = "Ann's U.S. trip (2 days) cost $1,000."
    >>> [text[begin:end] for begin, end in split_words(text)]
    ['Ann', "'s", 'U.S.', 'trip', '(', '2', 'days', ')', 'cost', '$', '1,000', '.']
    """
    offsets = []
    for match in _WORD.finditer("".join(map(_shape, text))):
        begin, end = match.span()
        clitic = _CLITIC.search(text, begin, end)
        if clitic is not None:
            offsets += [(begin, clitic.start()), (clitic.start(), end)]
        else:
            offsets.append((begin, end))
    return offsets


def _shape(character: str) -> str:
    if character.isspace():
        return " "
    # combining marks, numbers of any script and zero-width joiners belong to words
    category = unicodedata.category(character)
    return "w" if category[0] in "LMN" or category == "Cf" else character


_DOCUMENT_MARK = "-DOCSTART-"


@dataclass(frozen=True)
class TaggedWords:
    """The words of a sentence and the indices of their tags."""

    words: tuple[str, ...]
    tags: tuple[int, ...] = ()
    """Tag index of each word; empty if unknown."""
    document: int = 0
    """Index of the document."""
    text: str | None = None
    """The input text; None if the input was a list of words."""
    offsets: tuple[tuple[int, int], ...] = ()
    """Character offsets of the words in `text`."""
    is_changed: bool = False
    """Whether the tags were converted from IOB1 to IOB2."""


class Entity(TypedDict):
    """A chunk; `begin` and `end` count characters if the input was a text, else words."""

    type: str
    begin: int
    end: int
    text: str
    score: float


class TagAnswer(TypedDict):
    """One tag per word with its probability, the mean probability, and the entities unless tags are plain."""

    answer: list[str]
    score: float
    entities: NotRequired[list[Entity]]
    words: list[str]
    scores: list[float]


def read_sentence(table: Table, index: int, column: str, document: int) -> TaggedWords:
    """Read the sentence of a row without tags: a list of words, or a text."""
    value = table.value(index, column)
    if not isinstance(value, str):
        return TaggedWords(read_words(table, index, column), (), document)
    offsets = tuple(split_words(value))
    return TaggedWords(tuple(value[begin:end] for begin, end in offsets), (), document, value, offsets)


def read_words(table: Table, index: int, column: str) -> tuple[str, ...]:
    """Read the words of a row, which must be a list."""
    words = table.value(index, column)
    if not isinstance(words, list | tuple):
        raise InputError(f"{table.location(index)}: {column!r} is {words!r:.60}; it must be a list of words")
    for position, word in enumerate(words):
        if not isinstance(word, str):
            raise InputError(
                f"{table.location(index)}: {column!r} has {word!r} as word {position + 1}; a word must be a string"
            )
    return tuple(words)


def document_indices(table: Table, words: str, document: str) -> list[int]:
    """Return the document index of each row: adjacent rows with equal names, or split at -DOCSTART- without names."""
    indices: list[int] = []
    for index, row in enumerate(table):
        is_new = index > 0 and (
            row.get(document, "") != table.rows[index - 1].get(document, "")
            or (document in row and row[document] is None)
        )
        value = row.get(words)
        is_new |= bool(index and isinstance(value, list | tuple) and value and value[0] == _DOCUMENT_MARK)
        indices.append((indices[-1] if indices else 0) + is_new)
    return indices


def tag_answers(
    examples: Sequence[TaggedWords],
    features: Features,
    outputs: Sequence[np.ndarray],
    labels: Sequence[str],
    *,
    has_chunks: bool,
) -> list[TagAnswer]:
    """Return the tags of each sentence and, if tags mark chunks, its entities; outputs (tokens, labels) per item."""
    best = [np.zeros(len(example.words), dtype=np.int64) for example in examples]
    confidences = [np.zeros(len(example.words)) for example in examples]
    words = features.targets["word"]
    assert isinstance(words, Ragged)
    for item, example in enumerate(features.example.tolist()):
        check_labels(outputs[item].shape[-1], labels)
        word = words[item]
        is_first = word != IGNORED
        probabilities = softmax(outputs[item][is_first])  # (words of the item, labels)
        best[example][word[is_first]] = probabilities.argmax(-1)
        confidences[example][word[is_first]] = probabilities.max(-1)
    answers: list[TagAnswer] = []
    for example, indices, confidence in zip(examples, best, confidences, strict=True):
        tags = [labels[index] for index in indices.tolist()]
        score, tokens, scores = float(confidence.mean()) if tags else 1.0, list(example.words), confidence.tolist()
        if has_chunks:
            entities = [_entity(example, *chunk, confidence) for chunk in chunks(tags)]
            answers.append({"answer": tags, "score": score, "entities": entities, "words": tokens, "scores": scores})
        else:
            answers.append({"answer": tags, "score": score, "words": tokens, "scores": scores})
    return answers


def _entity(example: TaggedWords, kind: str, begin: int, end: int, confidence: np.ndarray) -> Entity:
    """Return a chunk with its offsets and text; its score is the lowest probability of its words."""
    score = float(confidence[begin:end].min())
    if example.text is None:
        return {"type": kind, "begin": begin, "end": end, "text": " ".join(example.words[begin:end]), "score": score}
    first, last = example.offsets[begin][0], example.offsets[end - 1][1]
    return {"type": kind, "begin": first, "end": last, "text": example.text[first:last], "score": score}


def word_tokens(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the token ids of each sentence and the word index of every token.

    A word without tokens, such as a control character, becomes the unknown token.
    Shape: (ids,) both, the word indices non-decreasing.
    """
    rows = tokenizer.encode_offsets([" ".join(words) for words in sentences])
    return [_assign_words(tokenizer, words, *row) for words, row in zip(sentences, rows, strict=True)]


def _assign_words(
    tokenizer: Tokenizer, words: Sequence[str], ids: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a sentence and the word of each, which contains its last character.

    Shape: ids (ids,), offsets (ids, 2).
    """
    ends = np.cumsum([len(word) + 1 for word in words])
    last = np.maximum(offsets[:, 1] - 1, offsets[:, 0])
    # the space before a word belongs to it, as in tokens with a leading space
    owners = np.maximum.accumulate(np.searchsorted(ends[:-1] - 1, last, side="right"))
    ids = ids.astype(np.int64)
    missing = np.setdiff1d(np.arange(len(words)), owners)
    if not len(missing):
        return ids, owners
    positions = np.searchsorted(owners, missing)
    return np.insert(ids, positions, tokenizer.unknown), np.insert(owners, positions, missing)


_SPECIAL_TOKENS = 2  # one at each end of a sequence
_MAX_FILL = 0.75  # fraction of a sequence filled by one part of a split sentence, which leaves room for context


@dataclass(frozen=True)
class Document:
    """The concatenated tokens of sentences, and the word of each token, counted over all sentences."""

    tokens: np.ndarray
    owners: np.ndarray
    first: np.ndarray
    """Index of the first token of each word, then the number of tokens, (words + 1,)."""
    cut: int
    """Number of words that were truncated because they were longer than a sequence."""

    @classmethod
    def of(cls, sentences: Sequence[tuple[np.ndarray, np.ndarray]], words: Sequence[int], limit: int) -> "Document":
        """Concatenate sentences, given their numbers of words; a word keeps at most `limit` tokens."""
        begins = np.concatenate([[0], np.cumsum(words)])
        tokens = np.concatenate([ids for ids, _ in sentences])
        owners = np.concatenate([indices + begin for (_, indices), begin in zip(sentences, begins, strict=False)])
        first = np.searchsorted(owners, np.arange(begins[-1] + 1))
        rank = np.arange(len(owners)) - first[owners]  # index of a token in its word
        if not len(owners) or rank.max() < limit:
            return cls(tokens, owners, first, 0)
        keep = rank < limit
        cut = int((np.diff(first) > limit).sum())
        return cls(tokens[keep], owners[keep], np.searchsorted(owners[keep], np.arange(begins[-1] + 1)), cut)

    def parts(self, begin: int, end: int, room: int) -> list[tuple[int, int]]:
        """Split the words `begin` to before `end` into parts that fit into `room` tokens."""
        size = int(self.first[end] - self.first[begin])
        if size <= room:
            return [(begin, end)]
        limit = max(1, int(room * _MAX_FILL))
        target_size = size / -(-size // limit)  # parts of about equal size
        parts, start = [], begin
        for word in range(begin + 1, end + 1):
            # word - 1 no longer fits: the part ends before it
            if word - 1 > start and self.first[word] - self.first[start] > target_size:
                parts.append((start, word - 1))
                start = word - 1
        return [*parts, (start, end)]

    def around(self, part: tuple[int, int], within: tuple[int, int], room: int) -> tuple[int, int]:
        """Extend a part by context on both sides up to `room` tokens, half on each side.

        `within` limits the context; room that one side cannot use goes to the other.
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
class _Sequences:
    """Sequences collected so far."""

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
    """Encode every sentence as one item or several, each one sequence.

    Targets: "word", the index of a word at its first token, and "tags", its tag, if known; IGNORED elsewhere. Adjacent
    sentences with equal numbers in `documents` belong to one document.
    """
    sequences, room = _Sequences(), encoding.length - _SPECIAL_TOKENS
    encoded = word_tokens(encoding.tokenizer, sentences)
    lengths = [len(sentence) for sentence in sentences]
    for begin, end in (
        _document_ranges(documents) if has_context else [(index, index + 1) for index in range(len(sentences))]
    ):
        document = Document.of(encoded[begin:end], lengths[begin:end], room)
        sequences.cut += document.cut
        edges = np.concatenate([[0], np.cumsum(lengths[begin:end])]).tolist()
        for index, sentence in zip(range(begin, end), pairwise(edges), strict=True):
            _add_sentence(sequences, document, index, sentence, (0, edges[-1]), encoding)
    tokens, words = Ragged.of(sequences.tokens), Ragged.of(sequences.words)
    targets = {"word": words}
    if tags is not None:
        flat = words.tokens.copy()
        for index, item in enumerate(sequences.example):
            word = flat[words.starts[index] : words.starts[index + 1]]
            is_first = word != IGNORED
            word[is_first] = np.asarray(tags[item], dtype=np.int32)[word[is_first]]
        targets["tags"] = Ragged(flat, words.starts)
    types = Ragged(np.zeros_like(tokens.tokens), tokens.starts) if encoding.has_types else None
    count = len(sequences.example)
    return Features(
        tokens, types, np.arange(count + 1), np.array(sequences.example, dtype=np.int64), targets, sequences.cut
    )


def _add_sentence(
    sequences: _Sequences,
    document: Document,
    index: int,
    sentence: tuple[int, int],
    within: tuple[int, int],
    encoding: TextEncoding,
) -> None:
    """Add the sequences of one sentence, given by its range of words."""
    room = encoding.length - _SPECIAL_TOKENS
    for part in document.parts(*sentence, room):
        left, right = document.around(part, within, room)
        begin, end = document.first[left], document.first[right]
        words = np.full(end - begin + _SPECIAL_TOKENS, IGNORED, dtype=np.int32)
        words[document.first[part[0] : part[1]] - begin + 1] = np.arange(part[0], part[1]) - sentence[0]
        ends = [encoding.tokenizer.start], [encoding.tokenizer.separator]
        sequences.tokens.append(np.concatenate([ends[0], document.tokens[begin:end], ends[1]]).astype(np.int32))
        sequences.words.append(words)
        sequences.example.append(index)


def _document_ranges(documents: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end index of each document."""
    indices = np.asarray(documents)
    edges = [0, *(np.flatnonzero(np.diff(indices)) + 1).tolist(), len(indices)]
    return list(pairwise(edges))
