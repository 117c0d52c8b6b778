"""Classify a text or a pair of texts: one of several labels."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from bertsmith.answers.sequences import Answer, Features
from bertsmith.answers.texts import TextExample, class_answers, read_texts, text_features
from bertsmith.errors import InputError, nearest
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Classes
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData
from bertsmith.tasks.metrics.classes import evaluate_classes
from bertsmith.tasks.texts import (
    ClassWeights,
    TextTask,
    classifier_head,
    confusion_counts,
    in_both_orders,
    label_name,
    ordered_labels,
    text_columns,
    weights_of,
)
from bertsmith.text.rows import Table

_IMBALANCE = 5  # times that the commonest label may be as common as the rarest before it is said


@dataclass(frozen=True)
class LabelledText(TextExample):
    """A text, perhaps with a second one, and the number of its label."""

    label: int = -1


class Classification(TextTask[LabelledText]):
    """Say which of some labels a text, or a pair of texts, has."""

    kind: Literal["classification"] = "classification"
    label: str = "label"
    """The column of the label, a word, a whole number, true or false."""
    labels: tuple[str, ...] = ()
    """The names of the labels; empty for those of the training data, in their order."""
    positive: str | None = Field(default=None, min_length=1)
    """Where there are two labels, the one whose F1 is reported; None for the second in their order."""
    class_weights: ClassWeights = "none"
    """How much each label counts in the loss: all the same, the rarer the more, or the numbers given."""
    both_orders: bool = False
    """Train on every pair in both orders, for tasks where the order means nothing (ELECTRA)."""

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        columns = text_columns(row)
        if columns is None or isinstance(row.get("label"), float | list | None):
            return None
        return {**columns, "label": "label"}

    def resolve(self, train: Table) -> "Classification":
        if self.labels:
            return self
        names = {label_name(train, index, self.label) for index in range(len(train))}
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
                name = label_name(table, index, self.label)
                if name not in numbers:
                    raise InputError(
                        f"{table.location(index)}: {self.label!r} is {name!r}, which no training row has; "
                        f"{nearest(name, self.labels)}"
                    )
                label = numbers[name]
            found.append(LabelledText(texts.text, texts.pair, label))
        return found

    def features(self, examples: Sequence[LabelledText], encoding: Encoding) -> Features:
        labels = np.array([example.label for example in examples], dtype=np.int64)
        return text_features(examples, encoding, {"label": labels})

    def augment(self, examples: Sequence[LabelledText]) -> list[LabelledText]:
        return in_both_orders(examples, has_pairs=self.pair is not None) if self.both_orders else list(examples)

    def objective(self, examples: Sequence[LabelledText]) -> Classes:
        return Classes(weights=weights_of(self.class_weights, self.labels, (example.label for example in examples)))

    def answers(
        self, examples: Sequence[LabelledText], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        return class_answers(outputs, self.labels)

    def evaluate(self, examples: Sequence[LabelledText], answers: Sequence[AnswerData]) -> Evaluation:
        numbers = {name: number for number, name in enumerate(self.labels)}
        said = np.array([numbers[answer["answer"]] for answer in answers])
        right = np.array([example.label for example in examples])
        return evaluate_classes(said, right, len(self.labels), self.metric, self._positive())

    def gold(self, example: LabelledText) -> str:
        return self.labels[example.label]

    def confusion(
        self, examples: Sequence[LabelledText], answers: Sequence[AnswerData]
    ) -> tuple[tuple[str, ...], np.ndarray]:
        right, said = (example.label for example in examples), (answer["answer"] for answer in answers)
        return self.labels, confusion_counts(self.labels, right, said)

    def label_counts(self, examples: Sequence[LabelledText]) -> Counter[str]:
        return Counter(map(self.gold, examples))

    def notices(self, examples: Sequence[LabelledText]) -> list[str]:
        counts = self.label_counts(examples)
        if len(counts) < 2:
            return []
        found = []
        unseen = [name for name in self.labels if name not in counts]
        if unseen:
            which = "the label" if len(unseen) == 1 else "any of the labels"
            found.append(f"train has no row with {which} {', '.join(unseen)}")
        (most, often), (least, rarely) = counts.most_common()[0], counts.most_common()[-1]
        if often > _IMBALANCE * rarely and self.class_weights == "none":
            found.append(
                f"{100 * often / counts.total():.1f} % of train is labelled {most!r}, {often / rarely:.1f} times as "
                f"often as {least!r}; with task.class_weights=balanced each label counts the same"
            )
        return found

    def _positive(self) -> int:
        """The number of the label whose F1 is reported."""
        if self.positive is None:
            return 1
        if self.positive not in self.labels:
            raise InputError(f"task.positive is {self.positive!r}; {nearest(self.positive, self.labels)}")
        return self.labels.index(self.positive)
