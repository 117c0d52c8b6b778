"""The contract of a task: from the rows of a table to sequences and targets, and from scores to answers and metrics.

Table → examples → Features → (Objective, training) → outputs of the head → answers → Evaluation
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
from torch import Tensor

from bertsmith.answers.sequences import Answer, Features, TextEncoding, check_finite
from bertsmith.data.examples import ExampleConfig, TaskBatch
from bertsmith.data.inference import in_background, windows
from bertsmith.data.progress import Watch
from bertsmith.engines.base import Runner
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Supervised
from bertsmith.settings import Record
from bertsmith.tasks.outputs import item_outputs
from bertsmith.text.readers import is_visible
from bertsmith.text.rows import Table, row_of


class Encoding(TextEncoding):
    """Tokenizer and sequence settings of one model."""

    @classmethod
    def of(cls, model: Runner, length: int) -> "Encoding":
        """Return the encoding of a model; raise InputError if it does not support the length."""
        embedding = model.config.encoder.embedding
        if embedding.positions != "none" and length > embedding.max_length:
            raise InputError(f"sequences.length is {length}; the model takes at most {embedding.max_length}")
        return cls(model.require_tokenizer(), length, embedding.types > 1)


AnswerData = Mapping[str, Any]
"""An answer as JSON-ready data; "answer" is its short form."""
RowData = Mapping[str, Any]
"""A row of a table: cells by column."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a set of answers."""

    metric: str
    """Name of the main metric."""
    metrics: dict[str, float]
    """All metrics by name; fractions and correlations are in percent."""
    measure: Callable[[np.ndarray], float] | None = None
    """Computes the main metric on a subset of the examples, given by index; None if it has no bootstrap interval."""
    details: dict[str, object] = field(default_factory=dict)
    """Further values for result.json, such as BLEU's signature."""

    @property
    def score(self) -> float:
        return self.metrics[self.metric]


class PredictedLabel(NamedTuple):
    """The label that a model predicted for an example or for one word of it, as indices of labels."""

    target: int
    predicted: int
    confidence: float
    example: int
    """Index of the example."""
    word: int | None = None
    """Index of the word, for tasks that label words."""


@dataclass(frozen=True)
class PredictedLabels:
    """All predicted labels on a split."""

    labels: tuple[str, ...]
    items: Sequence[PredictedLabel]

    @property
    def counts(self) -> np.ndarray:
        """Confusion matrix (row: correct, column: predicted).

        Shape: (labels, labels).
        """
        counts = np.zeros((len(self.labels), len(self.labels)), dtype=np.int64)
        for item in self.items:
            counts[item.target, item.predicted] += 1
        return counts


Example = TypeVar("Example")


