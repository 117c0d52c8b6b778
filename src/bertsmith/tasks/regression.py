"""Regression on a text or a pair of texts, such as the similarity of two sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bertsmith.answers.sequences import Answer, Features
from bertsmith.answers.texts import TextExample, read_texts, text_features, value_answers, value_scale
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Values
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData
from bertsmith.tasks.default_heads import classifier_head
from bertsmith.tasks.metrics.ranking import evaluate_values
from bertsmith.tasks.texts import TextTask, in_both_orders, text_columns
from bertsmith.text.rows import Table


@dataclass(frozen=True)
class ValuedText(TextExample):
    """A text or pair of texts with its target value."""

    value: float = math.nan


class Regression(TextTask[ValuedText]):
    """Predict a number for a text or a pair of texts."""

    kind: Literal["regression"] = "regression"
    label: str = "label"
    """Column of the target value."""
    lowest: float | None = None
    """Smallest possible value; None for the minimum of the training data."""
    highest: float | None = None
    """Largest possible value; None for the maximum of the training data."""
    scale: bool = False
    """Rescale targets to the range from 0 (`lowest`) to 1 (`highest`) in training. BERT uses unscaled targets."""
    clip: bool = False
    """Clip predictions to the range from `lowest` to `highest`."""
    both_orders: bool = False
    """Train on every pair in both orders, for symmetric tasks such as sentence similarity (ELECTRA)."""

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        columns = text_columns(row)
        return {**columns, "label": "label"} if columns is not None and isinstance(row.get("label"), float) else None

    def resolve(self, train: Table) -> "Regression":
        values = [train.number(index, self.label) for index in range(len(train))]
        lowest = min(values) if self.lowest is None else self.lowest
        highest = max(values) if self.highest is None else self.highest
        if min(values) == max(values):
            raise InputError(
                f"{train.name}: column {self.label!r} is {lowest:g} in every row; at least 2 distinct values are needed"
            )
        if lowest >= highest:
            raise InputError(f"task.lowest is {lowest:g} and task.highest is {highest:g}; lowest must be smaller")
        return self.changed(lowest=lowest, highest=highest)

    def head(self, model: ModelConfig) -> HeadConfig:
        return classifier_head(model, (self.label,))

    def examples(self, table: Table, *, has_targets: bool = True) -> list[ValuedText]:
        return [
            ValuedText(texts.text, texts.pair, table.number(index, self.label) if has_targets else math.nan)
            for index, texts in enumerate(read_texts(table, self.text, self.pair))
        ]

    def features(self, examples: Sequence[ValuedText], encoding: Encoding) -> Features:
        values = np.array([example.value for example in examples], dtype=np.float64)
        lowest, span = value_scale(self.lowest, self.highest, scale=self.scale)
        return text_features(examples, encoding, {"value": ((values - lowest) / span).astype(np.float32)})

    def augment(self, examples: Sequence[ValuedText]) -> list[ValuedText]:
        return in_both_orders(examples, has_pairs=self.pair is not None) if self.both_orders else list(examples)

    def objective(self, examples: Sequence[ValuedText]) -> Values:
        return Values()

    def answers(
        self, examples: Sequence[ValuedText], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        return value_answers(outputs, self.lowest, self.highest, scale=self.scale, clip=self.clip)

    def evaluate(self, examples: Sequence[ValuedText], answers: Sequence[AnswerData]) -> Evaluation:
        predicted = np.array([answer["answer"] for answer in answers])
        return evaluate_values(predicted, np.array([example.value for example in examples]), self.metric)

    def gold(self, example: ValuedText) -> float:
        return example.value

    def error(self, example: ValuedText, answer: AnswerData) -> float:
        """Return the absolute error."""
        return abs(float(answer["answer"]) - example.value)
