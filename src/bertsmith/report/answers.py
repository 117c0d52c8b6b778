"""What is told of a task's answers: figures, mistakes, what was taken for what; collected here, drawn elsewhere."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bertsmith.report.confusion import cut
from bertsmith.tasks.base import Judgement, Task

WORST = 20
LONGEST_TEXT = 420
LONGEST_ANSWER = 160


@dataclass(frozen=True)
class Mistake:
    """An answer that is wrong."""

    text: str
    right: str
    said: str
    sure: str
    """How sure the model was of it, or how far off it is."""


@dataclass(frozen=True)
class TaskReport:
    """Everything the page tells; what a run does not have is left empty."""

    title: str
    kind: str
    """What was done: "Fine-tuning" or "Evaluation"."""
    part: str
    examples: int
    metric: str
    figures: Mapping[str, float]
    interval: tuple[float, float] | None = None
    baseline: tuple[str, float] | None = None
    """What the main figure would be for one and the same answer to all examples, with how to call that."""
    confusion: tuple[tuple[str, ...], np.ndarray] | None = None
    values: Sequence[tuple[float, float]] = ()
    """Where answers are numbers: right and said."""
    mistakes: Sequence[Mistake] = ()
    wrong: int = 0
    """How many answers are wrong, whether shown or not."""
    rows: Sequence[dict[str, Any]] = ()
    """Of the log: kind "training" with step and loss, kind "held_out" with step, loss and score."""
    runs: Sequence[Mapping[str, Any]] = ()
    """Several runs of the same: seed, learning_rate and score of each."""
    notices: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    settings: str = ""


def task_report(
    task: Task[Any],
    examples: Sequence[Any],
    answers: Sequence[Mapping[str, Any]],
    judgement: Judgement,
    *,
    title: str,
    kind: str,
    part: str,
    **told: Any,
) -> TaskReport:
    """The report of some answers; `told` is what else the page can tell."""
    found = task.confusion(examples, answers)
    values = [] if found is not None else _values(task, examples, answers)
    badness = [task.mistake(example, answer) for example, answer in zip(examples, answers, strict=True)]
    wrong = [number for number, bad in enumerate(badness) if bad > 0]
    worst = heapq.nsmallest(WORST, wrong, key=lambda number: (-badness[number], number))
    mistakes = []
    for number in worst:
        example, answer = examples[number], answers[number]
        both = [task.shown_answer(example, value) for value in (task.right(example), answer["answer"])]
        right, said = (cut(as_text(value), LONGEST_ANSWER) for value in both)
        text = shortened(" ".join(task.shown(example).split()), LONGEST_TEXT)
        mistakes.append(Mistake(text, right, said, _sure(answer, badness[number], is_value=bool(values))))
    return TaskReport(
        title,
        kind,
        part,
        len(examples),
        judgement.metric,
        judgement.figures,
        baseline=_baseline(task, examples, answers, found, judgement.metric),
        confusion=found,
        values=values,
        mistakes=mistakes,
        wrong=len(wrong),
        **told,
    )


def as_text(answer: Any) -> str:
    """An answer or what is right in one line."""
    if answer is None or (isinstance(answer, str | list | tuple) and not answer):
        return "none"
    if isinstance(answer, float):
        return f"{answer:.4g}"
    if isinstance(answer, Mapping):
        return ", ".join(f"{name}: {as_text(value)}" for name, value in answer.items())
    if isinstance(answer, list | tuple):
        return ", ".join(map(as_text, answer))
    return " ".join(str(answer).split())


def shortened(text: str, longest: int) -> str:
    """A text with its middle left out where it is too long: of a pair, something of both is seen."""
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 3].rstrip()} … {text[-end:].lstrip()}"


def _values(
    task: Task[Any], examples: Sequence[Any], answers: Sequence[Mapping[str, Any]]
) -> list[tuple[float, float]]:
    """Right and said where both are numbers, else nothing."""
    pairs = [(task.right(example), answer["answer"]) for example, answer in zip(examples, answers, strict=True)]
    is_number = all(isinstance(value, float | int) and not isinstance(value, bool) for pair in pairs for value in pair)
    # whole numbers alone are names of choices, not amounts
    has_amounts = any(isinstance(value, float) for pair in pairs for value in pair)
    return [(float(right), float(said)) for right, said in pairs] if is_number and has_amounts else []


def _sure(answer: Mapping[str, Any], badness: float, *, is_value: bool) -> str:
    score = answer.get("score")
    if not is_value and isinstance(score, float | int) and 0 <= score <= 1:
        return f"{100 * score:.1f} %"
    return f"{badness:.3g}"


def _baseline(
    task: Task[Any],
    examples: Sequence[Any],
    answers: Sequence[Mapping[str, Any]],
    found: tuple[tuple[str, ...], np.ndarray] | None,
    metric: str,
) -> tuple[str, float] | None:
    """The main figure with the commonest label as the answer to everything; None where answers are no labels."""
    if found is None or any(answer["answer"] not in found[0] for answer in answers):
        return None
    labels, counts = found
    common = labels[int(counts.sum(1).argmax())]
    always = task.judged(examples, [{**answer, "answer": common} for answer in answers])
    return f"always “{cut(common, 24)}”", always.figures[metric]