class Task(Record, ABC, Generic[Example]):
    """Settings of a kind of task, such as the columns it reads and the names of its labels.

    It is part of recipes and is stored in the folder of a fine-tuned model.
    """

    kind: str
    metric: str | None = None
    """Main metric, which selects the best checkpoint; None for the default of this kind of task."""
    name: str | None = None
    """Name of the GLUE task, which adds predictions in the format of the GLUE server; None for any other task."""

    roles: ClassVar[tuple[str, ...]]
    """Fields that name input columns, in the order in which a tuple gives their values."""
    target_roles: ClassVar[tuple[str, ...]]
    """Fields that name target columns; not needed for prediction."""

    def __class_getitem__(cls, example: Any) -> type[Self]:
        """Return the class itself; pydantic would create a class per type of example, which takes 0.2 s each."""
        return cls

    @property
    def input_columns(self) -> list[str]:
        """Names of the input columns."""
        return [column for column in (getattr(self, role) for role in self.roles) if column is not None]

    @property
    def takes_one_text(self) -> bool:
        """Whether an input is a single text."""
        return len(self.input_columns) == 1

    @classmethod
    @abstractmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        """Return the columns by role if a row looks like this kind of task, else None."""

    @abstractmethod
    def resolve(self, train: Table) -> Self:
        """Return the task with settings that depend on the training rows, such as the names of the labels."""

    @abstractmethod
    def head(self, model: ModelConfig) -> HeadConfig:
        """Return the config of the usual head for a model of this family."""

    @abstractmethod
    def examples(self, table: Table, *, has_targets: bool = True) -> list[Example]:
        """Read and check the rows of a table; errors name the row."""

    @abstractmethod
    def texts(self, examples: Sequence[Example]) -> Iterator[str]:
        """Yield all texts of examples, to learn a tokenizer from."""

    @abstractmethod
    def features(self, examples: Sequence[Example], encoding: Encoding) -> Features:
        """Return the sequences of examples and, if they have any, their targets."""

    @abstractmethod
    def objective(self, examples: Sequence[Example]) -> Supervised:
        """Return the objective to train with."""

    @abstractmethod
    def answers(
        self, examples: Sequence[Example], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        """Turn the outputs of the head into one answer per example, as JSON-ready data; "answer" is the short form.

        Shape: outputs are of the items of the features in their order: (outputs,) each from a head for sequences,
        (sequences of the item, outputs) where an item has several, (tokens, outputs) from a head for tokens.
        """

    @abstractmethod
    def evaluate(self, examples: Sequence[Example], answers: Sequence[AnswerData]) -> Evaluation:
        """Compute the metrics of answers."""

    @abstractmethod
    def gold(self, example: Example) -> Any:
        """Return the correct answer of an example, in the form of "answer"."""

    @abstractmethod
    def describe(self, example: Example) -> str:
        """Return the example as one line of text."""

    def describe_answer(self, example: Example, answer: Any) -> Any:
        """Return an answer, predicted or correct, for display."""
        return answer

    def error(self, example: Example, answer: AnswerData) -> float:
        """Return 0 for a correct answer, else the confidence of the model, to list the most confident errors."""
        return 0.0 if answer["answer"] == self.gold(example) else float(answer.get("score", 1.0))

    def predicted_labels(self, examples: Sequence[Example], answers: Sequence[AnswerData]) -> PredictedLabels | None:
        """Return every predicted label with the correct one; None if answers are not labels."""
        return None

    def describe_label(self, example: Example, label: PredictedLabel) -> tuple[str, str, str]:
        """Return the text of an example around the labelled word: before it, the word, after it."""
        return self.describe(example), "", ""

    def label_counts(self, examples: Sequence[Example]) -> Counter[str] | None:
        """Count the correct labels; None if answers are not labels."""
        return None

    def notices(self, examples: Sequence[Example]) -> list[str]:
        """Return one sentence for every peculiarity of the training examples."""
        return []

    def files(self, examples: Sequence[Example], answers: Sequence[AnswerData]) -> dict[str, str]:
        """Return the answers as files for the official scorer of the task, by file name."""
        return {}

    def is_empty(self, row: RowData) -> bool:
        """Whether a row has no text in any input column; rows without such a column are not empty."""
        columns = self.input_columns
        return bool(columns) and all(is_blank(row.get(column)) for column in columns)

    def input_key(self, row: RowData) -> str:
        """Return the input of a row as a key, to find rows with the same input."""
        return repr([row.get(column) for column in self.input_columns])

    def predict(
        self, model: Runner, examples: Sequence[Example], sequences: ExampleConfig, watch: Watch | None = None
    ) -> Sequence[Answer]:
        """Return a model's answers to examples; a thread tokenises them ahead of the model."""
        encoding = Encoding.of(model, sequences.length)
        parts = [examples] if self.compares_rows(examples) else list(windows(examples))
        answers: list[Answer] = []
        with model.evaluating():
            tokenised = in_background(self.features(part, encoding) for part in parts)
            for part, features in zip(parts, tokenised, strict=True):
                counter = _Counter(watch, len(answers), len(part) / max(1, len(features)), len(examples))
                outputs = item_outputs(model, features, sequences, counter)
                check_finite(outputs)
                answers += self.answers(part, features, outputs)
        return answers

    def compares_rows(self, examples: Sequence[Example]) -> bool:
        """Whether an answer depends on the other rows, so that all rows are answered together."""
        return False

    def evaluate_model(
        self, model: Runner, examples: Sequence[Example], sequences: ExampleConfig, watch: Watch | None = None
    ) -> tuple[Evaluation, Sequence[Answer]]:
        """Evaluate a model on examples; return its answers as well."""
        answers = self.predict(model, examples, sequences, watch)
        evaluation = self.evaluate(examples, answers)
        model_metrics = self.model_metrics(model, examples, sequences)
        return replace(evaluation, metrics={**evaluation.metrics, **model_metrics}), answers

    def model_metrics(self, model: Runner, examples: Sequence[Example], sequences: ExampleConfig) -> dict[str, float]:
        """Return metrics that need the model itself, not only its answers."""
        return {}

    def row(self, value: Any) -> dict[str, Any]:
        """Return the input of one prediction as a row; a text or tuple becomes a mapping by column."""
        return row_of(value, self.input_columns)

    def augment(self, examples: Sequence[Example]) -> list[Example]:
        """Return the training examples, with additional or rearranged ones if the task asks for them."""
        return list(examples)


class _Counter:
    """Report the number of examples after each batch; an example may have several items."""

    def __init__(self, watch: Watch | None, before: int, per_item: float, total: int) -> None:
        self.watch, self.done, self.per_item, self.total = watch, float(before), per_item, total

    def __call__(self, batch: TaskBatch, outputs: Tensor) -> None:
        self.done += self.per_item * len(batch.item)
        if self.watch is not None:
            self.watch(round(self.done), self.total)


def is_blank(value: Any) -> bool:
    """Whether a cell holds no visible text: a blank string, or a list of blank strings."""
    if isinstance(value, list | tuple):
        return all(map(is_blank, value))
    return isinstance(value, str) and not is_visible(value)
