"""What tasks on a text or a pair of texts share: reading them, their sequences, the head that stands on them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from bertsmith.batches.examples import Features
from bertsmith.batches.ragged import Ragged
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.tasks.base import Encoding, Task
from bertsmith.tasks.glue import glue_file
from bertsmith.text.tables import Table

_SINGLE = ("text", "sentence")
_PAIRS = (("sentence1", "sentence2"), ("question", "passage"), ("premise", "hypothesis"), ("question", "sentence"))


@dataclass(frozen=True)
class TextExample:
    """A text, perhaps with a second one."""

    text: str
    pair: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.pair is None else (self.text, self.pair)


TextKind = TypeVar("TextKind", bound=TextExample)


class TextTask(Task[TextKind], Generic[TextKind]):
    """Something is said of a text, or of a pair of texts."""

    text: str = "text"
    """The column of the text …"""
    pair: str | None = None
    """… and of the second one, where there are pairs."""

    roles: ClassVar[tuple[str, ...]] = ("text", "pair")
    target_roles: ClassVar[tuple[str, ...]] = ("label",)

    def texts(self, examples: Sequence[TextKind]) -> Iterator[str]:
        return (text for example in examples for text in example.texts)

    def shown(self, example: TextKind) -> str:
        return " | ".join(" ".join(text.split()) for text in example.texts)

    def files(self, examples: Sequence[TextKind], answers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        return {} if self.name is None else glue_file(self.name, [answer["answer"] for answer in answers])


def text_columns(row: Mapping[str, Any]) -> dict[str, str] | None:
    """The columns of a text or of a pair of texts that a row has under their usual names."""
    for first, second in _PAIRS:
        if isinstance(row.get(first), str) and isinstance(row.get(second), str):
            return {"text": first, "pair": second}
    return next(({"text": name} for name in _SINGLE if isinstance(row.get(name), str)), None)


def read_texts(table: Table, text: str, pair: str | None) -> list[TextExample]:
    """The texts of every row."""
    return [
        TextExample(table.text(index, text), None if pair is None else table.text(index, pair))
        for index in range(len(table))
    ]


def text_features(
    examples: Sequence[TextExample], encoding: Encoding, targets: Mapping[str, np.ndarray | Ragged]
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
    lengths: np.ndarray, texts: Sequence[str], pairs: Sequence[str] | None, encoding: Encoding
) -> np.ndarray:
    """The tokens that sequences would have uncut, given those they have: only such as are full are looked at again."""
    whole = lengths.astype(np.int64)
    full = np.flatnonzero(whole >= encoding.length).tolist()
    if full:
        seconds = None if pairs is None else [pairs[index] for index in full]
        made = encoding.tokenizer.encode([texts[index] for index in full], seconds, padding=False)
        whole[full] = [len(row) for row in made["input_ids"]]
    return whole


def classifier_head(model: ModelConfig, labels: tuple[str, ...]) -> ClassifierConfig:
    """The head on a whole sequence as the family's papers have it.

    BERT's pooler where the model has one; ELECTRA and ConvBERT read the first token at once; DeBERTa puts a layer with
    GELU between; ModernBERT takes the mean.
    """
    dropout = model.encoder.embedding.dropout
    if any(head.kind == "pooler" for head in model.heads):
        return ClassifierConfig(labels=labels, pooling="pooler", dropout=dropout)
    if model.family.startswith("deberta"):
        return ClassifierConfig(labels=labels, hidden="gelu", dropout=dropout)
    if model.family.startswith("modern"):
        return ClassifierConfig(labels=labels, pooling="mean", hidden="gelu", dropout=dropout)
    return ClassifierConfig(labels=labels, dropout=dropout)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Scores as shares of one, over the last axis."""
    lifted = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    shares: np.ndarray = lifted / lifted.sum(-1, keepdims=True)
    return shares


def in_both_orders(examples: Sequence[TextKind], *, has_pairs: bool) -> list[TextKind]:
    """The examples, then each once more with its texts the other way round."""
    if not has_pairs:
        raise InputError("task.both_orders is true and the task has no pairs; allowed: false")
    return [*examples, *(replace(example, text=str(example.pair), pair=example.text) for example in examples)]
