"""Report page of a fine-tuned model: score with confidence interval, training curves, confusion matrix, errors."""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from markupsafe import Markup

from bertsmith.answers.sequences import Answer
from bertsmith.errors import shorten
from bertsmith.report.charts import LogRow, Panel, Series, column, line_chart, scatter_chart, strip_chart
from bertsmith.report.page import format_count, render
from bertsmith.report.trees import ParsingReport, build_parsing_report, right_branching_score
from bertsmith.tasks.base import Evaluation, Example, PredictedLabel, PredictedLabels, Task
from bertsmith.tasks.degenerate import has_constant_answers
from bertsmith.tasks.metrics.classes import ClassCounts
from bertsmith.tasks.parsing import Parsing

MAX_ERRORS = 20
MAX_TEXT = 420  # characters
MAX_ANSWER = 160
MAX_LABELS = 30  # rows of a confusion matrix that fit on a screen
MAX_CELL_ROWS = 20  # listed examples of a cell of the confusion matrix
MAX_LISTED_ROWS = 1500  # of all cells, so that the page stays small
MAX_CELL_TEXT = 240
ROOMY_LABELS = 8  # with more labels, cells have no room for percentages
FEW_EXAMPLES = 100
METRIC_NAMES = {"f1_of_chunks": "F1", "mrr": "MRR", "map": "MAP"}


@dataclass(frozen=True)
class WrongAnswer:
    """A wrong answer, with the model's confidence or, for numbers, the distance to the target."""

    text: str
    target: str
    prediction: str
    confidence: str


@dataclass(frozen=True)
class CellRow:
    """An example in a cell of the confusion matrix; `word` is the labelled word, if words are labelled."""

    before: str
    word: str
    after: str
    confidence: str


@dataclass(frozen=True)
class Confusion:
    """Confusion matrix, and examples of its cells."""

    labels: tuple[str, ...]
    counts: np.ndarray
    """Shape: (targets, predictions)."""
    rows: Mapping[tuple[int, int], Sequence[CellRow]] = field(default_factory=dict)
    """By cell: the most confident errors, or the least confident correct predictions."""


@dataclass(frozen=True)
class SeedRun:
    """The score of one of several runs."""

    score: float
    seed: int | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class TaskReport:
    """Contents of the page; sections without data are omitted."""

    title: str
    kind: str
    """"Fine-tuning" or "Evaluation"."""
    split: str
    examples: int
    metric: str
    metrics: Mapping[str, float]
    interval: tuple[float, float] | None = None
    baseline: tuple[str, float] | None = None
    """Name and score of a trivial model: one that always predicts the most frequent label, or right-branching trees."""
    constant: str | None = None
    """The answer to every example (for tags, to every word) of a model that has not learned the task."""
    confusion: Confusion | None = None
    values: Sequence[tuple[float, float]] = ()
    """Pairs of target and prediction, if answers are numbers."""
    errors: Sequence[WrongAnswer] = ()
    """The worst errors, at most MAX_ERRORS."""
    error_count: int = 0
    parsing: ParsingReport | None = None
    """Labels, errors and drawings, if answers are trees; these take the place of `errors`."""
    rows: Sequence[LogRow] = ()
    """Rows of the log: kind "training" with step and loss, kind "held_out" with step, loss and score."""
    runs: Sequence[SeedRun] = ()
    notices: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    settings: str = ""

    @property
    def score(self) -> float:
        return self.metrics[self.metric]


@dataclass(frozen=True)
class ScoreBar:
    """Positions on the scale of a score, in percent of its length."""

    low: int
    score: float
    baseline: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class ConfusionTable:
    """Confusion matrix and per-label metrics of the labels that are shown."""

    labels: Sequence[str]
    all_labels: int
    counts: np.ndarray
    totals: np.ndarray
    """Examples of each label, including those with predictions that are not shown."""
    classes: Sequence[tuple[str, int, int, tuple[float, float, float]]]
    """Label, examples, predictions; precision, recall and F1 in percent; the lowest F1 first."""
    rows: Mapping[str, Sequence[tuple[str, str, str, str]]]
    """Examples by cell ("row,column"): text before the labelled word, the word, text after it, confidence."""

    @property
    def is_dense(self) -> bool:
        return len(self.labels) > ROOMY_LABELS

    def share(self, row: int, column: int) -> float:
        """Return the share of a label's examples with a prediction, in percent."""
        return 100 * float(self.counts[row, column]) / max(1, int(self.totals[row]))


