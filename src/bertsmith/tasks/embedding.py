"""Sentence embeddings: train vectors whose cosine measures the similarity of texts."""

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
from bertsmith.models.heads.base import FeaturesConfig
from bertsmith.models.heads.task import EmbedderConfig
from bertsmith.objectives.embedding import Contrastive, InBatch, Ranking, Similarity, TargetVectors
from bertsmith.objectives.supervised import Supervised
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData, Task
from bertsmith.tasks.metrics.ranking import (
    evaluate_pair_labels,
    evaluate_retrieval,
    evaluate_similarity,
    evaluate_target_vectors,
    evaluate_uniformity,
)
from bertsmith.tasks.texts import label_name, text_columns
from bertsmith.text.rows import Table

Columns = dict[str, str | None]

_LABEL_COLUMNS = ("label", "score", "similarity")


def embedding_columns(row: RowData) -> Columns:
    """Find the columns of text, pair, negative, label and vector by their usual names; None for those a row lacks."""
    columns: Columns = dict.fromkeys(("text", "pair", "negative", "label", "vector"))
    if "anchor" in row:
        return columns | {
            "text": "anchor",
            "pair": "positive" if "positive" in row else None,
            "negative": "negative" if "negative" in row else None,
        }
    columns |= text_columns(row) or {}
    if columns["pair"] is not None:
        columns["label"] = next((name for name in _LABEL_COLUMNS if name in row), None)
    elif "vector" in row:
        columns["vector"] = "vector"
    return columns


def default_loss(
    train: Table, pair: str | None, label: str | None, vector: str | None
) -> Literal["in_batch", "similarity", "contrastive", "dropout", "vector"]:
    """Return the default loss for the columns of the training data."""
    if vector is not None:
        return "vector"
    if pair is None:
        return "dropout"
    if label is None:
        return "in_batch"
    values = (train.value(index, label) for index in range(len(train)))
    return "similarity" if any(_is_fraction(value) for value in values) else "contrastive"


