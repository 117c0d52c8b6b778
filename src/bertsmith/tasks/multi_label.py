"""Give a text or a pair of texts any number of labels."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from bertsmith.answers.sequences import Answer, Features
from bertsmith.answers.texts import TextExample, label_answers, read_texts, text_features
from bertsmith.errors import InputError, nearest
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Labels
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData
from bertsmith.tasks.metrics.ranking import evaluate_labels
from bertsmith.tasks.texts import TextTask, classifier_head, ordered_labels, text_columns
from bertsmith.text.rows import Table

_COLUMNS = ("label", "labels")


@dataclass(frozen=True)
class ManyLabelledText(TextExample):
    """A text, perhaps with a second one, and the numbers of its labels."""

    labels: tuple[int, ...] = ()


class MultiLabel(TextTask[ManyLabelledText]):
    """Say which of some labels a text, or a pair of texts, has: none, one or several."""

    kind: Literal["multi_label"] = "multi_label"
    label: str = "label"
    """The column of the labels, a list of names …"""
    separator: str | None = Field(default=None, min_length=1)
    """… or one string, and this between the names; None where it is a list."""
    labels: tuple[str, ...] = ()
    """The names of the labels; empty for those of the training data, in their order."""
    threshold: float = Field(default=0.5, gt=0, lt=1)
    """The score from which a label is answered."""
    label_weights: Literal["none", "balanced"] = "none"
    """How much a yes counts in the loss: as much as a no, or the more the rarer the label is, so that all its yes count
    as much as all its no."""

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        columns = text_columns(row)
        label = next((name for name in _COLUMNS if isinstance(row.get(name), list)), None)
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

    def examples(self, table: Table, *, has_targets: bool = True) -> list[ManyLabelledText]:
        numbers = {name: number for number, name in enumerate(self.labels)}
        found = []
        for index, texts in enumerate(read_texts(table, self.text, self.pair)):
            names = self._names(table, index) if has_targets else []
            for name in names:
                if name not in numbers:
                    raise InputError(
                        f"{table.location(index)}: {self.label!r} has {name!r}, which no training row has; "
                        f"{nearest(name, self.labels)}"
                    )
            own = tuple(sorted({numbers[name] for name in names}))
            found.append(ManyLabelledText(texts.text, texts.pair, own))
        return found

    def features(self, examples: Sequence[ManyLabelledText], encoding: Encoding) -> Features:
        return text_features(examples, encoding, {"labels": self._table(examples).astype(np.float32)})

    def objective(self, examples: Sequence[ManyLabelledText]) -> Labels:
        if self.label_weights == "none":
            return Labels()
        counts = self._table(examples).sum(0)
        return Labels(weights=tuple((len(examples) - n) / n if 0 < n < len(examples) else 1.0 for n in counts.tolist()))

    def answers(
        self, examples: Sequence[ManyLabelledText], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        return label_answers(outputs, self.labels, self.threshold)

    def evaluate(self, examples: Sequence[ManyLabelledText], answers: Sequence[AnswerData]) -> Evaluation:
        scores = np.array([[answer["scores"][name] for name in self.labels] for answer in answers])
        said = np.array([[name in answer["answer"] for name in self.labels] for answer in answers])
        return evaluate_labels(said, scores, self._table(examples), self.metric)

    def gold(self, example: ManyLabelledText) -> list[str]:
        return [self.labels[number] for number in example.labels]

    def error(self, example: ManyLabelledText, answer: AnswerData) -> float:
        """How far off the worst score of a wrong answer is; 0 for a right one."""
        right = self.gold(example)
        if answer["answer"] == right:
            return 0.0
        return max(abs(score - (name in right)) for name, score in answer["scores"].items())

    def label_counts(self, examples: Sequence[ManyLabelledText]) -> Counter[str]:
        return Counter(name for example in examples for name in self.gold(example))

    def notices(self, examples: Sequence[ManyLabelledText]) -> list[str]:
        has_none = sum(not example.labels for example in examples)
        return [f"{has_none} of {len(examples)} training rows have no label"] if has_none else []

    def _table(self, examples: Sequence[ManyLabelledText]) -> np.ndarray:
        """Which labels each example has, (examples, labels), bool."""
        table = np.zeros((len(examples), len(self.labels)), dtype=bool)
        for row, example in zip(table, examples, strict=True):
            row[list(example.labels)] = True
        return table

    def _names(self, table: Table, index: int) -> list[str]:
        value = table.value(index, self.label)
        if isinstance(value, str) and self.separator is not None:
            return [name.strip() for name in value.split(self.separator) if name.strip()]
        if isinstance(value, str):
            raise InputError(
                f"{table.location(index)}: {self.label!r} is the string {value!r}; give a list of labels, or set "
                f"task.separator to what stands between them"
            )
        names = value if isinstance(value, list | tuple) else [None]
        if not all(isinstance(name, str | int) and not isinstance(name, bool) and name != "" for name in names):
            raise InputError(f"{table.location(index)}: {self.label!r} is {value!r}; a list of names is needed")
        return [str(name) for name in names]
