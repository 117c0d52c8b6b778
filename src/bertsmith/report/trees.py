"""Trees on the report page: SVG drawings, F1 per label, the most frequent errors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markupsafe import Markup

from bertsmith.answers.sequences import Answer
from bertsmith.answers.trees import Constituent, Leaf, Tree, build_tree, constituents, leaves, read_tree, surface
from bertsmith.tasks.metrics.brackets import BracketErrors, evaluate_trees, right_branching, score_tree
from bertsmith.tasks.parsing import Parsing, gold_tree

MAX_DRAWN = 6
MAX_WORDS = 24  # a longer sentence is too wide to draw
MAX_ERROR_KINDS = 15
_CHARACTER = 7.6  # pixels
_GAP, _LEVEL, _LINE = 16, 40, 15


@dataclass(frozen=True)
class DrawnTrees:
    """A sentence with its gold and its predicted tree; brackets that only one has are marked."""

    errors: int
    gold: Markup
    predicted: Markup


@dataclass(frozen=True)
class ParsingReport:
    """Contents of the page on trees."""

    classes: Sequence[tuple[str, int, int, tuple[float, float, float]]]
    """Label, gold brackets, predicted brackets; precision, recall and F1 in percent."""
    errors: Sequence[tuple[str, int]]
    """The most frequent kinds of errors and their numbers."""
    wrong: int
    """Sentences with an error."""
    drawn: Sequence[DrawnTrees]


def build_parsing_report(task: Parsing, examples: Sequence[Any], answers: Sequence[Answer]) -> ParsingReport:
    """Collect the scores by label, the errors, and drawings of the sentences with the most errors."""
    scores = task.scores(examples, answers)
    errors = BracketErrors.of(scores)
    by_label = sorted(errors.labels.items(), key=lambda item: (-item[1].gold, item[0]))
    drawable = [index for index, score in enumerate(scores) if score.errors and score.words <= MAX_WORDS]
    worst = sorted(drawable, key=lambda index: (-scores[index].errors, index))[:MAX_DRAWN]
    return ParsingReport(
        classes=[(label, one.gold, one.predicted, one.rates) for label, one in by_label],
        errors=errors.kinds.most_common(MAX_ERROR_KINDS),
        wrong=sum(score.errors > 0 for score in scores),
        drawn=[
            DrawnTrees(
                scores[index].errors, *_draw_pair(gold_tree(examples[index]), read_tree(answers[index]["answer"]))
            )
            for index in worst
        ],
    )


def right_branching_score(task: Parsing, examples: Sequence[Any], metric: str) -> float:
    """Return the score of right-branching trees on the same examples."""
    trees = [gold_tree(example) for example in examples]
    scores = [score_tree(tree, right_branching(list(leaves(tree)))) for tree in trees]
    return evaluate_trees(scores, task.metric).metrics[metric]


def _draw_pair(gold: Tree, predicted: Tree) -> tuple[Markup, Markup]:
    tagged = build_tree(constituents(predicted), list(leaves(gold)))
    ours, theirs = Counter(constituents(tagged)), Counter(constituents(gold))
    return draw_tree(gold, theirs - ours, "gold tree"), draw_tree(tagged, ours - theirs, "predicted tree")


def draw_tree(tree: Tree, marked: Counter[Constituent], name: str) -> Markup:
    """Draw a tree with its words on one line; `marked` constituents stand out."""
    remaining, elements = Counter(marked), list[str]()
    words = list(leaves(tree))
    widths = [_CHARACTER * max(len(surface(leaf.word)), len(leaf.tag)) + _GAP for leaf in words]
    centres = [sum(widths[:index]) + width / 2 for index, width in enumerate(widths)]
    bottom = float(_LINE + _LEVEL * _height(tree))

    def visit(node: Tree | Leaf, begin: int, depth: int) -> tuple[float, float, int]:
        """Draw a node and return its position and the word after it."""
        if isinstance(node, Leaf):
            x = centres[begin]
            elements.append(_text("tag", x, bottom, node.tag))
            elements.append(_text("word", x, bottom + _LINE + 3, surface(node.word)))
            return x, bottom - _LINE, begin + 1
        end, below = begin, list[tuple[float, float]]()
        for child in node.children:
            child_x, child_y, end = visit(child, end, depth + 1)
            below.append((child_x, child_y))
        span = Constituent(node.label, begin, end)
        is_marked = remaining[span] > 0
        remaining[span] -= 1
        x, y = (below[0][0] + below[-1][0]) / 2, float(_LINE + _LEVEL * depth)
        elements.extend(
            f'<line class="edge" x1="{x:.1f}" y1="{y + 4:.1f}" x2="{child_x:.1f}" y2="{child_y + 2:.1f}"/>'
            for child_x, child_y in below
        )
        elements.append(_text("constituent marked" if is_marked else "constituent", x, y, node.label))
        return x, y - _LINE, end

    visit(tree, 0, 0)
    width, height = sum(widths), bottom + _LINE + 10
    return Markup(
        f'<svg class="tree" role="img" aria-label="{escape(name)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(elements)}</svg>'
    )


def _height(node: Tree | Leaf) -> int:
    return 0 if isinstance(node, Leaf) else 1 + max(map(_height, node.children))


def _text(style: str, x: float, y: float, text: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'