def alike_labels(train: Table, column: str, alike: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels that mark similar pairs: `alike`, or "1" or "entailment"; raise InputError if none is known."""
    names = {_pair_label(train, index, column) for index in range(len(train))}
    if any(name in names for name in alike):
        return alike
    if alike:
        raise InputError(
            f"task.alike is {', '.join(alike)}, but no row of {train.name} has such a label in {column!r}; its labels "
            f"are {', '.join(sorted(names))}"
        )
    if names == {"0", "1"}:
        return ("1",)
    if "entailment" in names:
        return ("entailment",)
    raise InputError(
        f"{train.name}: column {column!r} has the labels {', '.join(sorted(names))}; set task.alike to the labels of "
        "similar pairs"
    )


def _pair_label(table: Table, index: int, column: str) -> str:
    """Return the label of a pair as a string; true and false become "1" and "0"."""
    value = table.value(index, column)
    return str(int(value)) if isinstance(value, bool) else label_name(table, index, column)


def _is_fraction(value: Any) -> bool:
    """Whether a value is a float, or a string with a number that is not an integer."""
    if not isinstance(value, str):
        return isinstance(value, float)
    try:
        float(value)
    except ValueError:
        return False
    return not value.strip().removeprefix("-").isdecimal()


Loss = Literal["in_batch", "similarity", "ranking", "contrastive", "dropout", "vector"]
_REQUIRED_ROLES = {"in_batch": ("pair",), "dropout": (), "vector": ("vector",)}
"""Columns that a loss needs besides the text; others need a pair and a label."""


class TextEmbedding(Task[EmbeddingExample]):
    """Embed texts as vectors that are compared by cosine similarity."""

    kind: Literal["embedding"] = "embedding"
    text: str | None = None
    """Column of the text; None to find the columns by their usual names."""
    pair: str | None = None
    """Column of the second text: a positive, or the text to compare with if there is a label."""
    negative: str | None = None
    """Column of a hard negative."""
    label: str | None = None
    """Column of the similarity of a pair, a score or a label; None if all pairs are positives."""
    vector: str | None = None
    """Column of the vector that a text should get, such as the one of a larger model."""
    vector_width: int | None = Field(default=None, gt=0)
    """Width of those vectors; None for the width in the training data."""
    loss: Loss | None = None
    """Training loss. "in_batch": each text retrieves its positive among the texts of the micro-batch. "similarity":
    regression of the cosine on the score. "ranking": cosines are ordered like the scores. "contrastive": similar pairs
    are pulled together, dissimilar ones pushed apart. "dropout": each text retrieves itself under another dropout mask
    (SimCSE). "vector": each text gets the vector of its row. None selects by the columns."""
    alike: tuple[str, ...] = ()
    """Labels of similar pairs; empty for "1" if the labels are 0 and 1, or for "entailment"."""
    lowest: float | None = None
    """Score of completely dissimilar texts; None for the minimum of the training data."""
    highest: float | None = None
    """Score of equivalent texts; None for the maximum of the training data."""
    scale: float = Field(default=20.0, gt=0)
    """Factor on cosines in "in_batch", "dropout" and "ranking": 1 / temperature."""
    margin: float = Field(default=0.5, gt=0, le=2)
    """Minimum distance of dissimilar texts, as 1 − cosine, in "contrastive"."""
    symmetric: bool = False
    """Whether "in_batch" also trains positives to retrieve their texts."""

    roles: ClassVar[tuple[str, ...]] = ("text", "pair")
    target_roles: ClassVar[tuple[str, ...]] = ("negative", "label", "vector")

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        columns = {role: name for role, name in embedding_columns(row).items() if name is not None}
        is_embedding = ("anchor" in row and "positive" in row) or {"text", "vector"} <= columns.keys()
        return columns if is_embedding else None

    def resolve(self, train: Table) -> "TextEmbedding":
        task = self
        if self.text is None:
            columns = embedding_columns(train.rows[0] if len(train) else {})
            if columns["text"] is None:
                names = ", ".join(train.columns)
                raise InputError(f"{train.name} has the columns {names}; select the text with --column text=…")
            task = self.changed(**{role: getattr(self, role) or name for role, name in columns.items()})
        loss = task.loss or default_loss(train, task.pair, task.label, task.vector)
        for role in _REQUIRED_ROLES.get(loss, ("pair", "label")):
            if getattr(task, role) is None:
                raise InputError(f"task.loss is {loss!r}, which needs task.{role}: the name of a column")
        changes: dict[str, Any] = {"loss": loss}
        if loss == "vector" and task.vector is not None and len(train):
            changes["vector_width"] = len(train.vector(0, task.vector))
        if task.label is not None and loss in ("in_batch", "contrastive"):
            changes["alike"] = alike_labels(train, task.label, task.alike)
        if task.label is not None and loss in ("similarity", "ranking"):
            values = [train.number(index, task.label) for index in range(len(train))]
            changes["lowest"] = min(values) if task.lowest is None else task.lowest
            changes["highest"] = max(values) if task.highest is None else task.highest
            if changes["lowest"] >= changes["highest"]:
                raise InputError(
                    f"{train.name}: column {task.label!r} ranges from {changes['lowest']:g} to "
                    f"{changes['highest']:g}; at least 2 different numbers are needed"
                )
        return task.changed(**changes)

    def head(self, model: ModelConfig) -> HeadConfig:
        """Return the model's own embedder if it pools the last hidden states, else a new one."""
        own = model.embedder
        if own is not None and own.features == FeaturesConfig() and self.vector_width is None:
            return own
        is_projected = self.vector_width not in (None, model.encoder.width)
        return EmbedderConfig(projection=self.vector_width if is_projected else None)

    def examples(self, table: Table, *, has_targets: bool = True) -> list[EmbeddingExample]:
        if not has_targets:
            return [read_embedding_texts(table, index, str(self.text), self.pair) for index in range(len(table))]
        columns = self._columns(table)
        if columns["vector"] is not None:
            return self._with_vectors(table, str(columns["text"]), columns["vector"])
        texts = [name for name in (columns["text"], columns["pair"], columns["negative"]) if name is not None]
        label = columns["label"]
        task = self._with_range(table, label)
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
        """Pair every text with itself for "dropout"; keep only positive pairs for "in_batch"."""
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
        if self.loss == "vector":
            return TargetVectors()
        return InBatch(scale=self.scale, is_symmetric=self.symmetric)

    def answers(
        self, examples: Sequence[EmbeddingExample], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        return embedding_answers(examples, outputs, all_alike=self.compares_rows(examples))

    def compares_rows(self, examples: Sequence[EmbeddingExample]) -> bool:
        """Whether the second texts of pairs are ranked: all rows are positives."""
        has_values = any(not math.isnan(example.value) for example in examples)
        return self.label is None and not has_values and all(len(example.texts) > 1 for example in examples)

    def evaluate(self, examples: Sequence[EmbeddingExample], answers: Sequence[AnswerData]) -> Evaluation:
        if len(examples[0].texts) == 1:
            vectors = unit(np.array([answer["answer"] for answer in answers]))
            targets = [example.vector for example in examples if example.vector is not None]
            if len(targets) == len(examples):
                return evaluate_target_vectors(vectors, unit(np.array(targets)), self.metric)
            return evaluate_uniformity(vectors, self.metric)
        values = np.array([example.value for example in examples])
        if np.isnan(values).any():
            return evaluate_retrieval(np.array([answer["rank"] for answer in answers]), self.metric)
        cosines = np.array([answer["answer"] for answer in answers])
        if self.loss in ("similarity", "ranking") or not np.isin(values, (0, 1)).all():
            return evaluate_similarity(cosines, values, self.metric)
        return evaluate_pair_labels(cosines, values > 0.5, self.metric)

    def gold(self, example: EmbeddingExample) -> float | None:
        """Return the similarity of a pair; None for a single text."""
        if len(example.texts) == 1:
            return None
        return 1.0 if math.isnan(example.value) else example.value

    def describe(self, example: EmbeddingExample) -> str:
        return " | ".join(" ".join(text.split()) for text in example.texts)

    def error(self, example: EmbeddingExample, answer: AnswerData) -> float:
        """Return the error of the cosine, or 1 − 1 / rank of the paired text; 0 for a single text."""
        if len(example.texts) == 1:
            return 0.0
        if "rank" in answer:
            return 1 - 1 / float(answer["rank"])
        return abs(float(answer["answer"]) - example.value)

    def notices(self, examples: Sequence[EmbeddingExample]) -> list[str]:
        dropped = 0 if self.loss == "dropout" else len(examples) - len(self.augment(examples))
        return [f"{dropped} of {len(examples)} training pairs are not similar and are left out"] if dropped else []

    @property
    def takes_one_text(self) -> bool:
        return True

    def row(self, value: Any) -> dict[str, Any]:
        return embedding_row(value, str(self.text), self.pair)

    def _columns(self, table: Table) -> Columns:
        """Return the columns of the task, or the usual ones if the table lacks them.

        Models trained on single texts or positives are often evaluated on scored pairs.
        """
        columns = {role: getattr(self, role) for role in (*self.roles, *self.target_roles)}
        if self.loss not in ("dropout", "in_batch", "vector") or not len(table) or self.text in table.rows[0]:
            return columns
        usual = embedding_columns(table.rows[0])
        return columns if usual["text"] is None else usual

    def _with_vectors(self, table: Table, text: str, column: str) -> list[EmbeddingExample]:
        """Read texts and their vectors; raise InputError for a vector of another width."""
        examples = []
        for index in range(len(table)):
            vector = table.vector(index, column)
            if self.vector_width not in (None, len(vector)):
                size = f"{len(vector)} numbers; the first row has {self.vector_width}"
                raise InputError(f"{table.location(index)}: field {column!r} has {size}")
            examples.append(EmbeddingExample((table.text(index, text),), vector=vector))
        return examples

    def _with_range(self, table: Table, label: str | None) -> "TextEmbedding":
        """Return the task with the range of a table's scores if the training data had no such column."""
        if label is None or label == self.label or self.alike:
            return self
        values = {table.number(index, label) for index in range(len(table))}
        # two distinct numbers are labels, not scores
        return self.changed(lowest=min(values), highest=max(values)) if len(values) > 2 else self

    def _value(self, table: Table, index: int, column: str) -> float:
        if self.alike:
            return float(_pair_label(table, index, column) in self.alike)
        number = table.number(index, column)
        if self.lowest is None or self.highest is None:
            return number
        return (number - self.lowest) / (self.highest - self.lowest)
