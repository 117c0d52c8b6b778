"""Texts alone or in pairs, and what their vectors mean: themselves, or how alike two texts are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertsmith.answers.sequences import Features, Ragged, TextEncoding
from bertsmith.errors import InputError
from bertsmith.text.rows import Table

_CHUNK = 1024  # texts that are compared with all others at once
_ENCODED = 1 << 14  # texts that are made tokens of at once
_DECIMALS = 7  # of the vectors that are written


@dataclass(frozen=True)
class EmbeddingExample:
    """A text, perhaps its like and what is unlike it, and how alike the first two are."""

    texts: tuple[str, ...]
    value: float = math.nan
    """Between 0 and 1 where the training data told the range; NaN where the data does not say it."""


def embedding_row(given: Any, text: str, pair: str | None) -> dict[str, Any]:
    """What a person gives as a row: a text alone, or two that are to be compared."""
    if isinstance(given, str):
        return {text: given}
    if isinstance(given, tuple | list) and len(given) == 2:
        return {text: given[0], pair or "pair": given[1]}
    if isinstance(given, Mapping):
        return dict(given)
    raise InputError(f"an input is {given!r}; allowed: a text, two of them, or a mapping")


def asked_texts(table: Table, index: int, text: str, pair: str | None) -> EmbeddingExample:
    """The texts of a row to be answered: it may have one where the training had pairs."""
    second = pair or "pair"
    columns = [text, second] if second in table.rows[index] else [text]
    return EmbeddingExample(tuple(table.text(index, name) for name in columns))


def embedding_features(examples: Sequence[EmbeddingExample], encoding: TextEncoding) -> Features:
    """A sequence for every text, those of an example in one item; targets "texts", equal where texts are."""
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
    """The tokens of texts and their types; half a million pairs would take gigabytes to encode at once."""
    tokens: list[Ragged] = []
    types: list[Ragged] = []
    for begin in range(0, len(texts), _ENCODED):
        made = encoding.tokenizer.encode(texts[begin : begin + _ENCODED], None, encoding.length, padding=False)
        tokens.append(Ragged.of(made["input_ids"]))
        types.append(Ragged.of(made["token_type_ids"]))
    return Ragged.joined(tokens), Ragged.joined(types)


def embedding_answers(
    examples: Sequence[EmbeddingExample], outputs: Sequence[np.ndarray], *, all_alike: bool
) -> list[dict[str, Any]]:
    """The vector of a text; of a pair the cosine and, where all pairs are alike, where the second is found.

    Shape: outputs (width,) of a text alone, else (texts, width).
    """
    found: list[dict[str, Any]] = []
    for vectors in outputs:
        if vectors.ndim == 1:
            found.append({"answer": [round(float(number), _DECIMALS) for number in vectors]})
        else:
            first, second = unit(vectors[:2])
            found.append({"answer": float(first @ second)})
    if all_alike and examples and all(len(example.texts) > 1 for example in examples):
        firsts, seconds = (unit(np.stack([vectors[side] for vectors in outputs])) for side in (0, 1))
        ranks = partner_ranks(firsts, seconds, text_numbers(examples, 3)[:, 1])
        for answer, rank in zip(found, ranks.tolist(), strict=True):
            answer["rank"] = rank
    return found


def text_numbers(examples: Sequence[EmbeddingExample], most: int) -> np.ndarray:
    """Numbers that are equal where texts are, (examples, most); -1 where an example has no more."""
    numbers: dict[str, int] = {}
    table = np.full((len(examples), most), -1, dtype=np.int64)
    for row, example in zip(table, examples, strict=True):
        row[: len(example.texts)] = [numbers.setdefault(text, len(numbers)) for text in example.texts]
    return table


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1 in float64, (vectors, width)."""
    wide = vectors.astype(np.float64)
    scaled: np.ndarray = wide / np.maximum(np.linalg.norm(wide, axis=-1, keepdims=True), 1e-12)
    return scaled


def partner_ranks(first: np.ndarray, second: np.ndarray, own: np.ndarray) -> np.ndarray:
    """The place of each text's like among all different ones by cosine, from 1; those as close come before it.

    Shape: first and second (pairs, width), of length 1; own (pairs,), numbers that are equal where the likes' texts are
    -> (pairs,).
    """
    _, kept, column = np.unique(own, return_index=True, return_inverse=True)
    candidates = second[kept]
    found = []
    for begin in range(0, len(first), _CHUNK):
        columns = column[begin : begin + _CHUNK]
        cosines = first[begin : begin + _CHUNK] @ candidates.T
        rows = np.arange(len(columns))
        # vectors that are all one find nothing, so a tie counts against the like
        found.append((cosines >= cosines[rows, columns][:, None]).sum(1))
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)
