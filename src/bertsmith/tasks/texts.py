"""What tasks on a text or a pair of texts share: reading them, their sequences, the head that stands on them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, Literal, TypeVar

import numpy as np

from bertsmith.answers.texts import TextExample
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.tasks.base import AnswerData, RowData, Task
from bertsmith.tasks.glue import glue_file
from bertsmith.text.rows import Table

_SINGLE = ("text", "sentence")
_PAIRS = (("sentence1", "sentence2"), ("question", "passage"), ("premise", "hypothesis"), ("question", "sentence"))


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

    def describe(self, example: TextKind) -> str:
        return " | ".join(" ".join(text.split()) for text in example.texts)

    def files(self, examples: Sequence[TextKind], answers: Sequence[AnswerData]) -> dict[str, str]:
        return {} if self.name is None else glue_file(self.name, [answer["answer"] for answer in answers])


def text_columns(row: RowData) -> dict[str, str] | None:
    """The columns of a text or of a pair of texts that a row has under their usual names."""
    for first, second in _PAIRS:
        if isinstance(row.get(first), str) and isinstance(row.get(second), str):
            return {"text": first, "pair": second}
    return next(({"text": name} for name in _SINGLE if isinstance(row.get(name), str)), None)


def classifier_head(model: ModelConfig, labels: tuple[str, ...]) -> ClassifierConfig:
    """The head on a whole sequence as the family's papers have it.

    BERT's pooler where the model has one; ELECTRA and ConvBERT read the first token at once; DeBERTa, and what has its
    attention, puts a layer with GELU between; ModernBERT takes the mean.
    """
    dropout = model.encoder.embedding.dropout
    if any(head.kind == "pooler" for head in model.heads):
        return ClassifierConfig(labels=labels, pooling="pooler", dropout=dropout)
    if model.family.startswith(("deberta", "disentangled")):
        return ClassifierConfig(labels=labels, hidden="gelu", dropout=dropout)
    if model.family.startswith("modern"):
        return ClassifierConfig(labels=labels, pooling="mean", hidden="gelu", dropout=dropout)
    return ClassifierConfig(labels=labels, dropout=dropout)


def in_both_orders(examples: Sequence[TextKind], *, has_pairs: bool) -> list[TextKind]:
    """The examples, then each once more with its texts the other way round."""
    if not has_pairs:
        raise InputError("task.both_orders is true and the task has no pairs; allowed: false")
    return [*examples, *(replace(example, text=str(example.pair), pair=example.text) for example in examples)]


ClassWeights = Literal["none", "balanced"] | tuple[float, ...]
"""How much each label counts in the loss: all the same, the rarer the more, or the numbers given."""


def label_name(table: Table, index: int, column: str) -> str:
    """The label of a row as a name."""
    value = table.value(index, column)
    if not isinstance(value, str | int) or not str(value).strip():
        said = "null" if value is None else repr(value)
        raise InputError(f"{table.location(index)}: {column!r} is {said}; a label is a word or a whole number")
    return str(value).lower() if isinstance(value, bool) else str(value)  # as JSON has it: true and false


def ordered_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Labels in the order of their numbers: whole numbers by size, then words by the alphabet."""

    def position(name: str) -> tuple[bool, int, str]:
        is_whole = name.removeprefix("-").isdecimal()
        return not is_whole, int(name) if is_whole else 0, name

    return tuple(sorted(names, key=position))


def weights_of(asked: ClassWeights, labels: Sequence[str], right: Iterable[int]) -> tuple[float, ...]:
    """The weight of each label where these, by their numbers, are right; nothing where all count the same."""
    if asked == "none":
        return ()
    if asked != "balanced":
        if len(asked) != len(labels):
            raise InputError(f"task.class_weights has {len(asked)} numbers; the task has {len(labels)} labels")
        return asked
    counts = Counter(right)
    mean = counts.total() / max(1, len(counts))
    return tuple(mean / counts[number] if counts[number] else 0.0 for number in range(len(labels)))


def confusion_counts(labels: Sequence[str], right: Iterable[int], said: Iterable[str]) -> np.ndarray:
    """How often each label, by row, was answered with each, by column; `right` are numbers, `said` names.

    Shape: (labels, labels).
    """
    numbers = {name: number for number, name in enumerate(labels)}
    counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
    for row, name in zip(right, said, strict=True):
        counts[row, numbers[name]] += 1
    return counts
