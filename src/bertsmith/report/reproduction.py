"""A table of experiments for people: Markdown, a page with charts, and the pages of the documentation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bertsmith.report.charts import IntervalBar, Panel, interval_chart, strip_chart
from bertsmith.report.page import format_duration, render
from bertsmith.reproduction.claims import Comparison, Verdict
from bertsmith.reproduction.evaluation import JudgedClaim, MetricCell, TableEvaluation
from bertsmith.reproduction.table import ExperimentTable

RULE = (
    "A difference holds if its 95 % interval, simultaneous over the comparisons of the claim and paired by seed, lies "
    "above 0; it is reversed below 0 and within noise otherwise. Differences are turned so that + supports the claim."
)
_COLOURS = {Verdict.HOLDS: 2, Verdict.SMALL: 2, Verdict.REVERSED: 1}  # of series: green, orange; otherwise blue


@dataclass(frozen=True)
class ClaimRow:
    """A claim as shown in tables."""

    text: str
    metric: str
    differences: tuple[str, ...]
    status: str
    note: str
    expected: str


def claim_rows(evaluation: TableEvaluation) -> list[ClaimRow]:
    """Return all claims with their differences and verdicts as text."""
    return [_claim_row(evaluation.table, one) for one in evaluation.claims]


def _claim_row(table: ExperimentTable, one: JudgedClaim) -> ClaimRow:
    metric = table.metrics[one.claim.metric]
    return ClaimRow(
        text=one.claim.text,
        metric=metric.label,
        differences=tuple(_difference(comparison, metric.digits) for comparison in one.decision.comparisons),
        status=one.status,
        note=one.decision.note,
        expected=one.claim.expected,
    )


def _difference(comparison: Comparison, digits: int) -> str:
    interval = comparison.interval
    text = f"{comparison.name}: {interval.mean:+.{digits}f}"
    if interval.low is not None and interval.high is not None:
        text += f" ({interval.low:+.{digits}f} to {interval.high:+.{digits}f})"
    verdict = "" if comparison.verdict is None else f" {comparison.verdict}"
    return text + verdict + (", equal" if comparison.is_equal and comparison.verdict is Verdict.NOISE else "")


def format_cell(cell: MetricCell | None, digits: int) -> str:
    """Return mean ± sd with the number of seeds, or the reason for a missing value."""
    if cell is None:
        return "–"
    if cell.mean is None:
        return "failed" if cell.failed else "not run"
    spread = "" if cell.std is None else f" ± {cell.std:.{digits}f}"
    return f"{cell.mean:.{digits}f}{spread} (n = {len(cell.values)})"


def published_markdown(table: ExperimentTable) -> str:
    """Return the published rows and the claims, for `--published`."""
    headings = _published_headings(table)
    lines = [f"# {table.title}", "", *([table.paper, ""] if table.paper else [])]
    if table.published:
        lines += [table.published, ""]
    if headings:
        rows = [[table.label(row), *_published_cells(table, row, headings)] for row in table.rows]
        lines += [*_markdown_table(["", *headings], rows), ""]
    lines += ["Claims:", "", *(f"- {claim.text} ({table.metrics[claim.metric].label})" for claim in table.claims)]
    return "\n".join(lines)


def table_markdown(evaluation: TableEvaluation) -> str:
    """Return table.md: published beside measured figures, claims with differences and verdicts, and the costs."""
    table = evaluation.table
    lines = [f"# {table.title}", ""]
    lines += [f"{table.paper}.", ""] if table.paper else []
    lines += ["## Claims", "", *_claims_markdown(evaluation), "", RULE, ""]
    lines += ["## Figures", "", *_figures_markdown(evaluation), ""]
    if table.published:
        lines += [f"Published: {table.published}", ""]
    if table.notes:
        lines += ["## Limits", "", *(f"- {note}" for note in table.notes), ""]
    needs_data = any("{data}" in str(run.settings) for run in table.runs.values())
    command = f"bertsmith reproduce {table.name}" + (" --data DATA" if needs_data else "")
    lines += ["## Run it", "", "```", command, "```", "", _costs(evaluation)]
    return "\n".join(lines) + "\n"


def index_rows(evaluation: TableEvaluation) -> list[tuple[str, str]]:
    """Return the claims of a table with their verdicts, for the index of all tables."""
    return [(one.claim.text, one.status) for one in evaluation.claims]


def render_table_page(evaluation: TableEvaluation) -> str:
    """Return the table as one self-contained HTML document."""
    table = evaluation.table
    headings = [*_published_headings(table), *(metric.label for metric in table.metrics.values())]
    rows = [(table.label(row), _cells(evaluation, row)) for row in table.rows]
    return render(
        "reproduction.html",
        title=table.title,
        headline=_headline(evaluation),
        lead=table.paper,
        claims=claim_rows(evaluation),
        rule=RULE,
        published_count=len(_published_headings(table)),
        headings=headings,
        rows=rows,
        panels=[*_difference_panels(evaluation), *_value_panels(evaluation)],
        published=table.published,
        notes=table.notes,
        facts={
            "runs": f"{evaluation.runs_done} of {evaluation.runs}",
            "time of the runs": format_duration(evaluation.seconds),
            "planned": format_duration(evaluation.planned_seconds),
            "device": ", ".join(evaluation.devices) or "none yet",
        },
    )


def _headline(evaluation: TableEvaluation) -> str:
    counts: dict[str, int] = {}
    for one in evaluation.claims:
        counts[one.status] = counts.get(one.status, 0) + 1
    listed = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{len(evaluation.claims)} {'claim' if len(evaluation.claims) == 1 else 'claims'}: {listed}."


def _difference_panels(evaluation: TableEvaluation) -> list[Panel]:
    panels = []
    for one in evaluation.claims:
        metric = evaluation.table.metrics[one.claim.metric]
        bars = [
            IntervalBar(
                comparison.name,
                comparison.interval.mean,
                comparison.interval.low,
                comparison.interval.high,
                _COLOURS.get(comparison.verdict, 0) if comparison.verdict else 0,
            )
            for comparison in one.decision.comparisons
            if comparison.interval.low is not None and comparison.interval.high is not None
        ]
        if bars:
            panels.append(Panel(one.claim.text, interval_chart(bars, x_label=f"{metric.label}: + supports the claim")))
    return panels


def _value_panels(evaluation: TableEvaluation) -> list[Panel]:
    table, panels = evaluation.table, []
    for name, cells in evaluation.cells.items():
        rows = [(table.label(row), list(cell.values.values())) for row, cell in cells.items() if cell.values]
        if rows:
            metric = table.metrics[name]
            panels.append(Panel(metric.label, strip_chart(rows, x_label=metric.label, digits=metric.digits)))
    return panels


def _claims_markdown(evaluation: TableEvaluation) -> list[str]:
    rows = []
    for row in claim_rows(evaluation):
        details = "<br>".join([*row.differences, *([row.note] if row.note else [])]) or "–"
        rows.append([row.text, row.metric, details, f"**{row.status}**", row.expected or "–"])
    return _markdown_table(["claim", "metric", "measured", "verdict", "expected before the run"], rows)


def _figures_markdown(evaluation: TableEvaluation) -> list[str]:
    table = evaluation.table
    published = [f"published: {heading}" for heading in _published_headings(table)]
    headings = ["", *published, *(metric.label for metric in table.metrics.values())]
    return _markdown_table(headings, [[table.label(row), *_cells(evaluation, row)] for row in table.rows])


def _cells(evaluation: TableEvaluation, row: str) -> list[str]:
    table = evaluation.table
    measured = [format_cell(evaluation.cells[name].get(row), metric.digits) for name, metric in table.metrics.items()]
    return [*_published_cells(table, row, _published_headings(table)), *measured]


def _published_headings(table: ExperimentTable) -> list[str]:
    return list(dict.fromkeys(heading for row in table.rows.values() for heading in row.published))


def _published_cells(table: ExperimentTable, row: str, headings: Sequence[str]) -> list[str]:
    figures: Mapping[str, float | str] = table.rows[row].published
    return [str(figures.get(heading, "–")) for heading in headings]


def _costs(evaluation: TableEvaluation) -> str:
    if not evaluation.runs_done:
        planned = "a CPU" if evaluation.table.device == "cpu" else "one H200"
        return f"No run has finished yet; the plan is made for {planned}."
    return (
        f"{evaluation.runs_done} of {evaluation.runs} runs, {format_duration(evaluation.seconds)} in all "
        f"(planned {format_duration(evaluation.planned_seconds)}), on {', '.join(evaluation.devices)}."
    )


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(headings), "|" + "---|" * len(headings), *map(line, rows)]
