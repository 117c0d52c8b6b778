"""Tasks of exported folders, read from task.json: rows → sequences → answers.

They use the functions of `bertsmith.answers`, as `bertsmith.tasks` does, so both return the same answers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from textwrap import shorten
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from bertsmith.answers.chart import ParsedWords, read_unparsed, tree_answers, tree_features
from bertsmith.answers.choice import ChoiceExample, choice_answers, choice_features, read_choice
from bertsmith.answers.embedding import (
    EmbeddingExample,
    embedding_answers,
    embedding_features,
    embedding_row,
    read_embedding_texts,
)
from bertsmith.answers.sequences import Answer, Features, TextEncoding
from bertsmith.answers.spans import SpanExample, WindowFeatures, read_passage_question, span_answers, window_features
from bertsmith.answers.tagging import (
    Scheme,
    TaggedWords,
    document_indices,
    read_sentence,
    tag_answers,
    tag_features,
    tagging_scheme,
)
from bertsmith.answers.texts import (
    TextExample,
    class_answers,
    label_answers,
    read_texts,
    text_features,
    value_answers,
)
from bertsmith.errors import InputError, nearest
from bertsmith.text.rows import Table, row_of

Example = TypeVar("Example")
Outputs = Sequence[np.ndarray]


@dataclass(frozen=True)
class ExportedTask(ABC, Generic[Example]):
    """A task of an exported folder; its fields are read from task.json."""

    input_fields: ClassVar[tuple[str, ...]]
    """Fields that name input columns, in the order of a tuple input."""

    def row(self, value: object) -> dict[str, Any]:
        """Convert the input of one prediction to a row."""
        columns = [getattr(self, name) for name in self.input_fields]
        return row_of(value, [column for column in columns if column is not None])

    @abstractmethod
    def examples(self, table: Table) -> list[Example]:
        """Read and check the rows of a table."""

    @abstractmethod
    def features(self, examples: Sequence[Example], encoding: TextEncoding) -> Features:
        """Encode examples as token sequences."""

    @abstractmethod
    def answers(self, examples: Sequence[Example], features: Features, outputs: Outputs) -> Sequence[Answer]:
        """Convert the outputs of the items of `features` to answers; see `bertsmith.tasks.base.Task.answers`."""


@dataclass(frozen=True)
class ExportedTextTask(ExportedTask[TextExample]):
    """A task that reads a text or a pair of texts as one sequence."""

    text: str
    pair: str | None
    input_fields = ("text", "pair")

    def examples(self, table: Table) -> list[TextExample]:
        return read_texts(table, self.text, self.pair)

    def features(self, examples: Sequence[TextExample], encoding: TextEncoding) -> Features:
        return text_features(examples, encoding, {})


@dataclass(frozen=True)
class ExportedClassification(ExportedTextTask):
    labels: Sequence[str]

    def answers(self, examples: Sequence[TextExample], features: Features, outputs: Outputs) -> Sequence[Answer]:
        return class_answers(outputs, self.labels)


@dataclass(frozen=True)
class ExportedMultiLabel(ExportedTextTask):
    labels: Sequence[str]
    threshold: float

    def answers(self, examples: Sequence[TextExample], features: Features, outputs: Outputs) -> Sequence[Answer]:
        return label_answers(outputs, self.labels, self.threshold)


@dataclass(frozen=True)
class ExportedRegression(ExportedTextTask):
    lowest: float | None
    highest: float | None
    scale: bool
    clip: bool

    def answers(self, examples: Sequence[TextExample], features: Features, outputs: Outputs) -> Sequence[Answer]:
        return value_answers(outputs, self.lowest, self.highest, scale=self.scale, clip=self.clip)


@dataclass(frozen=True)
class ExportedChoice(ExportedTask[ChoiceExample]):
    context: str | None
    question: str | None
    start: str | None
    choices: str
    keep: Literal["end", "beginning"]
    input_fields = ("context", "question", "start", "choices")

    def examples(self, table: Table) -> list[ChoiceExample]:
        return [
            read_choice(
                table, index, context=self.context, question=self.question, start=self.start, choices=self.choices
            )
            for index in range(len(table))
        ]

    def features(self, examples: Sequence[ChoiceExample], encoding: TextEncoding) -> Features:
        return choice_features(examples, encoding, self.keep, has_question=self.question is not None)

    def answers(self, examples: Sequence[ChoiceExample], features: Features, outputs: Outputs) -> Sequence[Answer]:
        return choice_answers(examples, outputs)


@dataclass(frozen=True)
class ExportedTagging(ExportedTask[TaggedWords]):
    words: str
    document: str
    labels: Sequence[str]
    scheme: Scheme | None
    context: Literal["sentence", "document"]
    input_fields = ("words",)

    def row(self, value: object) -> dict[str, Any]:
        # a single input belongs to no document
        return dict(value) if isinstance(value, Mapping) else {self.words: value, self.document: None}

    def examples(self, table: Table) -> list[TaggedWords]:
        documents = document_indices(table, self.words, self.document)
        return [read_sentence(table, index, self.words, document) for index, document in enumerate(documents)]

    def features(self, examples: Sequence[TaggedWords], encoding: TextEncoding) -> Features:
        words = [example.words for example in examples]
        documents = [example.document for example in examples]
        return tag_features(words, documents, None, encoding, has_context=self.context == "document")

    def answers(self, examples: Sequence[TaggedWords], features: Features, outputs: Outputs) -> Sequence[Answer]:
        has_chunks = (self.scheme or tagging_scheme(self.labels)) != "plain"
        return tag_answers(examples, features, outputs, self.labels, has_chunks=has_chunks)


@dataclass(frozen=True)
class ExportedParsing(ExportedTask[ParsedWords]):
    words: str
    tree: str
    labels: Sequence[str]
    input_fields = ("words",)

    def row(self, value: object) -> dict[str, Any]:
        # a list is one sentence, not a tuple of columns
        return dict(value) if isinstance(value, Mapping) else {self.words: value}

    def examples(self, table: Table) -> list[ParsedWords]:
        return [read_unparsed(table, index, self.words, self.tree) for index in range(len(table))]

    def features(self, examples: Sequence[ParsedWords], encoding: TextEncoding) -> Features:
        return tree_features(examples, None, encoding)

    def answers(self, examples: Sequence[ParsedWords], features: Features, outputs: Outputs) -> Sequence[Answer]:
        return tree_answers(examples, features, outputs, self.labels)


@dataclass(frozen=True)
class ExportedSpans(ExportedTask[SpanExample]):
    id: str
    question: str
    context: str
    stride: int
    question_length: int
    n_best: int
    max_answer_length: int
    null_threshold: float
    may_be_unanswered: bool | None
    input_fields = ("question", "context")

    def examples(self, table: Table) -> list[SpanExample]:
        return [
            read_passage_question(table, index, id=self.id, question=self.question, context=self.context)
            for index in range(len(table))
        ]

    def features(self, examples: Sequence[SpanExample], encoding: TextEncoding) -> WindowFeatures:
        return window_features(examples, encoding, self.stride, self.question_length)

    def answers(self, examples: Sequence[SpanExample], features: Features, outputs: Outputs) -> Sequence[Answer]:
        assert isinstance(features, WindowFeatures)
        return span_answers(
            examples,
            features,
            outputs,
            n_best=self.n_best,
            max_answer_length=self.max_answer_length,
            null_threshold=self.null_threshold,
            may_be_unanswered=self.may_be_unanswered,
        )


@dataclass(frozen=True)
class ExportedEmbedding(ExportedTask[EmbeddingExample]):
    text: str
    pair: str | None
    label: str | None
    input_fields = ("text", "pair")

    def row(self, value: object) -> dict[str, Any]:
        return embedding_row(value, self.text, self.pair)

    def examples(self, table: Table) -> list[EmbeddingExample]:
        return [read_embedding_texts(table, index, self.text, self.pair) for index in range(len(table))]

    def features(self, examples: Sequence[EmbeddingExample], encoding: TextEncoding) -> Features:
        return embedding_features(examples, encoding)

    def answers(self, examples: Sequence[EmbeddingExample], features: Features, outputs: Outputs) -> Sequence[Answer]:
        return embedding_answers(examples, outputs, all_alike=self.label is None)


EXPORTED_TASKS: dict[str, type[ExportedTask[Any]]] = {
    "classification": ExportedClassification,
    "multi_label": ExportedMultiLabel,
    "regression": ExportedRegression,
    "choice": ExportedChoice,
    "tagging": ExportedTagging,
    "parsing": ExportedParsing,
    "spans": ExportedSpans,
    "embedding": ExportedEmbedding,
}

_EXPORT_AGAIN = "export the model again with this version of Bertsmith"


def _has_type(value: object, hint: Any) -> bool:
    """Return whether a value of task.json has the type of its field; numbers must not be negative."""
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return value in arguments
    if get_origin(hint) is Sequence:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if arguments:  # a union
        return any(_has_type(value, argument) for argument in arguments)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, hint)


def read_task(content: Mapping[str, object]) -> ExportedTask[Any]:
    """Return the task described by the content of a task.json."""
    task = content.get("task")
    if not isinstance(task, Mapping):
        raise InputError(f"task.json has no task; {_EXPORT_AGAIN}")
    if "kind" not in task:
        raise InputError(f"task.json has no task.kind; {_EXPORT_AGAIN}")
    kind = str(task["kind"])
    if kind not in EXPORTED_TASKS:
        raise InputError(f"task.kind is {kind!r}; {nearest(kind, EXPORTED_TASKS)}")
    names = [field.name for field in fields(EXPORTED_TASKS[kind])]
    missing = [name for name in names if name not in task]
    if missing:
        raise InputError(f"task.json has no task.{missing[0]}; {_EXPORT_AGAIN}")
    hints = get_type_hints(EXPORTED_TASKS[kind])
    for name in names:
        if not _has_type(task[name], hints[name]):
            raise InputError(f"task.json: task.{name} is {shorten(repr(task[name]), 60)}; {_EXPORT_AGAIN}")
    return EXPORTED_TASKS[kind](**{name: task[name] for name in names})
