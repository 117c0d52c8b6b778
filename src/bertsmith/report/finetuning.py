"""The page that tells how good a fine-tuned model is: its figure and how sure that is, how it learned, its mistakes."""

from html import escape
from statistics import fmean
from typing import Any

import numpy as np

from bertsmith.report import chart, confusion, points, pretraining
from bertsmith.report.answers import LONGEST_ANSWER, TaskReport
from bertsmith.report.chart import Series, column, line_chart
from bertsmith.report.confusion import MOST_LABELS, class_table, cut, matrix_table, most_confused
from bertsmith.report.page import facts_table, masthead, page, section
from bertsmith.tasks.metrics.classes import ClassCounts

STYLE = """
.mistakes { list-style: none; display: grid; gap: 12px; }
.mistakes li { display: grid; grid-template-columns: minmax(0, 1fr) minmax(200px, 30%); gap: 8px 28px; }
.mistakes .panel { padding: 14px 18px; }
.mistakes dl { display: grid; grid-template-columns: 3.6em minmax(0, 1fr); gap: 2px 10px; font-size: 14.5px;
  align-content: start; }
.mistakes dt { color: var(--muted); }
.mistakes dd.right { color: var(--series-1); font-weight: 600; }
.mistakes dd.said { color: var(--series-2); font-weight: 600; }
.side { display: flex; flex-wrap: wrap; gap: 20px; align-items: stretch; }
.side > * { max-width: 100%; min-width: 0; }
.side > :last-child { flex: 1 1 560px; }
.panel.narrow { max-width: 640px; }
@media (max-width: 640px) { .mistakes li { grid-template-columns: minmax(0, 1fr); } }
"""

_NAMES = {"f1_of_chunks": "F1", "mrr": "MRR", "map": "MAP"}


def finetuning_page(report: TaskReport) -> str:
    """The whole report as one self-contained HTML document."""
    body = masthead(report.kind, report.title, _headline(report), lead=_lead(report))
    body += points.interval_bar(report.figures[report.metric], report.interval, report.baseline)
    body += _other_figures(report)
    notices = [*report.notices, *_own_notices(report)]
    if notices:
        told = "".join(f"<li>{escape(notice)}</li>" for notice in notices)
        body += section("To know", f'<div class="panel"><ul class="notices">{told}</ul></div>')
    if report.runs:
        body += section("Over seeds", _runs(report), note="Each point is a run; the bar is the mean of its line.")
    if any(row.get("kind") == "training" for row in report.rows):
        body += section("How it learned", _curves(report), note=_learning_note(report))
    if report.confusion is not None:
        body += _confusions(*report.confusion)
    if len(report.values):
        note = "Each point is an example; on the dashed line what was said is what is right."
        drawn = f'<div class="panel narrow">{points.scatter(report.values)}</div>'
        body += section("Said against right", drawn, note=note)
    if report.mistakes:
        body += _mistakes(report)
    if report.facts:
        body += section("Data and settings", facts_table(report.facts))
    if report.settings:
        settings = f'<pre tabindex="0">{escape(report.settings)}</pre>'
        settings = f"<details><summary>Show all settings</summary>{settings}</details>"
        body += section("Resolved settings", settings, note="These settings, saved as a file, run the same run again.")
    style = chart.STYLE + pretraining.STYLE + confusion.STYLE + points.STYLE + STYLE
    return page(f"{report.title}: {report.kind.lower()}", body, style=style)


def metric_name(name: str, report: TaskReport | None = None) -> str:
    """A figure's name as a person writes it; F1 of more than two labels is a mean over them, F1 of chunks is
    not."""
    if name == "f1" and report is not None and report.confusion is not None and len(report.confusion[0]) > 2:
        # of chunks of words it counts them all together, with precision and recall beside it
        name = "f1_of_chunks" if "recall" in report.figures else "macro_f1"
    words = name.replace("_", " ").replace("f1", "F1")
    return _NAMES.get(name, words[:1].upper() + words[1:])


def _headline(report: TaskReport) -> str:
    name, count = metric_name(report.metric, report), f"{report.examples:,}"
    return f"{name} {report.figures[report.metric]:.1f} on {count} {report.part} {_plural('example', report.examples)}"


def _lead(report: TaskReport) -> str:
    if report.interval is None:
        return ""
    low, high = report.interval
    return (
        f"For this model and examples of this kind: between {low:.1f} and {high:.1f} with 95 % confidence. How far "
        "another seed of the training would move it is not in that."
    )


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _other_figures(report: TaskReport) -> str:
    others = {name: value for name, value in report.figures.items() if name != report.metric}
    named = [(metric_name(name, report), value) for name, value in others.items()]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{value:,.2f}</dd></div>" for name, value in named)
    return f'<dl class="figures">{cells}</dl>' if cells else ""


