"""What tasks on a text or a pair of texts share: reading them, their sequences, the head that stands on them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.runtime.tasks.texts import TextExample, read_texts, softmax, text_features, whole_lengths
from bertsmith.tasks.base import Task
from bertsmith.tasks.glue import glue_file

__all__ = [
    "TextExample",
    "TextTask",
    "classifier_head",
    "in_both_orders",
    "read_texts",
    "softmax",
    "text_columns",
    "text_features",
    "whole_lengths",
]

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
