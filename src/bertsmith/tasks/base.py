"""The contract of a task: from the rows of a table to sequences and targets, and from scores to answers and figures.

Table → examples → Features → (Objective, training) → outputs of the head → answers → Evaluation
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from bertsmith.answers.sequences import Answer, Features, TextEncoding
from bertsmith.engines.base import Runner
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Supervised
from bertsmith.settings import Record
from bertsmith.text.rows import Table, row_of


class Encoding(TextEncoding):
    """How texts become the sequences of one model."""

    @classmethod
    def of(cls, model: Runner, length: int) -> "Encoding":
        """That of a model, with at most so many tokens; a sentence if it does not take as many."""
        embedding = model.config.encoder.embedding
        if embedding.positions != "none" and length > embedding.longest:
            raise InputError(f"sequences.length is {length}; the model takes at most {embedding.longest}")
        return cls(model.require_tokenizer(), length, embedding.types > 1)


@dataclass(frozen=True)
class Evaluation:
    """How good some answers are."""

    metric: str
    """The name of the main figure."""
    metrics: dict[str, float]
    """All of them, in percent where they are shares or correlations."""
    measure: Callable[[np.ndarray], float]
    """The main figure over some of the examples, given by their numbers, repeats allowed: for an interval."""

    @property
    def score(self) -> float:
        return self.metrics[self.metric]


Example = TypeVar("Example")


class Task(Record, ABC, Generic[Example]):
    """One kind of task with what it must know of its data: which columns it reads, which labels there are.

    A record, so that it stands in recipes and in the folder of a fine-tuned model. `kind` is its name in the table.
    """

    kind: str
    metric: str | None = None
    """The main figure, by which the best weights are chosen; None for the usual one of this kind."""
    name: str | None = None
    """Which task of GLUE it is, where it is one: for the files its server takes. None for no such task."""

    roles: ClassVar[tuple[str, ...]]
    """The fields that name columns of the input, in the order in which a tuple gives them …"""
    target_roles: ClassVar[tuple[str, ...]]
    """… and those that name what is right, and what else is not asked of a person who wants an answer."""

    @property
    def input_columns(self) -> list[str]:
        """The columns of the input."""
        return [column for column in (getattr(self, role) for role in self.roles) if column is not None]

    @property
    def takes_one_text(self) -> bool:
        """Whether one text is enough of an input."""
        return len(self.input_columns) == 1

    @classmethod
    @abstractmethod
    def find_columns(cls, row: Mapping[str, Any]) -> dict[str, str] | None:
        """The columns by role if a row looks like one of this kind of task, else None."""

    @abstractmethod
    def resolve(self, train: Table) -> Self:
        """The task with what only the training rows can tell, such as the names of the labels."""

    @abstractmethod
    def head(self, model: ModelConfig) -> HeadConfig:
        """The head for this task as the papers put it on a model of this family."""

    @abstractmethod
    def examples(self, table: Table, *, has_targets: bool = True) -> list[Example]:
        """The rows of a table, checked: what is wrong with one is said with its place."""

    @abstractmethod
    def texts(self, examples: Sequence[Example]) -> Iterator[str]:
        """All texts of examples, for a tokenizer that is learned from them."""

    @abstractmethod
    def features(self, examples: Sequence[Example], encoding: Encoding) -> Features:
        """The sequences of examples and, where they have any, their targets."""

    @abstractmethod
    def objective(self, examples: Sequence[Example]) -> Supervised:
        """What is learned from training examples."""

    @abstractmethod
    def answers(
        self, examples: Sequence[Example], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        """What the outputs of the head mean, example by example, as JSON-ready data; "answer" is the short form.

        Shape: outputs are of the items of the features in their order: (outputs,) each from a head for sequences,
        (sequences of the item, outputs) where an item has several, (tokens, outputs) from a head for tokens.
        """

    @abstractmethod
    def evaluate(self, examples: Sequence[Example], answers: Sequence[Mapping[str, Any]]) -> Evaluation:
        """How good the answers are."""

    @abstractmethod
    def gold(self, example: Example) -> Any:
        """The right answer of an example, in the form of "answer"."""

    @abstractmethod
    def describe(self, example: Example) -> str:
        """An example as a person reads it, in one line."""

    def describe_answer(self, example: Example, answer: Any) -> Any:
        """An answer to an example, or the right one, as a person reads it."""
        return answer

    def error(self, example: Example, answer: Mapping[str, Any]) -> float:
        """How bad an answer is, for a list of the worst: 0 if it is right, else how sure the model was of it."""
        return 0.0 if answer["answer"] == self.gold(example) else float(answer.get("score", 1.0))

    def confusion(
        self, examples: Sequence[Example], answers: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[str, ...], np.ndarray] | None:
        """The labels and how often each, by row, was answered with each, by column; None where there are none."""
        return None

    def label_counts(self, examples: Sequence[Example]) -> Counter[str] | None:
        """How often each label is right; None where answers are no labels."""
        return None

    def notices(self, examples: Sequence[Example]) -> list[str]:
        """What a person should know of training examples before anything is learned from them, one sentence each."""
        return []

    def files(self, examples: Sequence[Example], answers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """The answers as files that the task's own scorer reads, by file name."""
        return {}

    def row(self, given: Any) -> dict[str, Any]:
        """What a person gives for one prediction as a row: a mapping as it is, else its values by role."""
        return row_of(given, self.input_columns)

    def augment(self, examples: Sequence[Example]) -> list[Example]:
        """What is trained on, given the training examples."""
        return list(examples)