def _own_notices(report: TaskReport) -> list[str]:
    """What the figures themselves warn of."""
    found: list[str] = []
    if report.confusion is not None:
        labels, counts = report.confusion
        said = counts.sum(0)
        if report.examples > 1 and np.count_nonzero(said) == 1:
            found.append(
                f"The model gives one and the same answer, {labels[int(said.argmax())]}, to every example: it has "
                "learned nothing of the task. Another seed or a lower learning rate often helps."
            )
        absent = [label for label, count in zip(labels, counts.sum(1), strict=True) if not count]
        if absent:
            named = cut(", ".join(absent), LONGEST_ANSWER)
            found.append(f"{report.part.capitalize()} has no example of {len(absent)} of the labels: {named}.")
    if report.baseline is not None and report.interval is not None and not found:
        name, level = report.baseline
        if report.interval[0] <= level:
            found.append(
                f"The interval reaches down to {level:.1f}, what {name} would get: that the model does better than no "
                "model is not shown."
            )
    if report.examples < 100:
        found.append(f"{report.examples} {_plural('example', report.examples)} tell little: mind the interval.")
    return found


def _runs(report: TaskReport) -> str:
    """A line of points for every learning rate."""
    by_rate: dict[Any, list[float]] = {}
    for run in report.runs:
        by_rate.setdefault(run.get("learning_rate"), []).append(float(run["score"]))
    rows = [
        (f"learning rate {rate:g}" if isinstance(rate, float | int) else "all runs", scores)
        for rate, scores in by_rate.items()
    ]
    best = max(report.runs, key=lambda run: float(run["score"]))
    facts = {
        "Runs": f"{len(report.runs)}",
        "Mean of all": f"{fmean(float(run['score']) for run in report.runs):.2f}",
        "Best": f"{float(best['score']):.2f} (seed {best.get('seed', '?')})",
        "Worst": f"{min(float(run['score']) for run in report.runs):.2f}",
    }
    drawn = points.strip(rows, x_label=metric_name(report.metric, report))
    return f'<div class="panel">{drawn}{facts_table(facts)}</div>'


def _curves(report: TaskReport) -> str:
    training = [row for row in report.rows if row.get("kind") == "training"]
    held_out = [row for row in report.rows if row.get("kind") == "held_out"]
    losses = [
        Series("training", column(training, "loss", keep_gaps=True)),
        Series(report.part, column(held_out, "loss", keep_gaps=True)),
    ]
    scores = column(held_out, "score")
    loss = line_chart(losses, x_label="step", y_label="loss", height=240, from_zero=True, starts_at_zero=True)
    drawn = f'<div class="panel"><h3>Loss</h3>{loss}</div>'
    if scores:
        name = metric_name(report.metric, report)
        best = ("best", max(score for _, score in scores)) if len(scores) > 1 else None
        curve = line_chart(
            [Series(name, scores)], x_label="step", y_label=name, reference=best, height=240, starts_at_zero=True
        )
        drawn = f'<div class="panel"><h3>{escape(f"{name} on {report.part}")}</h3>{curve}</div>{drawn}'
    return f'<div class="pair">{drawn}</div>'


def _learning_note(report: TaskReport) -> str:
    scores = column([row for row in report.rows if row.get("kind") == "held_out"], "score")
    if not scores:
        return ""
    step, _ = max(scores, key=lambda pair: pair[1])
    return f"The best evaluation is that after step {step:,.0f}."


def _confusions(labels: tuple[str, ...], counts: np.ndarray) -> str:
    chosen = np.arange(len(labels)) if len(labels) <= MOST_LABELS else most_confused(counts)
    names = [labels[number] for number in chosen]
    only = f" The {MOST_LABELS} of {len(labels):,} labels with most mistakes." if len(chosen) < len(labels) else ""
    matrix = matrix_table(names, counts[np.ix_(chosen, chosen)], counts.sum(1)[chosen])
    note = (
        f"A row is what is right, a column what was said; shares are of the row.{only} Precision is the share of a "
        "label's answers that is right, recall the share of its examples that is found."
    )
    table = class_table(labels, ClassCounts.of_confusion(counts), chosen)
    both = f'<div class="panel">{matrix}</div><div class="panel">{table}</div>'
    return section("What was taken for what", f'<div class="side">{both}</div>', note=note)


def _mistakes(report: TaskReport) -> str:
    if len(report.values):
        heading, note = "The answers farthest off", f"The {len(report.mistakes)} largest differences."
    else:
        heading = "The most confident mistakes"
        shown = "all of them" if report.wrong == len(report.mistakes) else f"the {len(report.mistakes)} surest of them"
        note = (
            f"{report.wrong:,} of {report.examples:,} answers are not right; here {shown}. "
            "A label that is itself wrong often shows up here."
        )
    cards = "".join(
        f'<li class="panel"><p>{escape(one.text)}</p><dl><dt>right</dt><dd class="right">{escape(one.right)}</dd>'
        f'<dt>said</dt><dd class="said">{escape(one.said)}</dd><dt>{"off" if len(report.values) else "sure"}</dt>'
        f"<dd>{escape(one.sure)}</dd></dl></li>"
        for one in report.mistakes
    )
    return section(heading, f'<ol class="mistakes">{cards}</ol>', note=note)