def build_task_report(
    task: Task[Example],
    examples: Sequence[Example],
    answers: Sequence[Answer],
    evaluation: Evaluation,
    *,
    title: str,
    kind: str,
    split: str,
    interval: tuple[float, float] | None = None,
    rows: Sequence[LogRow] = (),
    runs: Sequence[SeedRun] = (),
    notices: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
    settings: str = "",
) -> TaskReport:
    """Collect the contents of the page from the answers of a model."""
    predicted_labels = task.predicted_labels(examples, answers)
    confusion = None if predicted_labels is None else _confusion(task, examples, predicted_labels)
    values = [] if confusion is not None else _numeric_values(task, examples, answers)
    severity = [task.error(example, answer) for example, answer in zip(examples, answers, strict=True)]
    error_indices = [index for index, value in enumerate(severity) if value > 0]
    parsing = build_parsing_report(task, examples, answers) if isinstance(task, Parsing) else None
    listed = [] if parsing is not None else error_indices
    errors = []
    for index in heapq.nsmallest(MAX_ERRORS, listed, key=lambda index: (-severity[index], index)):
        example, answer = examples[index], answers[index]
        described = [task.describe_answer(example, value) for value in (task.gold(example), answer["answer"])]
        target, prediction = (shorten(format_answer(value), MAX_ANSWER) for value in described)
        text = cut_middle(" ".join(task.describe(example).split()), MAX_TEXT)
        confidence = _confidence(answer, severity[index], is_value=bool(values))
        errors.append(WrongAnswer(text, target, prediction, confidence))
    return TaskReport(
        title,
        kind,
        split,
        len(examples),
        evaluation.metric,
        evaluation.metrics,
        interval=interval,
        baseline=_baseline(task, examples, answers, confusion, evaluation.metric),
        constant=_constant_answer(task, examples, answers, predicted_labels),
        confusion=confusion,
        values=values,
        errors=errors,
        error_count=len(error_indices),
        parsing=parsing,
        rows=rows,
        runs=runs,
        notices=notices,
        facts=facts or {},
        settings=settings,
    )


def render_finetuning_page(report: TaskReport) -> str:
    """Return the report as one self-contained HTML document."""
    name = metric_name(report.metric, report)
    others = {
        metric_name(key, report): f"{value:,.2f}" for key, value in report.metrics.items() if key != report.metric
    }
    scores = column([row for row in report.rows if row.get("kind") == "held_out"], "score")
    return render(
        "finetuning.html",
        report=report,
        headline=(
            f"{name} {f'{report.score:.1f}' if math.isfinite(report.score) else 'undefined'} on "
            f"{format_count(report.examples, f'{report.split} example')}"
        ),
        alerts=_alerts(report),
        score_bar=_score_bar(report),
        metrics=others,
        notices=[*report.notices, *_warnings(report)],
        runs_chart=_runs_chart(report),
        runs_facts=_runs_facts(report),
        curves=_curves(report),
        best_step=max(scores, key=lambda pair: pair[1])[0] if scores else None,
        confusion=_confusion_table(report.confusion) if report.confusion else None,
        scatter=scatter_chart(report.values, x_label="true", y_label="predicted") if report.values else None,
    )


def metric_name(name: str, report: TaskReport | None = None) -> str:
    """Return the display name of a metric; F1 over more than two labels is macro F1, except for chunks."""
    if name == "f1" and report is not None and report.confusion is not None and len(report.confusion.labels) > 2:
        name = "f1_of_chunks" if "recall" in report.metrics else "macro_f1"
    words = name.replace("_", " ").replace("f1", "F1")
    return METRIC_NAMES.get(name, words[:1].upper() + words[1:])


def format_answer(answer: object) -> str:
    """Format an answer or a target in one line."""
    if answer is None or (isinstance(answer, str | list | tuple) and not answer):
        return "none"
    if isinstance(answer, float):
        return f"{answer:.4g}"
    if isinstance(answer, Mapping):
        return ", ".join(f"{name}: {format_answer(value)}" for name, value in answer.items())
    if isinstance(answer, list | tuple):
        return ", ".join(map(format_answer, answer))
    return " ".join(str(answer).split())


