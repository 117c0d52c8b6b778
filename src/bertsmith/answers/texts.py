"""Classification, multi-label classification and regression of a text or a pair of texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from bertsmith.answers.sequences import Features, Ragged, TextEncoding, check_labels
from bertsmith.text.rows import Table


@dataclass(frozen=True)
class TextExample:
    """A text, or a pair of texts."""

    text: str
    pair: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.pair is None else (self.text, self.pair)


class ClassAnswer(TypedDict):
    """The most probable label, its probability, and the probability of every label."""

    answer: str
    score: float
    scores: dict[str, float]


class LabelsAnswer(TypedDict):
    """The labels whose probability reaches the threshold, and the probability of every label."""

    answer: list[str]
    scores: dict[str, float]


class ValueAnswer(TypedDict):
    """The predicted number."""

    answer: float


def read_texts(table: Table, text: str, pair: str | None) -> list[TextExample]:
    """Read the texts of every row."""
    return [
        TextExample(table.text(index, text), None if pair is None else table.text(index, pair))
        for index in range(len(table))
    ]


def text_features(
    examples: Sequence[TextExample], encoding: TextEncoding, targets: Mapping[str, np.ndarray | Ragged]
) -> Features:
    """Encode every example as one sequence; truncate the longer text of a pair first."""
    texts = [example.text for example in examples]
    pairs = [str(example.pair) for example in examples] if examples and examples[0].pair is not None else None
    tokens, types = encoding.sequences(texts, pairs)
    count = len(examples)
    whole = whole_lengths(tokens.lengths, texts, pairs, encoding)
    cut = int((whole > encoding.length).sum())
    return Features(tokens, types, np.arange(count + 1), np.arange(count), targets, cut, whole)


MAX_COUNTED = 32
"""Whole lengths are counted up to this many times the maximum length, because a text may have millions of tokens."""


def whole_lengths(
    lengths: np.ndarray, texts: Sequence[str], pairs: Sequence[str] | None, encoding: TextEncoding
) -> np.ndarray:
    """Lengths before truncation, up to MAX_COUNTED times the maximum; only truncated sequences are tokenised again."""
    whole = lengths.astype(np.int64)
    full = np.flatnonzero(whole >= encoding.length).tolist()
    if full:
        seconds = None if pairs is None else [pairs[index] for index in full]
        limit = MAX_COUNTED * encoding.length
        whole[full] = encoding.tokenizer.encode_flat([texts[index] for index in full], seconds, limit).lengths
    return whole


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis in float64."""
    exponentials = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    probabilities: np.ndarray = exponentials / exponentials.sum(-1, keepdims=True)
    return probabilities


def class_answers(outputs: Sequence[np.ndarray], labels: Sequence[str]) -> list[ClassAnswer]:
    """Return the most probable label of each output, (labels,) each."""
    answers: list[ClassAnswer] = []
    for scores in outputs:
        check_labels(len(scores), labels)
        probabilities = softmax(scores)
        by_label = {name: float(probability) for name, probability in zip(labels, probabilities, strict=True)}
        best = int(probabilities.argmax())
        answers.append({"answer": labels[best], "score": float(probabilities[best]), "scores": by_label})
    return answers


def label_answers(outputs: Sequence[np.ndarray], labels: Sequence[str], threshold: float) -> list[LabelsAnswer]:
    """Return the labels whose probability reaches the threshold; outputs (labels,) each."""
    answers: list[LabelsAnswer] = []
    for scores in outputs:
        check_labels(len(scores), labels)
        # sigmoid by tanh: exp of a large score overflows
        probabilities = (0.5 * (1 + np.tanh(scores.astype(np.float64) / 2))).tolist()
        by_label = dict(zip(labels, probabilities, strict=True))
        chosen = [name for name, probability in by_label.items() if probability >= threshold]
        answers.append({"answer": chosen, "scores": by_label})
    return answers


def value_answers(
    outputs: Sequence[np.ndarray], lowest: float | None, highest: float | None, *, scale: bool, clip: bool
) -> list[ValueAnswer]:
    """Return the predicted numbers, clipped to the range on request; outputs (1,) each."""
    offset, factor = value_scale(lowest, highest, scale=scale)
    values = [float(output[0]) * factor + offset for output in outputs]
    if clip and lowest is not None and highest is not None:
        values = [min(max(value, lowest), highest) for value in values]
    return [{"answer": value} for value in values]


def value_scale(lowest: float | None, highest: float | None, *, scale: bool) -> tuple[float, float]:
    """Offset and factor that map the output of the head (0 to 1) to the range of the values."""
    if not scale or lowest is None or highest is None:
        return 0.0, 1.0
    return lowest, highest - lowest
