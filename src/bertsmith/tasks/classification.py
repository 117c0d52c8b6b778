"""Classify a text or a pair of texts: one of several labels."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from bertsmith.batches.examples import Features
from bertsmith.errors import InputError, nearest
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Classes
from bertsmith.tasks.base import Encoding, Judgement, Task
from bertsmith.tasks.glue import glue_file
from bertsmith.tasks.metrics.classes import class_judgement
from bertsmith.tasks.texts import (
    TextExample,
    all_texts,
    classifier_head,
    read_texts,
    shown_texts,
    softmax,
    text_columns,
    text_features,
)
from bertsmith.text.tables import Table


@dataclass(frozen=True)
class LabelledText(TextExample):
    """A text, perhaps with a second one, and the number of its label."""

    label: int = -1


class Classification(Task[LabelledText]):
    """Say which of some labels a text, or a pair of texts, has."""

    kind: Literal["classification"] = "classification"
    text: str = "text"
    """The column of the text …"""
    pair: str | None = None
    """… and of the second one, where there are pairs."""
    label: str = "label"
    """The column of the label, a word, a whole number, true or false."""
    labels: tuple[str, ...] = ()
    """The names of the labels; empty for those of the training data, in their order."""
    positive: str | None = Field(default=None, min_length=1)
    """Where there are two labels, the one whose F1 is reported; None for the second in their order."""
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = "none"
    """How much each label counts in the loss: all the same, the rarer the more, or the numbers given."""
    both_orders: bool = False
    """Train on every pair in both orders, for tasks where the order means nothing (ELECTRA)."""

    roles: ClassVar[tuple[str, ...]] = ("text", "pair")

    @classmethod
    def recognised(cls, row: Mapping[str, Any]) -> dict[str, str] | None:
        columns = text_columns(row)
        if columns is None or isinstance(row.get("label"), float | list | None):
            return None
        return {**columns, "label": "label"}

    def settled(self, train: Table) -> "Classification":
        if self.labels:
            return self
        names = {_name(train, index, self.label) for index in range(len(train))}
        if len(names) < 2:
            only = ", ".join(names)
            raise InputError(f"{train.name}: column {self.label!r} has one label only, {only!r}; at least 2 are needed")
        return self.changed(labels=ordered_labels(names))

    def head(self, model: ModelConfig) -> HeadConfig:
        return classifier_head(model, self.labels)

    def examples(self, table: Table, *, has_targets: bool = True) -> list[LabelledText]:
        numbers = {name: number for number, name in enumerate(self.labels)}
        found = []
        for index, texts in enumerate(read_texts(table, self.text, self.pair)):
            label = -1
            if has_targets:
                name = _name(table, index, self.label)
                if name not in numbers:
                    raise InputError(
                        f"{table.place(index)}: {self.label!r} is {name!r}, which no training row has; "
                        f"{nearest(name, self.labels)}"
                    )
                label = numbers[name]
            found.append(LabelledText(texts.text, texts.pair, label))
        return found

    def texts(self, examples: Sequence[LabelledText]) -> Iterator[str]:
        return all_texts(examples)

    def features(self, examples: Sequence[LabelledText], encoding: Encoding) -> Features:
        labels = np.array([example.label for example in examples], dtype=np.int64)
        return text_features(examples, encoding, {"label": labels})

    def augmented(self, examples: Sequence[LabelledText]) -> list[LabelledText]:
        if not self.both_orders:
            return list(examples)
        if self.pair is None:
            raise InputError("task.both_orders is true and the task has no pairs; allowed: false")
        turned = [replace(example, text=str(example.pair), pair=example.text) for example in examples]
        return [*examples, *turned]

    def objective(self, examples: Sequence[LabelledText]) -> Classes:
        return Classes(weights=self._weights(examples))

    def answers(
        self, examples: Sequence[LabelledText], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        found = []
        for scores in outputs:
            shares = softmax(scores)
            by_name = {name: float(share) for name, share in zip(self.labels, shares, strict=True)}
            best = int(shares.argmax())
            found.append({"answer": self.labels[best], "score": float(shares[best]), "scores": by_name})
        return found

    def judged(self, examples: Sequence[LabelledText], answers: Sequence[Mapping[str, Any]]) -> Judgement:
        numbers = {name: number for number, name in enumerate(self.labels)}
        said = np.array([numbers[answer["answer"]] for answer in answers])
        right = np.array([example.label for example in examples])
        return class_judgement(said, right, len(self.labels), self.metric, self._positive())

    def right(self, example: LabelledText) -> str:
        return self.labels[example.label]

    def shown(self, example: LabelledText) -> str:
        return shown_texts(example)

    def confusion(
        self, examples: Sequence[LabelledText], answers: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[str, ...], np.ndarray]:
        counts = np.zeros((len(self.labels), len(self.labels)), dtype=np.int64)
        for example, answer in zip(examples, answers, strict=True):
            counts[example.label, self.labels.index(answer["answer"])] += 1
        return self.labels, counts

    def files(self, examples: Sequence[LabelledText], answers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        return {} if self.name is None else glue_file(self.name, [answer["answer"] for answer in answers])

    def _positive(self) -> int:
        """The number of the label whose F1 is reported."""
        if self.positive is None:
            return 1
        if self.positive not in self.labels:
            raise InputError(f"task.positive is {self.positive!r}; {nearest(self.positive, self.labels)}")
        return self.labels.index(self.positive)

    def _weights(self, examples: Sequence[LabelledText]) -> tuple[float, ...]:
        if self.class_weights == "none":
            return ()
        if self.class_weights != "balanced":
            if len(self.class_weights) != len(self.labels):
                raise InputError(
                    f"task.class_weights has {len(self.class_weights)} numbers; the task has {len(self.labels)} labels"
                )
            return self.class_weights
        counts = Counter(example.label for example in examples)
        return tuple(
            len(examples) / (len(counts) * counts[number]) if counts[number] else 0.0
            for number in range(len(self.labels))
        )


def _name(table: Table, index: int, column: str) -> str:
    """The label of a row as a name."""
    value = table.value(index, column)
    if not isinstance(value, str | int) or not str(value).strip():
        said = "null" if value is None else repr(value)
        raise InputError(f"{table.place(index)}: {column!r} is {said}; a label is a word or a whole number")
    return str(value).lower() if isinstance(value, bool) else str(value)  # as JSON has it: true and false


def ordered_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Labels in the order of their numbers: whole numbers by size, then words by the alphabet."""

    def place(name: str) -> tuple[bool, int, str]:
        is_whole = name.removeprefix("-").isdecimal()
        return not is_whole, int(name) if is_whole else 0, name

    return tuple(sorted(names, key=place))
