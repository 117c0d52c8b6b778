"""Multi-label classification of a text or a pair of texts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from bertsmith.answers.sequences import Answer, Features
from bertsmith.answers.texts import TextExample, label_answers, read_texts, text_features
from bertsmith.errors import MAX_SHOWN, InputError, nearest, shorten
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Labels
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData
from bertsmith.tasks.default_heads import classifier_head
from bertsmith.tasks.metrics.ranking import evaluate_labels
from bertsmith.tasks.texts import TextTask, ordered_labels, text_columns
from bertsmith.text.rows import Table

_LABEL_COLUMNS = ("label", "labels")


@dataclass(frozen=True)
class MultiLabelText(TextExample):
    """A text or pair of texts with the indices of its labels."""

    labels: tuple[int, ...] = ()


class MultiLabel(TextTask[MultiLabelText]):
    """Assign any number of labels to a text or a pair of texts."""

    kind: Literal["multi_label"] = "multi_label"
    label: str = "label"
    """Column of the labels: a list of names, or one string if `separator` is set."""
    separator: str | None = Field(default=None, min_length=1)
    """Separator of the names in a string of labels; None if the column holds lists."""
    labels: tuple[str, ...] = ()
    """Names of the labels by index; empty to collect them from the training data (integers by value, then words in
    alphabetical order)."""
    threshold: float = Field(default=0.5, gt=0, lt=1)
    """Minimum probability at which a label is predicted."""
    label_weights: Literal["none", "balanced"] = "none"
    """Weight of positive examples in the loss: "none" for 1, or "balanced" for negatives / positives of each label, so
    that both contribute equally."""

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        columns = text_columns(row)
        label = next((name for name in _LABEL_COLUMNS if isinstance(row.get(name), list)), None)
        return None if columns is None or label is None else {**columns, "label": label}

    def resolve(self, train: Table) -> "MultiLabel":
        if self.labels:
            return self
        names = {name for index in range(len(train)) for name in self._names(train, index)}
        if not names:
            raise InputError(f"{train.name}: column {self.label!r} has no label in any row; at least 1 is needed")
        return self.changed(labels=ordered_labels(names))

    def head(self, model: ModelConfig) -> HeadConfig:
        return classifier_head(model, self.labels)

    def examples(self, table: Table, *, has_targets: bool = True) -> list[MultiLabelText]:
        label_index = {name: index for index, name in enumerate(self.labels)}
        examples = []
        for index, texts in enumerate(read_texts(table, self.text, self.pair)):
            names = self._names(table, index) if has_targets else []
            for name in names:
                if name not in label_index:
                    raise InputError(
                        f"{table.location(index)}: {self.label!r} has {shorten(name, MAX_SHOWN)!r}, which is not "
                        f"a label of this task; {nearest(name, self.labels)}"
                    )
            labels = tuple(sorted({label_index[name] for name in names}))
            examples.append(MultiLabelText(texts.text, texts.pair, labels))
        return examples

    def features(self, examples: Sequence[MultiLabelText], encoding: Encoding) -> Features:
        return text_features(examples, encoding, {"labels": self._label_matrix(examples).astype(np.float32)})

    def objective(self, examples: Sequence[MultiLabelText]) -> Labels:
        if self.label_weights == "none":
            return Labels()
        counts = self._label_matrix(examples).sum(0)
        return Labels(weights=tuple((len(examples) - n) / n if 0 < n < len(examples) else 1.0 for n in counts.tolist()))

    def answers(
        self, examples: Sequence[MultiLabelText], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        return label_answers(outputs, self.labels, self.threshold)

    def evaluate(self, examples: Sequence[MultiLabelText], answers: Sequence[AnswerData]) -> Evaluation:
        scores = np.array([[answer["scores"][name] for name in self.labels] for answer in answers])
        predicted = np.array([[name in answer["answer"] for name in self.labels] for answer in answers])
        return evaluate_labels(predicted, scores, self._label_matrix(examples), self.metric)

    def gold(self, example: MultiLabelText) -> list[str]:
        return [self.labels[index] for index in example.labels]

    def error(self, example: MultiLabelText, answer: AnswerData) -> float:
        """Return the largest error of a score; 0 for a correct answer."""
        labels = self.gold(example)
        if answer["answer"] == labels:
            return 0.0
        return max(abs(score - (name in labels)) for name, score in answer["scores"].items())

    def label_counts(self, examples: Sequence[MultiLabelText]) -> Counter[str]:
        return Counter(name for example in examples for name in self.gold(example))

    def notices(self, examples: Sequence[MultiLabelText]) -> list[str]:
        unlabelled = sum(not example.labels for example in examples)
        return [f"{unlabelled} of {len(examples)} training rows have no label"] if unlabelled else []

    def _label_matrix(self, examples: Sequence[MultiLabelText]) -> np.ndarray:
        """(examples, labels) boolean matrix of the labels."""
        matrix = np.zeros((len(examples), len(self.labels)), dtype=bool)
        for row, example in zip(matrix, examples, strict=True):
            row[list(example.labels)] = True
        return matrix

    def _names(self, table: Table, index: int) -> list[str]:
        value = table.value(index, self.label)
        if isinstance(value, str) and self.separator is not None:
            return [name.strip() for name in value.split(self.separator) if name.strip()]
        if isinstance(value, str):
            raise InputError(
                f"{table.location(index)}: {self.label!r} is the string {value!r}; use a list of labels, or set "
                f"task.separator to the separator of the labels"
            )
        names = value if isinstance(value, list | tuple) else [None]
        if not all(isinstance(name, str | int) and not isinstance(name, bool) and name != "" for name in names):
            raise InputError(f"{table.location(index)}: {self.label!r} is {value!r}; it must be a list of label names")
        return [str(name) for name in names]
