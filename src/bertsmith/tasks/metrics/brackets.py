"""Labelled bracket scores by the rules of EVALB (Collins' parameters), and a right-branching baseline."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from bertsmith.answers.trees import TOP, Constituent, Leaf, Tree, build_tree, constituents, leaves, plain_label
from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import main_metric

DELETED_TAGS = frozenset([",", ":", "``", "''", "."])
"""Words with these tags do not count; the tag decides, not the word."""
UNSCORED_LABELS = frozenset([TOP, "S1"])
SHORT = 40
"""Words of a sentence, without deleted ones, up to which it counts as short."""
METRICS = ("f1", "precision", "recall", "exact_match", "f1_short", "crossing")


@dataclass(frozen=True)
class SentenceScore:
    """Counts of one sentence."""

    gold: Counter[Constituent]
    predicted: Counter[Constituent]
    crossing: int
    """Predicted brackets that cross a bracket of the gold tree."""
    words: int
    """Without deleted ones."""

    @property
    def matched(self) -> Counter[Constituent]:
        """Brackets in both trees, each as often as in the tree that has fewer of it."""
        return self.gold & self.predicted

    @property
    def errors(self) -> int:
        """Brackets that only one of the trees has."""
        return self.gold.total() + self.predicted.total() - 2 * self.matched.total()


def score_tree(gold: Tree, predicted: Tree) -> SentenceScore:
    """Compare two trees of the same words; the tags are those of the gold tree."""
    tags = [leaf.tag for leaf in leaves(gold)]
    ours, theirs = scored_brackets(predicted, tags), scored_brackets(gold, tags)
    edges = {(begin, end) for _, begin, end in theirs}
    crossing = sum(
        number
        for (_, begin, end), number in ours.items()
        if any(begin < left < end < right or left < begin < right < end for left, right in edges)
    )
    return SentenceScore(theirs, ours, crossing, sum(tag not in DELETED_TAGS for tag in tags))


def scored_brackets(tree: Tree, tags: Sequence[str]) -> Counter[Constituent]:
    """Return the brackets that count, with positions among the words that count: a multiset.

    PRT and ADVP are one label. A constituent all of whose words are deleted does not count.
    """
    positions = [0, *accumulate(int(tag not in DELETED_TAGS) for tag in tags)]
    found: Counter[Constituent] = Counter()
    for label, begin, end in constituents(tree):
        name, first, last = plain_label(label), positions[begin], positions[end]
        if first < last and name not in UNSCORED_LABELS:
            found[Constituent("ADVP" if name == "PRT" else name, first, last)] += 1
    return found


@dataclass
class LabelCounts:
    """Brackets of one label: in both trees, in the predicted one, in the gold one."""

    matched: int = 0
    predicted: int = 0
    gold: int = 0

    @property
    def rates(self) -> tuple[float, float, float]:
        """Precision, recall and F1 in percent."""
        return rates(self.matched, self.predicted, self.gold)


@dataclass
class BracketErrors:
    """Scores by label, and how often a bracket was missed, added, or given another label."""

    labels: dict[str, LabelCounts] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, scores: Sequence[SentenceScore]) -> "BracketErrors":
        """Count over sentences."""
        result = cls()
        for score in scores:
            matched = score.matched
            for name, group in (("matched", matched), ("predicted", score.predicted), ("gold", score.gold)):
                for (label, _, _), number in group.items():
                    counts = result.labels.setdefault(label, LabelCounts())
                    setattr(counts, name, getattr(counts, name) + number)
            result._add_errors(score.gold - matched, score.predicted - matched)
        return result

    def _add_errors(self, missed: Counter[Constituent], added: Counter[Constituent]) -> None:
        """Pair missed and added brackets over the same words as wrong labels; count the rest."""
        by_span: dict[tuple[int, int], list[str]] = {}
        for label, begin, end in sorted(added.elements()):
            by_span.setdefault((begin, end), []).append(label)
        for label, begin, end in sorted(missed.elements()):
            others = by_span.get((begin, end))
            self.kinds[f"{label} labelled {others.pop(0)}" if others else f"{label} missing"] += 1
        self.kinds.update(f"{label} added" for labels in by_span.values() for label in labels)


def evaluate_trees(scores: Sequence[SentenceScore], metric: str | None) -> Evaluation:
    """Compute the metrics of sentences; all are sums over sentences (micro averages).

    `crossing` is the mean number of crossing brackets per sentence; `f1_short` is F1 of sentences of up to 40 words.
    """
    main = main_metric(metric, METRICS)
    counts = np.array(
        [
            (one.matched.total(), one.predicted.total(), one.gold.total(), one.errors == 0, one.crossing, one.words)
            for one in scores
        ],
        dtype=np.int64,
    ).reshape(len(scores), 6)

    def measure(chosen: np.ndarray, name: str = main) -> float:
        rows = counts[chosen]
        if name == "f1_short":
            rows = rows[rows[:, 5] <= SHORT]
        matched, predicted, gold, exact, crossing, _ = rows.sum(0).tolist()
        precision, recall, f1 = rates(matched, predicted, gold)
        by_name = {
            "f1": f1,
            "precision": precision,
            "recall": recall,
            "exact_match": 100 * exact / max(1, len(rows)),
            "f1_short": f1,
            "crossing": crossing / max(1, len(rows)),
        }
        return by_name[name]

    everything = np.arange(len(scores))
    return Evaluation(main, {name: measure(everything, name) for name in METRICS}, measure)


def rates(matched: int, predicted: int, gold: int) -> tuple[float, float, float]:
    """Return precision, recall and F1 in percent; 0 without brackets."""
    percent = [
        100.0 * part / whole if whole else 0.0
        for part, whole in ((matched, predicted), (matched, gold), (2 * matched, predicted + gold))
    ]
    return percent[0], percent[1], percent[2]


def right_branching(words: Sequence[Leaf]) -> Tree:
    """Return the tree in which every word begins a constituent that holds the rest of the sentence.

    Punctuation at the end is outside. The first constituent is S; others are VP, PP or NP by the tag of their first
    word.
    """
    end = len(words)
    while end > 1 and words[end - 1].tag in DELETED_TAGS:
        end -= 1
    spans = [Constituent("S", 0, len(words))]
    spans += [Constituent(_label_by_tag(words[begin].tag), begin, end) for begin in range(1, end - 1)]
    return build_tree(spans, words)


def _label_by_tag(tag: str) -> str:
    if tag.startswith("VB") or tag in ("MD", "TO"):
        return "VP"
    return "PP" if tag == "IN" else "NP"
