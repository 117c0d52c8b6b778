"""Detect models that do not fit a task: constant answers, accuracy at chance level, permuted labels."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import chain, permutations
from typing import Any

from bertsmith.tasks.base import AnswerData, Evaluation, Task

_MAX_PERMUTED_LABELS = 6  # permutations are tried up to this number of labels
_MIN_GAIN = 5.0  # points of accuracy by which a permutation must be better


DEGENERATE = (
    "degenerate: the fine-tuned model predicts the same answer for every row of dev, so shares of its score mean "
    "nothing; fine-tune it again with another seed, a lower learning rate or more epochs"
)
"""Notice for a model that a smaller one is compared with."""


def has_constant_answers(task: Task[Any], examples: Sequence[Any], answers: Sequence[AnswerData]) -> bool:
    """Whether all answers are equal although the correct ones differ."""
    predicted, correct = [answer["answer"] for answer in answers], [task.gold(example) for example in examples]
    if task.kind == "tagging":  # compare the tags of single words
        predicted, correct = (list(chain.from_iterable(tags)) for tags in (predicted, correct))
    values = {json.dumps(answer, default=str) for answer in correct}
    return len(set(map(json.dumps, predicted))) == 1 and len(values) > 1


def mismatch_reason(
    task: Task[Any], examples: Sequence[Any], answers: Sequence[AnswerData], evaluation: Evaluation
) -> str | None:
    """Return the sign that a model was not trained for this task, as the predicate of a sentence; None if it fits."""
    if has_constant_answers(task, examples, answers):
        return "gives the same answer to all of dev"
    predicted_labels = task.predicted_labels(examples, answers)
    if predicted_labels is None or task.kind == "tagging":
        return f"has {evaluation.metric} {evaluation.score:.2f} on dev" if evaluation.score <= 0 else None
    labels, counts = predicted_labels.labels, predicted_labels.counts
    percent = 100 / counts.sum()
    accuracy = percent * counts.trace()
    if len(labels) <= _MAX_PERMUTED_LABELS:
        best = max(permutations(range(len(labels))), key=lambda order: sum(counts[i, j] for i, j in enumerate(order)))
        permuted_accuracy = percent * sum(counts[i, j] for i, j in enumerate(best))
        if permuted_accuracy > accuracy + _MIN_GAIN:
            order = ", ".join(labels[j] for j in best)
            return (
                f"has accuracy {accuracy:.1f} % on dev, but {permuted_accuracy:.1f} % with its labels in the order "
                f"{order}: it was trained with another label order"
            )
    chance = chance_accuracy(task, examples)
    if accuracy <= chance:
        return f"has accuracy {accuracy:.1f} % on dev, which is not above chance ({chance:.1f} %)"
    return None


def chance_accuracy(task: Task[Any], examples: Sequence[Any]) -> float:
    """Expected accuracy, in percent, of guessing labels at random with their frequencies."""
    counts = Counter(json.dumps(task.gold(example), default=str) for example in examples)
    return 100 * sum((count / len(examples)) ** 2 for count in counts.values())
