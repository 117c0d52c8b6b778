"""Text embeddings: single texts or pairs, and the cosine similarity of pairs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np

from bertsmith.answers.sequences import Features, Ragged, TextEncoding
from bertsmith.errors import InputError
from bertsmith.text.rows import Table

_RANKING_BATCH = 1024  # texts compared with all candidates at a time
_VECTOR_DECIMALS = 7


@dataclass(frozen=True)
class EmbeddingExample:
    """One to three texts (the second similar, the third dissimilar), and a similarity or a vector to learn."""

    texts: tuple[str, ...]
    value: float = math.nan
    """Similarity, rescaled to [0, 1] by the range of the training data; NaN if unknown."""
    vector: np.ndarray | None = None
    """Vector that a single text should get, (width,)."""


class EmbeddingAnswer(TypedDict):
    """The vector of a text, or the cosine of a pair and the retrieval rank of its second text."""

    answer: list[float] | float
    rank: NotRequired[int]


def embedding_row(value: object, text: str, pair: str | None) -> dict[str, object]:
    """Turn an input into a row: a text, or two texts to compare."""
    if isinstance(value, str):
        return {text: value}
    if isinstance(value, tuple | list) and len(value) == 2:
        return {text: value[0], pair or "pair": value[1]}
    if isinstance(value, Mapping):
        return dict(value)
    raise InputError(f"an input is {value!r}; allowed: a text, a pair of texts, or a mapping")


def read_embedding_texts(table: Table, index: int, text: str, pair: str | None) -> EmbeddingExample:
    """Read the texts of a row without targets: one text, or a pair."""
    second = pair or "pair"
    columns = [text, second] if second in table.rows[index] else [text]
    return EmbeddingExample(tuple(table.text(index, name) for name in columns))


def embedding_features(examples: Sequence[EmbeddingExample], encoding: TextEncoding) -> Features:
    """Encode every text as one sequence, every example as one item.

    Targets: "texts", ids of the distinct texts; "value", the similarity, and "vector", where all examples have one.
    """
    tokens, types = encoding.sequences([text for example in examples for text in example.texts])
    counts = np.array([len(example.texts) for example in examples], dtype=np.int64)
    values = np.array([example.value for example in examples], dtype=np.float32)
    targets: dict[str, np.ndarray | Ragged] = {"texts": text_ids(examples, int(counts.max(initial=1)))}
    if not np.isnan(values).any():
        targets["value"] = values
    if all(example.vector is not None for example in examples):
        targets["vector"] = np.array([example.vector for example in examples], dtype=np.float16)
    return Features(
        tokens,
        types,
        np.concatenate([[0], np.cumsum(counts)]),
        np.arange(len(examples)),
        targets,
        int((tokens.lengths == encoding.length).sum()),
    )


def embedding_answers(
    examples: Sequence[EmbeddingExample], outputs: Sequence[np.ndarray], *, all_alike: bool
) -> list[EmbeddingAnswer]:
    """Return the vector of a text or the cosine of a pair; with `all_alike` (all pairs are positives) also its rank.

    Shape: outputs (width,) of a single text, else (texts, width).
    """
    answers: list[EmbeddingAnswer] = []
    for vectors in outputs:
        if vectors.ndim == 1:
            answers.append({"answer": [round(float(number), _VECTOR_DECIMALS) for number in vectors]})
        else:
            first, second = unit(vectors[:2])
            answers.append({"answer": float(first @ second)})
    if all_alike and examples and all(len(example.texts) > 1 for example in examples):
        firsts, seconds = (unit(np.stack([vectors[side] for vectors in outputs])) for side in (0, 1))
        ranks = partner_ranks(firsts, seconds, text_ids(examples, 3)[:, 1])
        for answer, rank in zip(answers, ranks.tolist(), strict=True):
            answer["rank"] = rank
    return answers


def text_ids(examples: Sequence[EmbeddingExample], max_texts: int) -> np.ndarray:
    """Ids of the distinct texts, (examples, max_texts); -1 if an example has fewer texts."""
    ids: dict[str, int] = {}
    table = np.full((len(examples), max_texts), -1, dtype=np.int64)
    for row, example in zip(table, examples, strict=True):
        row[: len(example.texts)] = [ids.setdefault(text, len(ids)) for text in example.texts]
    return table


def unit(vectors: np.ndarray) -> np.ndarray:
    """Normalise vectors to length 1 in float64, (vectors, width)."""
    wide = vectors.astype(np.float64)
    scaled: np.ndarray = wide / np.maximum(np.linalg.norm(wide, axis=-1, keepdims=True), 1e-12)
    return scaled


def partner_ranks(first: np.ndarray, second: np.ndarray, partner_ids: np.ndarray) -> np.ndarray:
    """Rank of each text's partner among all distinct candidates by cosine, from 1; ties rank before the partner.

    Shape: first and second (pairs, width), of length 1; partner_ids (pairs,), equal for equal texts -> (pairs,).
    """
    _, distinct, column = np.unique(partner_ids, return_index=True, return_inverse=True)
    candidates = second[distinct]
    ranks = []
    for start in range(0, len(first), _RANKING_BATCH):
        columns = column[start : start + _RANKING_BATCH]
        cosines = first[start : start + _RANKING_BATCH] @ candidates.T
        rows = np.arange(len(columns))
        # ties count against the partner: identical vectors must not score
        ranks.append((cosines >= cosines[rows, columns][:, None]).sum(1))
    return np.concatenate(ranks) if ranks else np.empty(0, dtype=np.int64)
