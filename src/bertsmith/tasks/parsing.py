"""Constituency parsing: a tree of labelled constituents over the words of a sentence."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from bertsmith.answers.chart import (
    ParsedWords,
    read_parsed,
    read_unparsed,
    tree_answer,
    tree_answers,
    tree_features,
)
from bertsmith.answers.sequences import Answer, Features
from bertsmith.answers.tree_symbols import WORD_CLASSES, TreeState, plain_word, symbol_token, word_symbol
from bertsmith.answers.trees import (
    NO_TAG,
    Leaf,
    LeafSymbols,
    Tree,
    build_tree,
    constituents,
    joined,
    leaves,
    linearise,
    plain_labels,
    read_tree,
    repair,
    surface,
    write_tree,
)
from bertsmith.data.examples import ExampleConfig
from bertsmith.data.progress import Watch
from bertsmith.engines.base import Runner
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.constraints import TreeConstraint
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.chart import ChartConfig
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq
from bertsmith.objectives.chart import Chart
from bertsmith.objectives.supervised import Supervised
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData
from bertsmith.tasks.metrics.base import main_metric
from bertsmith.tasks.metrics.brackets import METRICS, BracketErrors, SentenceScore, evaluate_trees, score_tree
from bertsmith.tasks.translation import BATCH_SIZE, PairTask
from bertsmith.text.rows import Table
from bertsmith.text.tokenizer import Tokenizer

_TREE_COLUMNS = ("tree", "parse", "parse_tree")
_WORD_COLUMNS = ("tokens", "words")
_MIN_COUNT = 10  # occurrences of a word with a symbol of its own


class TreeSearch(GenerationConfig):
    """Beam search with the values of Vaswani et al. 2017, section 6.3."""

    beam: int = Field(default=21, gt=0)
    length_penalty: float = Field(default=0.3, ge=0)
    extra_length: int = Field(default=300, ge=0)


class Parsing(PairTask[ParsedWords]):
    """Find the constituents of a sentence, with an encoder or an encoder-decoder.

    An encoder gets a head that scores all spans (Kitaev and Klein 2018). An encoder-decoder writes the tree depth first
    (Vinyals et al. 2015; Vaswani et al. 2017, section 6.3); `smoothing`, `generation`, `leaves`, `tags`,
    `frequent_words` and `is_constrained` are for it alone.
    """

    kind: Literal["parsing"] = "parsing"
    words: str = "tokens"
    """Column with the list of words, for prediction; plain text works as well."""
    tree: str = "tree"
    """Column with the tree in brackets, in the format of the Penn Treebank."""
    labels: tuple[str, ...] = ()
    """Labels by index, those of unary chains joined by "::"; empty to collect them from the training data."""
    leaves: LeafSymbols = "XX"
    """Symbol of a word in the target: "XX" for all; its tag ("tags"), which the model then predicts; or the word itself
    ("words"), rare ones by a class, which keeps the decoder at the right word if there are few trees."""
    tags: tuple[str, ...] = ()
    """Tags of words, for leaves = "tags"; empty to collect them from the training data."""
    frequent_words: tuple[str, ...] = ()
    """Words with symbols of their own, for leaves = "words"; empty for those that occur at least ten times in the
    training data."""
    is_constrained: bool = True
    """Whether the search admits only trees of the words; without it, other symbols are repaired."""
    generation: TreeSearch = TreeSearch()

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
        needs_tags = self.leaves == "tags" and not self.tags
        needs_words = self.leaves == "words" and not self.frequent_words
        if self.labels and not needs_tags and not needs_words:
            return self
        trees = [gold_tree(example) for example in self.examples(train)]
        labels = {label for tree in trees for label, _, _ in joined(tree)}
        words = [leaf for tree in trees for leaf in leaves(tree)]
        tags = {leaf.tag for leaf in words} if needs_tags else self.tags
        counts = Counter(plain_word(leaf.word) for leaf in words) if needs_words else {}
        frequent = [word for word, count in counts.items() if count >= _MIN_COUNT] or self.frequent_words
        return self.changed(
            labels=self.labels or tuple(sorted(labels)),
            tags=tuple(sorted(tags)),
            frequent_words=tuple(sorted(frequent)),
        )

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
        if any("is_repaired" in answer for answer in answers):
            repaired = sum(bool(answer.get("is_repaired")) for answer in answers)
            evaluation.metrics["repaired"] = 100 * repaired / len(answers)
        return evaluation

    def pair_texts(self, example: ParsedWords) -> tuple[str, str]:
        tree = gold_tree(example)
        symbols = linearise(tree, self.leaf_symbols(leaves(tree)))
        # without spaces, which would be tokens of their own
        return source_text(example), "".join(map(symbol_token, symbols))

    @property
    def symbols(self) -> list[str]:
        """The symbols of targets: opening and closing ones of every label, then those of words."""
        labels = plain_labels(self.labels)
        own = (*WORD_CLASSES, *(f"={word}" for word in self.frequent_words))
        words = {"XX": (NO_TAG,), "tags": self.tags, "words": own}[self.leaves]
        return [*(f"({label}" for label in labels), *(f"){label}" for label in labels), *words]

    def leaf_symbols(self, words: Iterable[Leaf]) -> list[str]:
        """Return the symbols of words in targets."""
        frequent = frozenset(self.frequent_words)
        symbol_of: dict[LeafSymbols, Callable[[Leaf], str]] = {
            "XX": lambda leaf: NO_TAG,
            "tags": lambda leaf: leaf.tag,
            "words": lambda leaf: word_symbol(leaf.word, frequent),
        }
        return [symbol_of[self.leaves](leaf) for leaf in words]

    def _start(self, example: ParsedWords) -> TreeState:
        """Return the state before the first symbol of a tree."""
        known = tuple(self.leaf_symbols(example.leaves)) if self.leaves == "words" else ()
        return TreeState(len(example.words), word_symbols=known)

    def complete_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        return tokenizer.with_tokens([symbol_token(symbol) for symbol in self.symbols])

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        missing = [symbol for symbol in self.symbols if symbol_token(symbol) not in tokenizer.vocabulary]
        if missing:
            raise InputError(
                f"the model's tokenizer has no token {symbol_token(missing[0])!r}, a symbol of trees; start from a "
                "preset such as transformer-small, or from a model that was fine-tuned for parsing"
            )

    def predict(
        self, model: Runner, examples: Sequence[ParsedWords], sequences: ExampleConfig, watch: Watch | None = None
    ) -> Sequence[Answer]:
        if not isinstance(model, Seq2Seq):
            return super().predict(model, examples, sequences, watch)
        tokenizer, done = model.require_tokenizer(), 0
        symbols = {tokenizer.vocabulary[symbol_token(symbol)]: symbol for symbol in self.symbols}
        visible = [index for index, example in enumerate(examples) if example.words]

        def count(texts: int) -> None:
            nonlocal done
            done += texts
            if watch is not None:
                watch(done, len(visible))

        def constrain(batch: list[int]) -> TreeConstraint:
            return TreeConstraint([self._start(examples[visible[i]]) for i in batch], symbols, tokenizer.separator)

        written = model.write_tokens(
            [source_text(examples[index]) for index in visible],
            self.generation,
            batch_size=BATCH_SIZE,
            progress=count,
            constrain=constrain if self.is_constrained else None,
        )
        tokens = dict(zip(visible, written, strict=True))
        return [self._repaired(example, tokens.get(index, []), symbols) for index, example in enumerate(examples)]

    def _repaired(self, example: ParsedWords, tokens: Sequence[int], symbols: Mapping[int, str]) -> Answer:
        """Return the tree that tokens describe; tokens that are no symbols are dropped."""
        found = [symbols[token] for token in tokens if token in symbols]
        tree, is_changed = repair(found, example.leaves, self.leaves)
        answer = tree_answer(example, tree)
        return {**answer, "is_repaired": is_changed or len(found) < len(tokens)}

    def model_metrics(
        self, model: Runner, examples: Sequence[ParsedWords], sequences: ExampleConfig
    ) -> dict[str, float]:
        return super().model_metrics(model, examples, sequences) if isinstance(model, Seq2Seq) else {}

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
        tagged = [
            build_tree(constituents(one), list(leaves(other))) for one, other in zip(predicted, gold, strict=True)
        ]
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
