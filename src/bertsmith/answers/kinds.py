"""The kinds of tasks a folder can answer, each as its task.json describes it: rows → sequences → answers.

The same functions as those of the tasks that learn (bertsmith.tasks), so that the answers are the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from bertsmith.answers.choice import choice_answers, choice_features, read_choice
from bertsmith.answers.embedding import asked_texts, embedding_answers, embedding_features, embedding_row
from bertsmith.answers.sequences import Features, TextEncoding
from bertsmith.answers.spans import WindowFeatures, asked_question, span_answers, window_features
from bertsmith.answers.tagging import asked_words, document_numbers, scheme_of, tag_answers, tag_features
from bertsmith.answers.texts import class_answers, label_answers, read_texts, text_features, value_answers
from bertsmith.errors import InputError, nearest
from bertsmith.text.rows import Table, row_of


class Settings(dict[str, Any]):
    """The settings of a task, and a sentence where one is not there."""

    def __missing__(self, name: str) -> Any:
        raise InputError(f"task.json does not say task.{name}; export the model again with this version of Bertsmith")


class Kind(ABC):
    """One kind of task with its settings."""

    roles: ClassVar[tuple[str, ...]]
    """The settings that name columns of the input, in the order in which a tuple gives them."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.task = Settings(task)

    def row(self, given: Any) -> dict[str, Any]:
        """What a person gives for one prediction as a row."""
        return row_of(given, [self.task[role] for role in self.roles if self.task[role] is not None])

    @abstractmethod
    def examples(self, table: Table) -> list[Any]:
        """The rows of a table, checked."""

    @abstractmethod
    def features(self, examples: Sequence[Any], encoding: TextEncoding) -> Features:
        """The sequences of examples."""

    @abstractmethod
    def answers(
        self, examples: Sequence[Any], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        """What the outputs mean, as `bertsmith.tasks.base.Task.answers` says it; outputs item by item."""


class _Texts(Kind):
    """Kinds that read a text or a pair of texts as one sequence."""

    roles = ("text", "pair")

    def examples(self, table: Table) -> list[Any]:
        return list(read_texts(table, self.task["text"], self.task["pair"]))

    def features(self, examples: Sequence[Any], encoding: TextEncoding) -> Features:
        return text_features(examples, encoding, {})


class Classification(_Texts):
    def answers(
        self, examples: Sequence[Any], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        return class_answers(outputs, self.task["labels"])


class MultiLabel(_Texts):
    def answers(
        self, examples: Sequence[Any], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        return label_answers(outputs, self.task["labels"], self.task["threshold"])


class Regression(_Texts):
    def answers(
        self, examples: Sequence[Any], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        task = self.task
        return value_answers(outputs, task["lowest"], task["highest"], scale=task["scale"], clip=task["clip"])


class Choice(Kind):
    roles = ("context", "question", "start", "choices")

    def examples(self, table: Table) -> list[Any]:
        columns = {role: self.task[role] for role in self.roles}
        return [read_choice(table, index, **columns) for index in range(len(table))]

    def features(self, examples: Sequence[Any], encoding: TextEncoding) -> Features:
        return choice_features(examples, encoding, self.task["keep"], has_question=self.task["question"] is not None)

    def answers(
        self, examples: Sequence[Any], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        return choice_answers(examples, outputs)


class Tagging(Kind):
    roles = ("words",)

    def row(self, given: Any) -> dict[str, Any]:
        # what is asked by itself stands in no document
        return dict(given) if isinstance(given, Mapping) else {self.task["words"]: given, self.task["document"]: None}

    def examples(self, table: Table) -> list[Any]:
        words = self.task["words"]
        numbers = document_numbers(table, words, self.task["document"])
        return [asked_words(table, index, words, document) for index, document in enumerate(numbers)]

    def features(self, examples: Sequence[Any], encoding: TextEncoding) -> Features:
        words, documents = ([getattr(example, name) for example in examples] for name in ("words", "document"))
        return tag_features(words, documents, None, encoding, has_context=self.task["context"] == "document")

    def answers(
        self, examples: Sequence[Any], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        labels = self.task["labels"]
        has_chunks = (self.task["scheme"] or scheme_of(labels)) != "plain"
        return tag_answers(examples, features, outputs, labels, has_chunks=has_chunks)


class Spans(Kind):
    roles = ("question", "context")

    def examples(self, table: Table) -> list[Any]:
        columns = {role: self.task[role] for role in ("id", "question", "context")}
        return [asked_question(table, index, **columns) for index in range(len(table))]

    def features(self, examples: Sequence[Any], encoding: TextEncoding) -> WindowFeatures:
        return window_features(examples, encoding, self.task["stride"], self.task["question_length"])

    def answers(
        self, examples: Sequence[Any], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        assert isinstance(features, WindowFeatures)
        names = ("n_best", "longest", "null_threshold", "may_be_unanswered")
        return span_answers(examples, features, outputs, **{name: self.task[name] for name in names})


class Embedding(Kind):
    roles = ("text", "pair")

    def row(self, given: Any) -> dict[str, Any]:
        return embedding_row(given, self.task["text"], self.task["pair"])

    def examples(self, table: Table) -> list[Any]:
        return [asked_texts(table, index, self.task["text"], self.task["pair"]) for index in range(len(table))]

    def features(self, examples: Sequence[Any], encoding: TextEncoding) -> Features:
        return embedding_features(examples, encoding)

    def answers(
        self, examples: Sequence[Any], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        return embedding_answers(examples, outputs, all_alike=self.task["label"] is None)


KINDS: dict[str, type[Kind]] = {
    "classification": Classification,
    "multi_label": MultiLabel,
    "regression": Regression,
    "choice": Choice,
    "tagging": Tagging,
    "spans": Spans,
    "embedding": Embedding,
}


def kind_of(kept: Mapping[str, Any]) -> Kind:
    """The kind of task that the content of a task.json describes."""
    task = kept.get("task")
    if not isinstance(task, Mapping):
        raise InputError("task.json does not say task; export the model again with this version of Bertsmith")
    name = str(Settings(task)["kind"])
    if name not in KINDS:
        raise InputError(f"task.kind is {name!r}; {nearest(name, KINDS)}")
    return KINDS[name](task)
