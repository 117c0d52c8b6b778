"""Classification of a text or a pair of texts: one of several labels."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from bertsmith.answers.sequences import Answer, Features
from bertsmith.answers.texts import TextExample, class_answers, read_texts, text_features
from bertsmith.errors import MAX_SHOWN, InputError, nearest, shorten
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Classes
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, PredictedLabel, PredictedLabels, RowData
from bertsmith.tasks.default_heads import classifier_head
from bertsmith.tasks.metrics.classes import evaluate_classes
from bertsmith.tasks.texts import (
    ClassWeights,
    TextTask,
    in_both_orders,
    label_name,
    loss_weights,
    ordered_labels,
    text_columns,
)
from bertsmith.text.rows import Table

_MAX_IMBALANCE = 5  # ratio of the most to the least frequent label above which a notice is issued


@dataclass(frozen=True)
class LabelledText(TextExample):
    """A text or pair of texts with the index of its label."""

    label: int = -1


class Classification(TextTask[LabelledText]):
    """Assign one of several labels to a text or a pair of texts."""

    kind: Literal["classification"] = "classification"
    label: str = "label"
    """Column of the label: a word, an integer, true or false."""
    labels: tuple[str, ...] = ()
    """Names of the labels by index; empty to collect them from the training data (integers by value, then words in
    alphabetical order)."""
    positive: str | None = Field(default=None, min_length=1)
    """Label whose F1 is reported as "f1" in binary classification; None for the second of `labels`."""
    class_weights: ClassWeights = "none"
    """Weight of each label in the loss: "none" for equal weights, "balanced" for weights inversely proportional to the
    label frequencies, or one number per label."""
    both_orders: bool = False
    """Train on every pair in both orders, for symmetric tasks such as paraphrase detection (ELECTRA)."""

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
            raise InputError(f"{train.name}: column {self.label!r} has only one label, {only!r}; at least 2 are needed")
        return self.changed(labels=ordered_labels(names))

    def head(self, model: ModelConfig) -> HeadConfig:
        return classifier_head(model, self.labels)

    def examples(self, table: Table, *, has_targets: bool = True) -> list[LabelledText]:
        label_index = {name: index for index, name in enumerate(self.labels)}
        examples = []
        for index, texts in enumerate(read_texts(table, self.text, self.pair)):
            label = -1
            if has_targets:
                name = label_name(table, index, self.label)
                if name not in label_index:
                    raise InputError(
                        f"{table.location(index)}: {self.label!r} is {shorten(name, MAX_SHOWN)!r}, which is not "
                        f"a label of this task; {nearest(name, self.labels)}"
                    )
                label = label_index[name]
            examples.append(LabelledText(texts.text, texts.pair, label))
        return examples

    def features(self, examples: Sequence[LabelledText], encoding: Encoding) -> Features:
        labels = np.array([example.label for example in examples], dtype=np.int64)
        return text_features(examples, encoding, {"label": labels})

    def augment(self, examples: Sequence[LabelledText]) -> list[LabelledText]:
        return in_both_orders(examples, has_pairs=self.pair is not None) if self.both_orders else list(examples)

    def objective(self, examples: Sequence[LabelledText]) -> Classes:
        return Classes(weights=loss_weights(self.class_weights, self.labels, (example.label for example in examples)))

    def answers(
        self, examples: Sequence[LabelledText], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        return class_answers(outputs, self.labels)

    def evaluate(self, examples: Sequence[LabelledText], answers: Sequence[AnswerData]) -> Evaluation:
        label_index = {name: index for index, name in enumerate(self.labels)}
        predicted = np.array([label_index[answer["answer"]] for answer in answers])
        labels = np.array([example.label for example in examples])
        return evaluate_classes(predicted, labels, len(self.labels), self.metric, self._positive())

    def gold(self, example: LabelledText) -> str:
        return self.labels[example.label]

    def predicted_labels(self, examples: Sequence[LabelledText], answers: Sequence[AnswerData]) -> PredictedLabels:
        label_index = {name: index for index, name in enumerate(self.labels)}
        return PredictedLabels(
            self.labels,
            [
                PredictedLabel(example.label, label_index[answer["answer"]], float(answer.get("score", 1.0)), index)
                for index, (example, answer) in enumerate(zip(examples, answers, strict=True))
            ],
        )

    def label_counts(self, examples: Sequence[LabelledText]) -> Counter[str]:
        return Counter(map(self.gold, examples))

    def notices(self, examples: Sequence[LabelledText]) -> list[str]:
        counts = self.label_counts(examples)
        if len(counts) < 2:
            return []
        notices = []
        unseen = [name for name in self.labels if name not in counts]
        if unseen:
            which = "the label" if len(unseen) == 1 else "any of the labels"
            notices.append(f"train has no row with {which} {', '.join(unseen)}")
        (frequent, highest), (rare, lowest) = counts.most_common()[0], counts.most_common()[-1]
        if highest > _MAX_IMBALANCE * lowest and self.class_weights == "none":
            notices.append(
                f"the labels are imbalanced: {100 * highest / counts.total():.1f} % of train is {frequent!r}, "
                f"{highest / lowest:.1f} times as many rows as {rare!r}; set task.class_weights=balanced to compensate"
            )
        return notices

    def _positive(self) -> int:
        """Index of the label whose F1 is reported."""
        if self.positive is None:
            return 1
        if self.positive not in self.labels:
            raise InputError(f"task.positive is {self.positive!r}; {nearest(self.positive, self.labels)}")
        return self.labels.index(self.positive)
