"""Text embeddings: single texts or pairs, and the cosine similarity of pairs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np

from bertsmith.answers.sequences import Features, Ragged, TextEncoding
from bertsmith.errors import InputError
from bertsmith.text.rows import Table

_COMPARED_AT_ONCE = 1024  # texts
_ENCODED_AT_ONCE = 1 << 14  # texts
_DECIMALS = 7  # of written vectors


@dataclass(frozen=True)
class EmbeddingExample:
    """A text, optionally with a similar and a dissimilar one, and the similarity of the first two."""

    texts: tuple[str, ...]
    value: float = math.nan
    """Scaled to 0 to 1 by the range of the training data; NaN where unknown."""


class EmbeddingAnswer(TypedDict):
    """The vector of a text, or the cosine of a pair and the retrieval rank of its second text."""

    answer: list[float] | float
    rank: NotRequired[int]


def embedding_row(given: object, text: str, pair: str | None) -> dict[str, object]:
    """Turn an input into a row: a text, or two texts to compare."""
    if isinstance(given, str):
        return {text: given}
    if isinstance(given, tuple | list) and len(given) == 2:
        return {text: given[0], pair or "pair": given[1]}
    if isinstance(given, Mapping):
        return dict(given)
    raise InputError(f"an input is {given!r}; allowed: a text, two of them, or a mapping")


def read_embedding_texts(table: Table, index: int, text: str, pair: str | None) -> EmbeddingExample:
    """Read the texts of a row without targets: one text, or a pair."""
    second = pair or "pair"
    columns = [text, second] if second in table.rows[index] else [text]
    return EmbeddingExample(tuple(table.text(index, name) for name in columns))


def embedding_features(examples: Sequence[EmbeddingExample], encoding: TextEncoding) -> Features:
    """Encode every text as one sequence, every example as one item; target "texts": numbers of the distinct texts."""
    tokens, types = _sequences([text for example in examples for text in example.texts], encoding)
    counts = np.array([len(example.texts) for example in examples], dtype=np.int64)
    values = np.array([example.value for example in examples], dtype=np.float32)
    targets: dict[str, np.ndarray | Ragged] = {"texts": text_numbers(examples, int(counts.max(initial=1)))}
    if not np.isnan(values).any():
        targets["value"] = values
    return Features(
        tokens,
        types if encoding.has_types else None,
        np.concatenate([[0], np.cumsum(counts)]),
        np.arange(len(examples)),
        targets,
        int((tokens.lengths == encoding.length).sum()),
    )


def _sequences(texts: Sequence[str], encoding: TextEncoding) -> tuple[Ragged, Ragged]:
    """Encode texts in chunks: half a million pairs at once would take gigabytes."""
    tokens: list[Ragged] = []
    types: list[Ragged] = []
    for begin in range(0, len(texts), _ENCODED_AT_ONCE):
        made = encoding.tokenizer.encode(texts[begin : begin + _ENCODED_AT_ONCE], None, encoding.length, padding=False)
        tokens.append(Ragged.of(made["input_ids"]))
        types.append(Ragged.of(made["token_type_ids"]))
    return Ragged.joined(tokens), Ragged.joined(types)


def embedding_answers(
    examples: Sequence[EmbeddingExample], outputs: Sequence[np.ndarray], *, all_alike: bool
) -> list[EmbeddingAnswer]:
    """Return the vector of a text or the cosine of a pair; if all pairs are similar ones, also retrieval ranks.

    Shape: outputs (width,) of a single text, else (texts, width).
    """
    answers: list[EmbeddingAnswer] = []
    for vectors in outputs:
        if vectors.ndim == 1:
            answers.append({"answer": [round(float(number), _DECIMALS) for number in vectors]})
        else:
            first, second = unit(vectors[:2])
            answers.append({"answer": float(first @ second)})
    if all_alike and examples and all(len(example.texts) > 1 for example in examples):
        firsts, seconds = (unit(np.stack([vectors[side] for vectors in outputs])) for side in (0, 1))
        ranks = partner_ranks(firsts, seconds, text_numbers(examples, 3)[:, 1])
        for answer, rank in zip(answers, ranks.tolist(), strict=True):
            answer["rank"] = rank
    return answers


def text_numbers(examples: Sequence[EmbeddingExample], most: int) -> np.ndarray:
    """Number the distinct texts, (examples, most); -1 where an example has fewer texts."""
    numbers: dict[str, int] = {}
    table = np.full((len(examples), most), -1, dtype=np.int64)
    for row, example in zip(table, examples, strict=True):
        row[: len(example.texts)] = [numbers.setdefault(text, len(numbers)) for text in example.texts]
    return table


def unit(vectors: np.ndarray) -> np.ndarray:
    """Normalise vectors to length 1 in float64, (vectors, width)."""
    wide = vectors.astype(np.float64)
    scaled: np.ndarray = wide / np.maximum(np.linalg.norm(wide, axis=-1, keepdims=True), 1e-12)
    return scaled


def partner_ranks(first: np.ndarray, second: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Rank of each text's partner among all distinct candidates by cosine, from 1; ties rank before the partner.

    Shape: first and second (pairs, width), of length 1; own (pairs,), equal where the partners' texts are equal
    -> (pairs,).
    """
    _, distinct, column = np.unique(own, return_index=True, return_inverse=True)
    candidates = second[distinct]
    found = []
    for begin in range(0, len(first), _COMPARED_AT_ONCE):
        columns = column[begin : begin + _COMPARED_AT_ONCE]
        cosines = first[begin : begin + _COMPARED_AT_ONCE] @ candidates.T
        rows = np.arange(len(columns))
        # ties count against the partner: identical vectors must not score
        found.append((cosines >= cosines[rows, columns][:, None]).sum(1))
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)
