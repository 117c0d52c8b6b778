"""Is a model fit for a task at all? Told by its answers: all alike, no better than chance, labels in another order."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import chain, permutations
from typing import Any

from bertsmith.tasks.base import AnswerData, Evaluation, Task

_MOST_ORDERS = 6  # labels of which all orders are tried
_BETTER = 5.0  # points of accuracy by which another order must be better to be believed


def answers_alike(task: Task[Any], examples: Sequence[Any], answers: Sequence[AnswerData]) -> bool:
    """Whether all answers are the same and the right ones are not, as after a run that went wrong."""
    said, right = [answer["answer"] for answer in answers], [task.gold(example) for example in examples]
    if task.kind == "tagging":  # one and the same tag for every word
        said, right = (list(chain.from_iterable(tags)) for tags in (said, right))
    return len(set(map(json.dumps, said))) == 1 and len({json.dumps(answer, default=str) for answer in right}) > 1


def unfitness(
    task: Task[Any], examples: Sequence[Any], answers: Sequence[AnswerData], evaluation: Evaluation
) -> str | None:
    """What shows that a model was not trained for this task, as a clause; None where nothing does."""
    if answers_alike(task, examples, answers):
        return "gives one and the same answer to all of dev"
    confusion = task.confusion(examples, answers)
    if confusion is None or task.kind == "tagging":
        return f"has {evaluation.score:.2f} of {evaluation.metric} on dev" if evaluation.score <= 0 else None
    labels, counts = confusion
    share = 100 / counts.sum()
    right = share * counts.trace()
    if len(labels) <= _MOST_ORDERS:
        best = max(permutations(range(len(labels))), key=lambda order: sum(counts[i, j] for i, j in enumerate(order)))
        other = share * sum(counts[i, j] for i, j in enumerate(best))
        if other > right + _BETTER:
            order = ", ".join(labels[j] for j in best)
            return (
                f"answers {right:.1f} % of dev rightly, and {other:.1f} % if its labels stood in the order {order}: it "
                "was trained with another order of the labels"
            )
    chance = guessed(task, examples)
    if right <= chance:
        return f"answers {right:.1f} % of dev rightly, which guessing by the labels' shares does ({chance:.1f} %)"
    return None


def guessed(task: Task[Any], examples: Sequence[Any]) -> float:
    """The percentage of right answers of one who guesses each label as often as it is right."""
    counts = Counter(json.dumps(task.gold(example), default=str) for example in examples)
    return 100 * sum((count / len(examples)) ** 2 for count in counts.values())
