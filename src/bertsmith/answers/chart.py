"""Chart parsing (Kitaev and Klein 2018): span scores from token outputs, the best tree by CKY, trees as answers.

A head for tokens returns two vectors for every token, the parts of W₁ f that the token contributes to the fenceposts on
its two sides. The score of a span is W₂ ReLU(LayerNorm(W₁ (f_end − f_begin) + b₁)) + b₂; "no constituent" scores 0.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from bertsmith.answers.sequences import IGNORED, Features, Ragged, TextEncoding, check_labels
from bertsmith.answers.tagging import read_sentence, word_tokens
from bertsmith.answers.trees import (
    NO_TAG,
    Constituent,
    Leaf,
    Tree,
    TreeError,
    build_tree,
    constituents,
    escape,
    joined,
    leaves,
    read_tree,
    split_joined,
    surface,
    write_tree,
)
from bertsmith.errors import InputError
from bertsmith.files import verify_file
from bertsmith.text.rows import Table

WEIGHTS_FILE = "chart.npz"
POSITIONS = "position"
"""Target of every token: 0 at the first token, i at the last token of word i, n + 1 at the final separator."""
BRACKETS = "brackets"
"""Target of every item: begin, end and label index of its constituents, (items, most, 3), filled with IGNORED."""
NORM_EPSILON = 1e-5
_CHUNK = 16384  # spans scored at a time

SPECIAL_TOKENS = 2  # one at each end of a sequence


@dataclass(frozen=True)
class ParsedWords:
    """The words of a sentence and, in training and evaluation, its tree."""

    words: tuple[str, ...]
    tree: Tree | None = None
    text: str | None = None
    """The input text; None if the input was a list of words or a tree."""
    offsets: tuple[tuple[int, int], ...] = ()
    """Character offsets of the words in `text`."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The words without tags, as leaves of a predicted tree."""
        return tuple(Leaf(NO_TAG, escape(word)) for word in self.words)


def read_parsed(table: Table, index: int, words: str, tree: str) -> ParsedWords:
    """Read the tree of a row; its words must be those of the column of words, if the row has one."""
    text = table.text(index, tree)
    try:
        parsed = read_tree(text)
    except TreeError as error:
        raise InputError(f"{table.location(index)}: the tree {text!r:.60} {error}") from None
    found = tuple(leaf.word for leaf in leaves(parsed))
    given = table.rows[index].get(words)
    if given is not None and [escape(surface(str(word))) for word in given] != [escape(surface(w)) for w in found]:
        raise InputError(
            f"{table.location(index)}: {words!r} has {len(given)} words that are not the {len(found)} words of {tree!r}"
        )
    return ParsedWords(found, parsed)


def read_unparsed(table: Table, index: int, words: str, tree: str) -> ParsedWords:
    """Read the words of a row: a list or a text, or the words of its tree if it has nothing else."""
    row = table.rows[index]
    if words not in row and tree in row:
        return ParsedWords(read_parsed(table, index, words, tree).words)
    sentence = read_sentence(table, index, words, 0)
    return ParsedWords(sentence.words, None, sentence.text, sentence.offsets)


class LabelledSpan(TypedDict):
    """A constituent: words `begin` to before `end`."""

    label: str
    begin: int
    end: int


class TreeAnswer(TypedDict):
    """The best tree in brackets, the words, its constituents, the upper one first, and its score."""

    answer: str
    words: list[str]
    constituents: list[LabelledSpan]
    tree_score: NotRequired[float]
    """Sum of the scores of its spans; not comparable between sentences."""


