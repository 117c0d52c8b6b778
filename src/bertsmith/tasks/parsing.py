"""Constituency parsing: a tree of labelled constituents over the words of a sentence."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from bertsmith.answers.chart import (
    ParsedWords,
    read_parsed,
    read_unparsed,
    tree_answers,
    tree_features,
)
from bertsmith.answers.sequences import Answer, Features
from bertsmith.answers.trees import Leaf, Tree, build_tree, constituents, joined, leaves, read_tree, surface, write_tree
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.chart import ChartConfig
from bertsmith.objectives.chart import Chart
from bertsmith.objectives.supervised import Supervised
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData, Task
from bertsmith.tasks.metrics.base import main_metric
from bertsmith.tasks.metrics.brackets import METRICS, BracketErrors, SentenceScore, evaluate_trees, score_tree
from bertsmith.text.rows import Table

_TREE_COLUMNS = ("tree", "parse", "parse_tree")
_WORD_COLUMNS = ("tokens", "words")


class Parsing(Task[ParsedWords]):
    """Find the constituents of a sentence."""

    kind: Literal["parsing"] = "parsing"
    words: str = "tokens"
    """Column with the list of words, for prediction; plain text works as well."""
    tree: str = "tree"
    """Column with the tree in brackets, in the format of the Penn Treebank."""
    labels: tuple[str, ...] = ()
    """Labels by index, those of unary chains joined by "::"; empty to collect them from the training data."""

    roles: ClassVar[tuple[str, ...]] = ("words",)
    target_roles: ClassVar[tuple[str, ...]] = ("tree",)

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        trees = (name for name in _TREE_COLUMNS if isinstance(row.get(name), str))
        tree = next((name for name in trees if row[name].lstrip().startswith("(")), None)
        if tree is None:
            return None
        words = next((name for name in _WORD_COLUMNS if isinstance(row.get(name), list | tuple)), None)
        return {"tree": tree} if words is None else {"words": words, "tree": tree}

    def resolve(self, train: Table) -> "Parsing":
        main_metric(self.metric, METRICS)
        if self.labels:
            return self
        trees = (example.tree for example in self.examples(train))
        labels = {label for tree in trees if tree is not None for label, _, _ in joined(tree)}
        return self.changed(labels=tuple(sorted(labels)))

    def head(self, model: ModelConfig) -> HeadConfig:
        return ChartConfig(labels=self.labels, dropout=model.encoder.embedding.dropout)

    def examples(self, table: Table, *, has_targets: bool = True) -> list[ParsedWords]:
        read = read_parsed if has_targets else read_unparsed
        return [read(table, index, self.words, self.tree) for index in range(len(table))]

    def texts(self, examples: Sequence[ParsedWords]) -> Iterator[str]:
        return (source_text(example) for example in examples)

    def features(self, examples: Sequence[ParsedWords], encoding: Encoding) -> Features:
        has_targets = all(example.tree is not None for example in examples)
        return tree_features(examples, self.labels if has_targets else None, encoding)

    def objective(self, examples: Sequence[ParsedWords]) -> Supervised:
        return Chart()

    def answers(
        self, examples: Sequence[ParsedWords], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        return tree_answers(examples, features, outputs, self.labels)

    def scores(self, examples: Sequence[ParsedWords], answers: Sequence[AnswerData]) -> list[SentenceScore]:
        """Compare each answer with the tree of its example."""
        return [
            score_tree(gold_tree(example), read_tree(answer["answer"]))
            for example, answer in zip(examples, answers, strict=True)
        ]

    def evaluate(self, examples: Sequence[ParsedWords], answers: Sequence[AnswerData]) -> Evaluation:
        scores = self.scores(examples, answers)
        evaluation = evaluate_trees(scores, self.metric)
        by_label = sorted(BracketErrors.of(scores).labels.items(), key=lambda item: (-item[1].gold, item[0]))
        details = {label: dict(zip(("precision", "recall", "f1"), one.rates, strict=True)) for label, one in by_label}
        evaluation.details["labels"] = details
        return evaluation

    def gold(self, example: ParsedWords) -> str:
        return write_tree(gold_tree(example))

    def describe(self, example: ParsedWords) -> str:
        return " ".join(source_text(example).split())

    def error(self, example: ParsedWords, answer: AnswerData) -> float:
        """Return the number of brackets that only one of the trees has."""
        return float(score_tree(gold_tree(example), read_tree(answer["answer"])).errors)

    def label_counts(self, examples: Sequence[ParsedWords]) -> Counter[str]:
        return Counter(label for example in examples for label, _, _ in constituents(gold_tree(example)))

    def files(self, examples: Sequence[ParsedWords], answers: Sequence[AnswerData]) -> dict[str, str]:
        """Return trees for EVALB: predictions with the tags of the gold trees, and the gold trees."""
        predicted = [read_tree(answer["answer"]) for answer in answers if answer["answer"]]
        if not all(example.tree for example in examples):
            return {"predictions.ptb": _lines(predicted)}
        gold = [gold_tree(example) for example in examples]
        tagged = [build_tree(constituents(one), list(leaves(other))) for one, other in zip(predicted, gold, strict=True)]
        return {"predictions.ptb": _lines(tagged), "gold.ptb": _lines(gold)}

    def row(self, value: Any) -> dict[str, Any]:
        # a list is one sentence, not a tuple of columns
        return dict(value) if isinstance(value, Mapping) else {self.words: value}

    def input_key(self, row: RowData) -> str:
        tree = row.get(self.tree)
        if not isinstance(tree, str):
            return super().input_key(row)
        return " ".join(leaf.word for leaf in leaves(read_tree(tree)))


def gold_tree(example: ParsedWords) -> Tree:
    """Return the tree of an example of training or evaluation."""
    if example.tree is None:
        raise InputError("an example has no tree; evaluation needs one")
    return example.tree


def source_text(example: ParsedWords) -> str:
    """Return the words of a sentence as one text."""
    return " ".join(map(surface, example.words))


def _lines(trees: Sequence[Tree]) -> str:
    return "".join(f"(TOP {write_tree(tree)})\n" for tree in trees)
