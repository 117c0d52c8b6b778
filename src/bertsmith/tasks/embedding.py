"""Vectors of texts that lie close together where the texts are alike."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from bertsmith.answers.embedding import (
    EmbeddingExample,
    embedding_answers,
    embedding_features,
    embedding_row,
    read_embedding_texts,
    unit,
)
from bertsmith.answers.sequences import Answer, Features
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import EmbedderConfig
from bertsmith.objectives.embedding import Contrastive, InBatch, Ranking, Similarity
from bertsmith.objectives.supervised import Supervised
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData, Task
from bertsmith.tasks.metrics.ranking import (
    evaluate_likeness,
    evaluate_retrieval,
    evaluate_similarity,
    evaluate_spread,
)
from bertsmith.tasks.texts import label_name, text_columns
from bertsmith.text.rows import Table

Columns = dict[str, str | None]

_LABELS = ("label", "score", "similarity")


def embedding_columns(row: RowData) -> Columns:
    """The columns of text, pair, negative and label that a row has under their usual names; None for those it lacks."""
    found: Columns = dict.fromkeys(("text", "pair", "negative", "label"))
    if "anchor" in row:
        return found | {
            "text": "anchor",
            "pair": "positive" if "positive" in row else None,
            "negative": "negative" if "negative" in row else None,
        }
    found |= text_columns(row) or {}
    if found["pair"] is not None:
        found["label"] = next((name for name in _LABELS if name in row), None)
    return found


def usual_loss(
    train: Table, pair: str | None, label: str | None
) -> Literal["in_batch", "similarity", "contrastive", "dropout"]:
    """What is learned from such columns, unless told otherwise."""
    if pair is None:
        return "dropout"
    if label is None:
        return "in_batch"
    names = (train.value(index, label) for index in range(len(train)))
    return "similarity" if any(_is_fraction(value) for value in names) else "contrastive"


def alike_labels(train: Table, column: str, told: tuple[str, ...]) -> tuple[str, ...]:
    """The labels of a column that mean that two texts are alike: those told, or where it is plain; else a sentence."""
    names = {likeness_name(train, index, column) for index in range(len(train))}
    if any(name in names for name in told):
        return told
    if told:
        raise InputError(
            f"task.alike is {', '.join(told)}, and no row of {train.name} has that in {column!r}; it has "
            f"{', '.join(sorted(names))}"
        )
    if names == {"0", "1"}:
        return ("1",)
    if "entailment" in names:
        return ("entailment",)
    raise InputError(
        f"{train.name}: column {column!r} has the labels {', '.join(sorted(names))}; say with task.alike which of them "
        "mean that two texts are alike"
    )


def likeness_name(table: Table, index: int, column: str) -> str:
    """The label of a row as a name; true and false are 1 and 0."""
    value = table.value(index, column)
    return str(int(value)) if isinstance(value, bool) else label_name(table, index, column)


def _is_fraction(value: Any) -> bool:
    """Whether this is a number that is not written as a whole one, as text or not."""
    if not isinstance(value, str):
        return isinstance(value, float)
    try:
        float(value)
    except ValueError:
        return False
    return not value.strip().removeprefix("-").isdecimal()


Loss = Literal["in_batch", "similarity", "ranking", "contrastive", "dropout"]


class TextEmbedding(Task[EmbeddingExample]):
    """Give texts vectors, to be compared by their cosine."""

    kind: Literal["embedding"] = "embedding"
    text: str | None = None
    """The column of the text; None for what the usual names of columns show …"""
    pair: str | None = None
    """… and of the second one, which is like it or is compared with it …"""
    negative: str | None = None
    """… and of one that is unlike it."""
    label: str | None = None
    """The column that says how alike the two are, by a number or a label; None where all are alike."""
    loss: Loss | None = None
    """What is learned: "in_batch" that a text finds its like among those of the micro-batch, "similarity" that the
    cosine is the number given, "ranking" that cosines are in the order of the numbers, "contrastive" that like pairs
    are close and unlike ones apart, "dropout" (SimCSE) that a text finds itself under other dropout. None for what
    the columns show."""
    alike: tuple[str, ...] = ()
    """The labels that mean that two texts are alike; empty for 1 of 0 and 1, or entailment."""
    lowest: float | None = None
    """The number that stands for nothing alike; None for the least of the training data."""
    highest: float | None = None
    """The one that stands for all the same; None for the greatest."""
    scale: float = Field(default=20.0, gt=0)
    """What cosines are multiplied by in "in_batch", "dropout" and "ranking": 1 / temperature."""
    margin: float = Field(default=0.5, gt=0, le=2)
    """How far apart unlike texts must be, as 1 − cosine, in "contrastive"."""
    symmetric: bool = False
    """Whether in "in_batch" the likes must find their texts as well."""

    roles: ClassVar[tuple[str, ...]] = ("text", "pair")
    target_roles: ClassVar[tuple[str, ...]] = ("negative", "label")

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        if "anchor" not in row or "positive" not in row:
            return None
        return {role: name for role, name in embedding_columns(row).items() if name is not None}

    def resolve(self, train: Table) -> "TextEmbedding":
        task = self
        if self.text is None:
            found = embedding_columns(train.rows[0] if len(train) else {})
            if found["text"] is None:
                columns = ", ".join(train.columns)
                raise InputError(f"{train.name} has the columns {columns}; name that of the text with --column text=…")
            asked = {role: getattr(self, role) or name for role, name in found.items()}
            task = self.changed(**asked)
        loss = task.loss or usual_loss(train, task.pair, task.label)
        needed = {"in_batch": ("pair",), "dropout": ()}.get(loss, ("pair", "label"))
        for role in needed:
            if getattr(task, role) is None:
                raise InputError(f"task.loss is {loss!r}, which needs task.{role}: the name of a column")
        changes: dict[str, Any] = {"loss": loss}
        if task.label is not None and loss in ("in_batch", "contrastive"):
            changes["alike"] = alike_labels(train, task.label, task.alike)
        if task.label is not None and loss in ("similarity", "ranking"):
            values = [train.number(index, task.label) for index in range(len(train))]
            changes["lowest"] = min(values) if task.lowest is None else task.lowest
            changes["highest"] = max(values) if task.highest is None else task.highest
            if changes["lowest"] >= changes["highest"]:
                raise InputError(
                    f"{train.name}: column {task.label!r} goes from {changes['lowest']:g} to {changes['highest']:g}; "
                    "at least 2 different numbers are needed"
                )
        return task.changed(**changes)

    def head(self, model: ModelConfig) -> HeadConfig:
        return EmbedderConfig()

    def examples(self, table: Table, *, has_targets: bool = True) -> list[EmbeddingExample]:
        if not has_targets:
            return [read_embedding_texts(table, index, str(self.text), self.pair) for index in range(len(table))]
        columns = self._columns(table)
        texts = [name for name in (columns["text"], columns["pair"], columns["negative"]) if name is not None]
        label = columns["label"]
        task = self._of_range(table, label)
        return [
            EmbeddingExample(
                tuple(table.text(index, name) for name in texts),
                math.nan if label is None else task._value(table, index, label),
            )
            for index in range(len(table))
        ]

    def texts(self, examples: Sequence[EmbeddingExample]) -> Iterator[str]:
        return (text for example in examples for text in example.texts)

    def augment(self, examples: Sequence[EmbeddingExample]) -> list[EmbeddingExample]:
        """With "dropout" every text with itself; with "in_batch" only pairs of likes."""
        if self.loss == "dropout":
            return [EmbeddingExample((text, text)) for text in dict.fromkeys(self.texts(examples))]
        if self.loss == "in_batch" and self.label is not None:
            return [example for example in examples if example.value > 0.5]
        return list(examples)

    def features(self, examples: Sequence[EmbeddingExample], encoding: Encoding) -> Features:
        return embedding_features(examples, encoding)

    def objective(self, examples: Sequence[EmbeddingExample]) -> Supervised:
        if self.loss == "similarity":
            return Similarity()
        if self.loss == "ranking":
            return Ranking(scale=self.scale)
        if self.loss == "contrastive":
            return Contrastive(margin=self.margin)
        return InBatch(scale=self.scale, is_symmetric=self.symmetric)

    def answers(
        self, examples: Sequence[EmbeddingExample], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        is_told = any(not math.isnan(example.value) for example in examples)
        return embedding_answers(examples, outputs, all_alike=self.label is None and not is_told)

    def evaluate(self, examples: Sequence[EmbeddingExample], answers: Sequence[AnswerData]) -> Evaluation:
        if len(examples[0].texts) == 1:
            return evaluate_spread(unit(np.array([answer["answer"] for answer in answers])), self.metric)
        values = np.array([example.value for example in examples])
        if np.isnan(values).any():
            return evaluate_retrieval(np.array([answer["rank"] for answer in answers]), self.metric)
        cosines = np.array([answer["answer"] for answer in answers])
        if self.loss in ("similarity", "ranking") or not np.isin(values, (0, 1)).all():
            return evaluate_similarity(cosines, values, self.metric)
        return evaluate_likeness(cosines, values > 0.5, self.metric)

    def gold(self, example: EmbeddingExample) -> float | None:
        """How alike the texts of a pair are; None of a text alone, whose vector no one knows."""
        if len(example.texts) == 1:
            return None
        return 1.0 if math.isnan(example.value) else example.value

    def describe(self, example: EmbeddingExample) -> str:
        return " | ".join(" ".join(text.split()) for text in example.texts)

    def error(self, example: EmbeddingExample, answer: AnswerData) -> float:
        """How far the cosine is off; how far down the like was found; 0 of a text alone."""
        if len(example.texts) == 1:
            return 0.0
        if "rank" in answer:
            return 1 - 1 / float(answer["rank"])
        return abs(float(answer["answer"]) - example.value)

    def notices(self, examples: Sequence[EmbeddingExample]) -> list[str]:
        left_out = 0 if self.loss == "dropout" else len(examples) - len(self.augment(examples))
        return [f"{left_out} of {len(examples)} training pairs are not alike and are left out"] if left_out else []

    @property
    def takes_one_text(self) -> bool:
        return True

    def row(self, given: Any) -> dict[str, Any]:
        return embedding_row(given, str(self.text), self.pair)

    def _columns(self, table: Table) -> Columns:
        """The columns of a table: those of the task, or the usual ones where it has none of that name.

        What is learned from texts alone, or from pairs made of them, is often evaluated on pairs with numbers.
        """
        own = {"text": self.text, "pair": self.pair, "negative": self.negative, "label": self.label}
        if self.loss not in ("dropout", "in_batch") or not len(table) or self.text in table.rows[0]:
            return own
        found = embedding_columns(table.rows[0])
        return own if found["text"] is None else found

    def _of_range(self, table: Table, label: str | None) -> "TextEmbedding":
        """The task for a table whose column of numbers the training data did not have: they tell the range."""
        if label is None or label == self.label or self.alike:
            return self
        values = {table.number(index, label) for index in range(len(table))}
        # two numbers are no degrees: 0 and 1 would be labels
        return self.changed(lowest=min(values), highest=max(values)) if len(values) > 2 else self

    def _value(self, table: Table, index: int, column: str) -> float:
        if self.alike:
            return float(likeness_name(table, index, column) in self.alike)
        number = table.number(index, column)
        if self.lowest is None or self.highest is None:
            return number
        return (number - self.lowest) / (self.highest - self.lowest)