@dataclass(frozen=True)
class SpanWeights:
    """Weights of the span scores after W₁.

    Shape: bias (b₁), gain, shift (hidden,); weight (W₂) (labels, hidden); offset (b₂) (labels,).
    """

    bias: np.ndarray
    gain: np.ndarray
    shift: np.ndarray
    weight: np.ndarray
    offset: np.ndarray

    @classmethod
    def load(cls, path: Path) -> "SpanWeights":
        """Read the weights that `save` wrote."""
        if not path.is_file():
            raise InputError(f"{str(path)!r} does not exist, but the model's head needs it; export the model again")
        verify_file(path)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls(**{name: arrays[name] for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{str(path)!r} is damaged: {error}; export the model again") from None

    def save(self, path: Path) -> None:
        """Write the weights."""
        np.savez(path, **{name: getattr(self, name) for name in self.__dataclass_fields__})

    def scores(self, differences: np.ndarray) -> np.ndarray:
        """Return the scores of the labels: (spans, hidden) -> (spans, labels)."""
        inputs = differences + self.bias
        centred = inputs - inputs.mean(-1, keepdims=True)
        deviation = np.sqrt((centred * centred).mean(-1, keepdims=True) + NORM_EPSILON)
        hidden = np.maximum(centred / deviation * self.gain + self.shift, 0)
        scores: np.ndarray = hidden @ self.weight.T + self.offset
        return scores

    def best_labels(self, outputs: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the best score and label index of every span of one sentence; label 0 is "no constituent".

        Shape: outputs (tokens, 2 hidden), positions (tokens,) -> (2, words + 1, words + 1), at [begin, end].
        """
        fences = fenceposts(outputs[positions != IGNORED])
        count = len(fences)
        begins, ends = np.triu_indices(count, 1)
        table = np.zeros((2, count, count), dtype=np.float32)
        for first in range(0, len(begins), _CHUNK):
            begin, end = begins[first : first + _CHUNK], ends[first : first + _CHUNK]
            scores = self.scores(fences[end] - fences[begin])
            label = scores.argmax(-1)
            score = scores[np.arange(len(label)), label]
            # the root must be a constituent
            is_labelled = (score > 0) | ((begin == 0) & (end == count - 1))
            table[0, begin, end] = np.where(is_labelled, score, 0)
            table[1, begin, end] = np.where(is_labelled, label + 1, 0)
        return table


def fenceposts(outputs: np.ndarray) -> np.ndarray:
    """Return W₁ f of the fenceposts of a sentence.

    Shape: outputs (words + 2, 2 hidden), one row per word and end -> (words + 1, hidden).
    """
    hidden = outputs.shape[-1] // 2
    fences: np.ndarray = outputs[:-1, :hidden] + outputs[1:, hidden:]
    return fences


def span_tables(features: Features, outputs: Sequence[np.ndarray], weights: SpanWeights) -> list[np.ndarray]:
    """Return the best label and score of every span of each item, from the outputs of its tokens."""
    positions = features.targets[POSITIONS]
    assert isinstance(positions, Ragged)
    return [weights.best_labels(output, positions[item]) for item, output in enumerate(outputs)]


def best_trees(scores: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return which spans are in the best binary tree of each sentence, by CKY.

    best(i, j) = score(i, j) + max over k of best(i, k) + best(k, j), for all sentences and starts at once.
    Shape: scores (batch, most + 1, most + 1) at [begin, end], words (batch,) -> the same as scores, bool.
    """
    batch, edges, _ = scores.shape
    most = edges - 1
    from_begin = np.full((batch, edges, edges), -np.inf, dtype=scores.dtype)  # at [begin, width]
    from_end = np.full_like(from_begin, -np.inf)  # at [end, width]
    splits = np.zeros((batch, edges, edges), dtype=np.int64)
    starts = np.arange(edges)
    for width in range(1, most + 1):
        begin, end = starts[: edges - width], starts[width:]
        best = scores[:, begin, end]
        if width > 1:
            sums = from_begin[:, begin, 1:width] + from_end[:, end, width - 1 : 0 : -1]  # (batch, starts, splits)
            split = sums.argmax(-1)
            splits[:, begin, width] = split + 1
            best = best + np.take_along_axis(sums, split[..., None], -1)[..., 0]
        from_begin[:, begin, width] = best
        from_end[:, end, width] = best
    chosen = np.zeros((batch, edges, edges), dtype=bool)  # at [begin, width], from the root down
    chosen[np.arange(batch), 0, words] = True
    for width in range(most, 1, -1):
        item, begin = np.nonzero(chosen[:, :, width])
        left = splits[item, begin, width]
        chosen[item, begin, left] = True
        chosen[item, begin + left, width - left] = True
    items, begins, widths = np.nonzero(chosen)
    result = np.zeros_like(chosen)
    result[items, begins, begins + widths] = True
    return result


def parse_table(table: np.ndarray, labels: Sequence[str]) -> tuple[list[Constituent], float]:
    """Return the constituents of the best tree and its score; `table` as `SpanWeights.best_labels` returns it."""
    scores = table[0]
    (chosen,) = best_trees(scores[None], np.array([len(scores) - 1]))
    begins, ends = np.nonzero(chosen & (table[1] > 0))
    found = [
        Constituent(labels[int(table[1, begin, end]) - 1], begin, end)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    return split_joined(sorted(found, key=lambda span: (span.begin, -span.end))), float(scores[chosen].sum())


def tree_answers(
    examples: Sequence[ParsedWords], features: Features, outputs: Sequence[np.ndarray], labels: Sequence[str]
) -> list[TreeAnswer]:
    """Return the best tree of each sentence; outputs as `span_tables` returns them, one item per example."""
    answers: list[TreeAnswer] = []
    for example, table in zip(examples, outputs, strict=True):
        if (highest := int(table[1].max(initial=0))) > len(labels):
            check_labels(highest, labels)
        found, score = parse_table(table, labels)
        answers.append({**tree_answer(example, build_tree(found, example.leaves)), "tree_score": score})
    return answers


def tree_answer(example: ParsedWords, tree: Tree) -> TreeAnswer:
    """Return a predicted tree as JSON-ready data; empty for a sentence without words."""
    if not example.words:
        return {"answer": "", "words": [], "constituents": []}
    spans: list[LabelledSpan] = [
        {"label": label, "begin": begin, "end": end} for label, begin, end in constituents(tree)
    ]
    return {"answer": write_tree(tree), "words": list(example.words), "constituents": spans}


def tree_features(examples: Sequence[ParsedWords], labels: Sequence[str] | None, encoding: TextEncoding) -> Features:
    """Encode every sentence as one sequence; raise InputError if one is too long.

    Targets: POSITIONS, and BRACKETS with joined labels if `labels` is given. A label that is not among them is left
    out: no tree of the model can have it.
    """
    tokenizer, room = encoding.tokenizer, encoding.length - SPECIAL_TOKENS
    tokens, positions = [], []
    for example, (ids, owners) in zip(
        examples, word_tokens(tokenizer, [list(map(surface, example.words)) for example in examples]), strict=True
    ):
        if len(ids) > room:
            raise InputError(
                f"a sentence of {len(example.words)} words has {len(ids) + SPECIAL_TOKENS} tokens; a tree needs all of "
                f"them, and sequences.length is {encoding.length}: increase it or split the sentence "
                f"({' '.join(example.words[:8])} …)"
            )
        row = np.full(len(ids) + SPECIAL_TOKENS, IGNORED, dtype=np.int32)
        is_last = np.append(owners[1:] != owners[:-1], True)[: len(ids)]
        row[1:-1][is_last] = owners[is_last] + 1
        row[0], row[-1] = 0, len(example.words) + 1
        tokens.append(np.concatenate([[tokenizer.start], ids, [tokenizer.separator]]).astype(np.int32))
        positions.append(row)
    targets: dict[str, np.ndarray | Ragged] = {POSITIONS: Ragged.of(positions)}
    if labels is not None:
        targets[BRACKETS] = _bracket_targets(examples, labels)
    ragged, count = Ragged.of(tokens), len(examples)
    types = Ragged(np.zeros_like(ragged.tokens), ragged.starts) if encoding.has_types else None
    return Features(ragged, types, np.arange(count + 1), np.arange(count), targets)


def _bracket_targets(examples: Sequence[ParsedWords], labels: Sequence[str]) -> np.ndarray:
    index = {label: number for number, label in enumerate(labels, start=1)}
    rows = [
        [(begin, end, index[label]) for label, begin, end in joined(example.tree) if label in index]
        for example in examples
        if example.tree is not None
    ]
    targets = np.full((len(rows), max((len(row) for row in rows), default=0), 3), IGNORED, dtype=np.int64)
    for item, row in enumerate(rows):
        targets[item, : len(row)] = np.array(row, dtype=np.int64).reshape(-1, 3)
    return targets
