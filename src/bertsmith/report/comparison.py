"""Runs of several recipes at an equal budget: their curves over each cost, and a table with the spread over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from bertsmith.report import chart
from bertsmith.report.chart import Series, line_chart, short_number
from bertsmith.report.page import facts_table, masthead, page, section

COSTS = {"tokens": "tokens", "flops": "training operations", "seconds": "seconds of training"}

# of a held-out row: the heading of the column, and how a value is written
FIGURES = {
    "token_loss": ("token loss", "{:.3f}"),
    "token_accuracy": ("tokens guessed", "{:.1%}"),
    "replaced_recall": ("replaced found", "{:.1%}"),
    "replaced_precision": ("found rightly", "{:.1%}"),
    "next_sentence_accuracy": ("next sentences", "{:.1%}"),
}
NOTE = (
    "Token loss compares recipes whose tokens are guessed by the model itself and in the same way: with replaced-token "
    "detection it is the small generator that guesses, not the model that is kept, and a causal model reads one side "
    "only. Judge such recipes by a task."
)

STYLE = """
.comparison { overflow-x: auto; }
.comparison table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.comparison th, .comparison td { text-align: right; padding: 8px 12px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
.comparison th { color: var(--muted); font-weight: 500; font-size: 14px; }
.comparison th:first-child, .comparison td:first-child { text-align: left; font-weight: 600; }
.comparison .spread { color: var(--muted); }
"""


@dataclass(frozen=True)
class Run:
    """One recipe with one seed: its figures, and its held-out rows with what had been spent by then."""

    seed: int
    figures: dict[str, Any]
    """The run's result.json."""
    held_out: list[dict[str, float]]
    """Rows with tokens, flops, seconds and what FIGURES names."""


def run_of(seed: int, figures: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Run:
    """A run from its result.json and the rows of its log."""
    term = figures["token_term"]
    training = [row for row in rows if row["kind"] == "training"]
    held_out = []
    for row in rows:
        if row["kind"] != "held_out":
            continue
        spent = {name: _spent(training, row["step"], name) for name in COSTS}
        told = {name: row[name] for name in FIGURES if name in row}
        told |= {"token_loss": row[f"{term}_loss"], "token_accuracy": row[f"{term}_accuracy"]}
        held_out.append({"step": row["step"], **spent, **told})
    return Run(seed, figures, held_out)


def table(runs: dict[str, list[Run]]) -> dict[str, dict[str, Any]]:
    """Of every recipe the last held-out figures, mean and spread (standard deviation) over the seeds, and its cost."""
    rows: dict[str, dict[str, Any]] = {}
    for name, seeds in runs.items():
        row: dict[str, Any] = {"seeds": len(seeds), "tier": seeds[0].figures.get("tier", "custom")}
        for figure in FIGURES:
            values = [run.held_out[-1][figure] for run in seeds if run.held_out and figure in run.held_out[-1]]
            if values:
                row[figure] = {"mean": fmean(values), "spread": stdev(values) if len(values) > 1 else None}
        for cost in ("parameters", "steps", "tokens", "seconds", "tokens_per_second"):
            row[cost] = fmean(run.figures[cost] for run in seeds)
        row["flops"] = fmean(run.figures["training_flops"] for run in seeds)
        rows[name] = row
    return rows


def cells(row: dict[str, Any]) -> dict[str, str]:
    """One row of the table as it is shown: the heading of each column and the text in it."""
    texts = {}
    for figure, (heading, form) in FIGURES.items():
        told = row.get(figure)
        if told is not None:
            spread = "" if told["spread"] is None else f" ± {form.format(told['spread'])}"
            texts[heading] = form.format(told["mean"]) + spread
    if row["tier"] != "custom":
        texts["tier"] = row["tier"]
    texts["parameters"] = short_number(row["parameters"])
    texts["tokens"] = short_number(row["tokens"])
    texts["operations"] = f"{row['flops']:.2e}"
    texts["seconds"] = f"{row['seconds']:,.0f}"
    texts["tokens/s"] = short_number(float(f"{row['tokens_per_second']:.3g}"))
    return texts


def comparison_page(title: str, runs: dict[str, list[Run]], facts: dict[str, str], unigram: float | None) -> str:
    """The whole comparison as one self-contained HTML document."""
    rows = table(runs)
    body = masthead("Comparison", title, _headline(runs, rows), lead=NOTE if _differs(runs) else "")
    body += section("At the end", _html_table(rows), note=_spread_note(runs))
    reference = None if unigram is None else ("unigram level", unigram)
    for cost, label in COSTS.items():
        curves = line_chart(
            [Series(name, mean_curve(seeds, cost, "token_loss")) for name, seeds in runs.items()],
            x_label=label,
            y_label="nats per token",
            reference=reference,
            height=320,
        )
        body += section(f"Token loss by {label}", f'<div class="panel">{curves}</div>')
    if any("replaced_recall" in row for row in rows.values()):
        found = [
            Series(name, mean_curve(seeds, "tokens", "replaced_recall"))
            for name, seeds in runs.items()
            if "replaced_recall" in rows[name]
        ]
        curves = line_chart(found, x_label="tokens", y_label="share found", height=260, from_zero=True)
        body += section("Replaced tokens found", f'<div class="panel">{curves}</div>')
    body += section("Facts", facts_table(facts))
    return page(f"{title}: comparison", body, style=chart.STYLE + STYLE)


def mean_curve(runs: Sequence[Run], cost: str, figure: str) -> list[tuple[float, float]]:
    """The mean over the seeds at each held-out row; the cost is the mean, too, since seconds differ a little."""
    points = []
    for rows in zip(*(run.held_out for run in runs), strict=False):
        points.append((fmean(row[cost] for row in rows), fmean(row[figure] for row in rows)))
    return points


def _spent(training: Sequence[dict[str, Any]], step: int, name: str) -> float:
    """What had been spent by a step, between two rows of the log in proportion."""
    before: dict[str, Any] = {"step": 0, name: 0.0}
    for first, second in pairwise([before, *training]):
        if step <= second["step"]:
            share = (step - first["step"]) / max(1, second["step"] - first["step"])
            return first[name] + share * (second[name] - first[name])
    return training[-1][name] if training else 0.0


def headings(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The columns that at least one recipe has something for, results before costs."""
    wanted = [heading for heading, _ in FIGURES.values()]
    found = list(dict.fromkeys(heading for row in rows.values() for heading in cells(row)))
    return sorted(found, key=lambda heading: wanted.index(heading) if heading in wanted else len(wanted))


def _differs(runs: dict[str, list[Run]]) -> bool:
    """Whether tokens are guessed by a generator or in different ways, so that losses say little about each other."""
    terms = {run.figures["token_term"] for seeds in runs.values() for run in seeds}
    return len(terms) > 1 or "generator" in terms


def _headline(runs: dict[str, list[Run]], rows: dict[str, dict[str, Any]]) -> str:
    scored = {name: row["token_loss"]["mean"] for name, row in rows.items() if "token_loss" in row}
    if _differs(runs) or not scored:
        return f"{len(runs)} recipes at an equal budget."
    best, second = sorted(scored, key=scored.__getitem__)[:2]
    spread = max(rows[name]["token_loss"]["spread"] or 0.0 for name in (best, second))
    doubt = f", but {second} is within the spread of the seeds" if scored[second] - scored[best] <= spread else ""
    return f"{best} has the lowest loss, {scored[best]:.3f} nats a token{doubt}."


def _html_table(rows: dict[str, dict[str, Any]]) -> str:
    columns = headings(rows)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in ["", *columns])
    lines = ""
    for name, row in rows.items():
        texts = cells(row)
        values = "".join(f"<td>{escape(texts.get(heading, '–'))}</td>" for heading in columns)
        lines += f"<tr><td>{escape(name)}</td>{values}</tr>"
    return f'<div class="panel comparison"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _spread_note(runs: dict[str, list[Run]]) -> str:
    most = max(len(seeds) for seeds in runs.values())
    if most == 1:
        return "One seed of each: the differences include chance. Give --seeds 3 to see how much."
    return f"Means and standard deviations over {most} seeds."