def cut_middle(text: str, limit: int) -> str:
    """Replace the middle of a long text by an ellipsis, so that both texts of a pair stay visible."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 3].rstrip()} … {text[-end:].lstrip()}"


def most_confused(counts: np.ndarray, limit: int = MAX_LABELS) -> np.ndarray:
    """Return the indices of the labels with the most errors, in ascending order.

    Shape: counts (targets, predictions).
    """
    errors = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    indices: np.ndarray = np.sort(np.argsort(-errors, kind="stable")[:limit])
    return indices


def _numeric_values(
    task: Task[Example], examples: Sequence[Example], answers: Sequence[Answer]
) -> list[tuple[float, float]]:
    """Return targets and predictions if all are numbers; only integers are class indices."""
    pairs = [(task.gold(example), answer["answer"]) for example, answer in zip(examples, answers, strict=True)]
    is_number = all(isinstance(value, float | int) and not isinstance(value, bool) for pair in pairs for value in pair)
    has_floats = any(isinstance(value, float) for pair in pairs for value in pair)
    return [(float(target), float(value)) for target, value in pairs] if is_number and has_floats else []


def _confidence(answer: Answer, severity: float, *, is_value: bool) -> str:
    score = answer.get("score")
    if not is_value and isinstance(score, float | int) and 0 <= score <= 1:
        return f"{100 * score:.1f} %"
    return f"{severity:.3g}"


def _baseline(
    task: Task[Example],
    examples: Sequence[Example],
    answers: Sequence[Answer],
    confusion: Confusion | None,
    metric: str,
) -> tuple[str, float] | None:
    """Return the score of always predicting the most frequent label, or of right-branching trees; None otherwise."""
    if isinstance(task, Parsing):
        return "right-branching trees", right_branching_score(task, examples, metric)
    if confusion is None or any(answer["answer"] not in confusion.labels for answer in answers):
        return None
    label = confusion.labels[int(confusion.counts.sum(1).argmax())]
    always = task.evaluate(examples, [{**answer, "answer": label} for answer in answers])
    return f"always “{shorten(label, 24)}”", always.metrics[metric]


def _score_bar(report: TaskReport) -> ScoreBar | None:
    """Place the score on a scale from 0 (or −100) to 100; None if it is neither a percentage nor a correlation."""
    score, interval = report.score, report.interval
    low = -100 if min(score, *(interval or (score,))) < 0 else 0
    if not math.isfinite(score) or score > 100 or (interval and interval[1] > 100.001):
        return None

    def position(value: float) -> float:
        return round(100 * (min(max(value, low), 100.0) - low) / (100 - low), 3)

    return ScoreBar(
        low,
        position(score),
        None if report.baseline is None else position(report.baseline[1]),
        None if interval is None else (position(interval[0]), round(position(interval[1]) - position(interval[0]), 3)),
    )


def _constant_answer(
    task: Task[Example],
    examples: Sequence[Example],
    answers: Sequence[Answer],
    predicted_labels: PredictedLabels | None,
) -> str | None:
    """Return the answer of a model that gives the same one everywhere, although the targets differ; else None."""
    if not answers or not has_constant_answers(task, examples, answers):
        return None
    if predicted_labels is None:
        return shorten(format_answer(answers[0]["answer"]), MAX_ANSWER)
    return predicted_labels.labels[predicted_labels.items[0].predicted]


def _alerts(report: TaskReport) -> list[str]:
    """Return the reasons not to use the model at all."""
    alerts = []
    if report.constant is not None:
        alerts.append(
            f"The model predicts {report.constant} everywhere: it has not learned the task. Another seed, a lower "
            "learning rate or more epochs often help."
        )
    undefined = [metric_name(name, report) for name, value in report.metrics.items() if not math.isfinite(value)]
    if undefined:
        alerts.append(f"Not a finite number: {', '.join(undefined)}. The predictions may be constant or not finite.")
    diverged = next((row for row in report.rows if not math.isfinite(row.get("loss", 0.0))), None)
    if diverged is not None:
        alerts.append(
            f"The loss is {diverged['loss']} at step {diverged['step']}: training diverged. Use a lower learning rate "
            "or a longer warm-up."
        )
    return alerts


def _warnings(report: TaskReport) -> list[str]:
    """Return warnings that follow from the metrics."""
    warnings: list[str] = []
    if report.confusion is not None:
        totals = zip(report.confusion.labels, report.confusion.counts.sum(1), strict=True)
        absent = [label for label, count in totals if not count]
        if absent:
            named = shorten(", ".join(absent), MAX_ANSWER)
            warnings.append(f"{report.split.capitalize()} has no examples of {len(absent)} of the labels: {named}.")
    if report.baseline is not None and report.interval is not None and report.constant is None and not warnings:
        name, level = report.baseline
        if report.interval[0] <= level:
            warnings.append(
                f"The confidence interval includes {level:.1f}, the score of {name}: the model may be no better."
            )
    if report.examples < FEW_EXAMPLES:
        warnings.append(
            f"The score is based on only {format_count(report.examples, 'example')}: mind the confidence interval."
        )
    return warnings


def _runs_chart(report: TaskReport) -> Markup | None:
    """Draw one row of points per learning rate."""
    by_rate: dict[float | None, list[float]] = {}
    for run in report.runs:
        by_rate.setdefault(run.learning_rate, []).append(run.score)
    rows = [("all runs" if rate is None else f"learning rate {rate:g}", scores) for rate, scores in by_rate.items()]
    return strip_chart(rows, x_label=metric_name(report.metric, report)) if rows else None


def _runs_facts(report: TaskReport) -> dict[str, str]:
    if not report.runs:
        return {}
    best = max(report.runs, key=lambda run: run.score)
    return {
        "Runs": f"{len(report.runs)}",
        "Mean": f"{fmean(run.score for run in report.runs):.2f}",
        "Best": f"{best.score:.2f} (seed {'?' if best.seed is None else best.seed})",
        "Worst": f"{min(run.score for run in report.runs):.2f}",
    }


def _curves(report: TaskReport) -> list[Panel]:
    training = [row for row in report.rows if row.get("kind") == "training"]
    held_out = [row for row in report.rows if row.get("kind") == "held_out"]
    if not training:
        return []
    panels = []
    scores = column(held_out, "score")
    if scores:
        name, best = metric_name(report.metric, report), max(score for _, score in scores)
        reference = (f"best {best:.2f}", best) if len(scores) > 1 else None
        chart = line_chart(
            [Series(name, scores)], x_label="step", y_label=name, reference=reference, height=240, x_from_zero=True
        )
        panels.append(Panel(f"{name} on {report.split}", chart))
    losses = [
        Series("training", column(training, "loss", keep_gaps=True)),
        Series(report.split, column(held_out, "loss", keep_gaps=True)),
    ]
    chart = line_chart(losses, x_label="step", y_label="loss", height=240, y_from_zero=True, x_from_zero=True)
    return [*panels, Panel("Loss", chart)]


def _confusion(task: Task[Example], examples: Sequence[Example], predicted_labels: PredictedLabels) -> Confusion:
    """Count the predicted labels and choose the examples that are listed for each cell."""
    cells: dict[tuple[int, int], list[PredictedLabel]] = defaultdict(list)
    for item in predicted_labels.items:
        cells[item.target, item.predicted].append(item)
    limit = min(MAX_CELL_ROWS, max(1, MAX_LISTED_ROWS // max(1, len(cells))))

    def row(item: PredictedLabel) -> CellRow:
        before, word, after = task.describe_label(examples[item.example], item)
        if word:
            before, after = before[-MAX_CELL_TEXT // 2 :], shorten(after, MAX_CELL_TEXT // 2)
        return CellRow(cut_middle(before, MAX_CELL_TEXT), word, after, f"{100 * item.confidence:.1f} %")

    def rank(item: PredictedLabel) -> float:
        return item.confidence if item.target == item.predicted else -item.confidence

    rows = {cell: [row(item) for item in heapq.nsmallest(limit, items, key=rank)] for cell, items in cells.items()}
    return Confusion(predicted_labels.labels, predicted_labels.counts, rows)


def _confusion_table(confusion: Confusion) -> ConfusionTable:
    labels, counts = confusion.labels, confusion.counts
    chosen = np.arange(len(labels)) if len(labels) <= MAX_LABELS else most_confused(counts)
    totals, predictions, metrics = counts.sum(1), counts.sum(0), ClassCounts.of_confusion(counts)
    classes = [
        (
            labels[index],
            int(totals[index]),
            int(predictions[index]),
            (100 * metrics.precision[index], 100 * metrics.recall[index], 100 * metrics.f1[index]),
        )
        for index in sorted(chosen, key=lambda index: metrics.f1[index])
    ]
    position = {int(index): number for number, index in enumerate(chosen)}
    rows = {
        f"{position[target]},{position[predicted]}": [(one.before, one.word, one.after, one.confidence) for one in cell]
        for (target, predicted), cell in confusion.rows.items()
        if target in position and predicted in position
    }
    names = [labels[index] for index in chosen]
    return ConfusionTable(names, len(labels), counts[np.ix_(chosen, chosen)], totals[chosen], classes, rows)
