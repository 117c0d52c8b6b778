"""A text or a pair of texts as one sequence, and what scores of it mean: a label, several, a number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertsmith.answers.sequences import Features, Ragged, TextEncoding
from bertsmith.text.rows import Table


@dataclass(frozen=True)
class TextExample:
    """A text, perhaps with a second one."""

    text: str
    pair: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.pair is None else (self.text, self.pair)


def read_texts(table: Table, text: str, pair: str | None) -> list[TextExample]:
    """The texts of every row."""
    return [
        TextExample(table.text(index, text), None if pair is None else table.text(index, pair))
        for index in range(len(table))
    ]


def text_features(
    examples: Sequence[TextExample], encoding: TextEncoding, targets: Mapping[str, np.ndarray | Ragged]
) -> Features:
    """One sequence for every example; over-long ones are cut, the longer text of a pair first."""
    texts = [example.text for example in examples]
    pairs = [str(example.pair) for example in examples] if examples and examples[0].pair is not None else None
    made = encoding.tokenizer.encode(texts, pairs, encoding.length, padding=False)
    tokens = Ragged.of(made["input_ids"])
    types = Ragged.of(made["token_type_ids"]) if encoding.has_types else None
    count = len(examples)
    whole = whole_lengths(tokens.lengths, texts, pairs, encoding)
    cut = int((whole > encoding.length).sum())
    return Features(tokens, types, np.arange(count + 1), np.arange(count), targets, cut, whole)


def whole_lengths(
    lengths: np.ndarray, texts: Sequence[str], pairs: Sequence[str] | None, encoding: TextEncoding
) -> np.ndarray:
    """The tokens that sequences would have uncut, given those they have: only such as are full are looked at again."""
    whole = lengths.astype(np.int64)
    full = np.flatnonzero(whole >= encoding.length).tolist()
    if full:
        seconds = None if pairs is None else [pairs[index] for index in full]
        made = encoding.tokenizer.encode([texts[index] for index in full], seconds, padding=False)
        whole[full] = [len(row) for row in made["input_ids"]]
    return whole


def softmax(scores: np.ndarray) -> np.ndarray:
    """Scores as shares of one, over the last axis."""
    lifted = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    shares: np.ndarray = lifted / lifted.sum(-1, keepdims=True)
    return shares


def class_answers(outputs: Sequence[np.ndarray], labels: Sequence[str]) -> list[dict[str, Any]]:
    """The likeliest label for each, with the shares of all; outputs (labels,) each."""
    found = []
    for scores in outputs:
        shares = softmax(scores)
        by_name = {name: float(share) for name, share in zip(labels, shares, strict=True)}
        best = int(shares.argmax())
        found.append({"answer": labels[best], "score": float(shares[best]), "scores": by_name})
    return found


def label_answers(outputs: Sequence[np.ndarray], labels: Sequence[str], threshold: float) -> list[dict[str, Any]]:
    """All labels from a threshold up for each, with the shares of all; outputs (labels,) each."""
    found = []
    for scores in outputs:
        # tanh takes any score; exp of a large one overflows
        shares = (0.5 * (1 + np.tanh(scores.astype(np.float64) / 2))).tolist()
        by_name = dict(zip(labels, shares, strict=True))
        said = [name for name, share in by_name.items() if share >= threshold]
        found.append({"answer": said, "scores": by_name})
    return found


def value_answers(
    outputs: Sequence[np.ndarray], lowest: float | None, highest: float | None, *, scale: bool, clip: bool
) -> list[dict[str, Any]]:
    """A number for each, where there is a range inside it if asked for; outputs (1,) each."""
    least, span = value_scale(lowest, highest, scale=scale)
    values = [float(output[0]) * span + least for output in outputs]
    if clip and lowest is not None and highest is not None:
        values = [min(max(value, lowest), highest) for value in values]
    return [{"answer": value} for value in values]


def value_scale(lowest: float | None, highest: float | None, *, scale: bool) -> tuple[float, float]:
    """What 0 of the head stands for, and how far it is from there to what 1 stands for."""
    if not scale or lowest is None or highest is None:
        return 0.0, 1.0
    return lowest, highest - lowest
