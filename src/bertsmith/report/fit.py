"""Report page and model card of `fit`, the search for a model within a budget."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from bertsmith.report.charts import Marker, marker_chart, series_colour, shape_legend
from bertsmith.report.page import format_count, format_megabytes, render
from bertsmith.shrinking.fit.result import CandidateResult, FitOutcome
from bertsmith.shrinking.fit.settings import BudgetConfig
from bertsmith.tasks.degenerate import DEGENERATE

CHART_HEIGHT = 380
SHAPES = {  # SVG paths around (0, 0) by precision
    "float32": "M5 0A5 5 0 1 1 -5 0A5 5 0 1 1 5 0Z",
    "bfloat16": "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "int8": "M0 -6L5.6 4.4H-5.6Z",
    "int8_static": "M0 6L5.6 -4.4H-5.6Z",
    "int8_weights": "M0 -6.2L6.2 0L0 6.2L-6.2 0Z",
}
ENGINE_COLOURS = {"torch": 0, "onnxruntime": 1, "compiled": 2}  # index of the series colour, the same on every page
MAX_LATENCY_RATIO = 2.5  # to the slower of reference and budget; slower candidates are not drawn


@dataclass(frozen=True)
class FrontChart:
    """Chart of score against latency, and the number of candidates that are too slow to be drawn."""

    chart: Markup
    left_out: int


@dataclass(frozen=True)
class CandidateRow:
    """A formatted row of the table of candidates."""

    network: str
    engine: str
    numbers: Sequence[tuple[str, float | None]]
    """Text and value of each column."""
    budget: str
    style: str


def render_fit_page(outcome: FitOutcome, name: str) -> str:
    """Return the search as one self-contained HTML document."""
    headings = [outcome.metric, f"p{outcome.limit.percentile} ms", "MB", "memory MB", "parameters"]
    return render(
        "fit.html",
        name=name,
        headline=headline(outcome),
        lead=_lead(outcome),
        front=front_chart(outcome),
        alerts=[notice for notice in outcome.notices if notice == DEGENERATE],
        notices=[notice for notice in outcome.notices if notice != DEGENERATE],
        engines=[(name, series_colour(ENGINE_COLOURS[name])) for name in _engines(outcome)],
        precisions=_precisions(outcome),
        data=_script_data(outcome, name),
        command=_command(outcome, name),
        headings=headings,
        candidates=[_candidate_row(row) for row in outcome.candidates],
        facts=_facts(outcome),
    )


def render_fit_card(outcome: FitOutcome, name: str) -> str:
    """Return the model card of the chosen artefact as Markdown."""
    row, whole, percentile = outcome.best, outcome.reference, outcome.limit.percentile
    costs = {
        f"{outcome.metric} on {outcome.split}": lambda one: f"{one.score:.2f}",
        f"latency p{percentile}, ms": lambda one: f"{one.latency_ms:.2f}",
        "size, MB": lambda one: format_megabytes(one.size_mb),
        "peak memory of the process, MB": lambda one: f"{one.memory_mb:.0f}",
        "parameters": lambda one: f"{one.parameters:,}",
    }
    shown = [row, *([whole] if whole and whole.is_measured else [])]
    return render(
        "fit_card.md",
        name=name,
        outcome=outcome,
        row=row,
        columns=["this model", *(["whole network"] if len(shown) > 1 else [])],
        costs=[[label, *map(cell, shown)] for label, cell in costs.items()],
        threads=format_count(outcome.threads, "thread"),
        batch=format_count(outcome.conditions.batch, "sequence"),
        versions=_versions(outcome),
    )


def headline(outcome: FitOutcome) -> str:
    """Return the outcome in one sentence."""
    if outcome.fits:
        row = outcome.best
        return (
            f"{outcome.metric.capitalize()} {outcome.score:.2f} at {row.latency_ms:.2f}\u00a0ms "
            f"(p{outcome.limit.percentile}) and {format_megabytes(row.size_mb)}\u00a0MB: {row.words}."
        )
    missed = "; ".join(miss.words for miss in outcome.misses) or "not in every measurement"
    return f"No candidate meets the budget. The closest is {outcome.best.words}: {missed}."


def front_chart(outcome: FitOutcome) -> FrontChart:
    """Draw score against latency with the Pareto front, the budget and the chosen candidate."""
    rows, limit, floor = outcome.candidates, outcome.limit.latency_ms, outcome.limit.at_least
    keys = {row.name: number for number, row in enumerate(rows)}
    reference = outcome.reference or outcome.best
    slowest = MAX_LATENCY_RATIO * max(reference.latency_ms, limit or 0.0)
    drawn = [row for row in rows if row.latency_ms <= slowest or row.is_chosen]
    front = sorted((row for row in drawn if row.on_front), key=lambda row: row.latency_ms)
    pairs = [
        (engine, precision)
        for engine in _engines(outcome)
        for precision in _precisions(outcome)
        if any((row.engine, row.precision) == (engine, precision) for row in rows)
    ]
    chart = marker_chart(
        [_marker(row, keys[row.name]) for row in sorted(drawn, key=lambda row: (row.is_chosen, row.is_measured))],
        x_label=f"latency p{outcome.limit.percentile}, ms",
        y_label=outcome.metric,
        lines=[("var(--muted)", [(row.latency_ms, row.score) for row in front])],
        x_reference=(f"budget {limit:g} ms", limit) if limit else None,
        y_reference=(f"at least {floor:g}", floor) if floor is not None else None,
        legend=shape_legend(
            [(f"{engine} {precision}", _shape(precision), ENGINE_COLOURS[engine]) for engine, precision in pairs]
        ),
        height=CHART_HEIGHT,
    )
    return FrontChart(chart, len(rows) - len(drawn))


def _shape(precision: str) -> str:
    return SHAPES.get(precision, SHAPES["float32"])


def _engines(outcome: FitOutcome) -> list[str]:
    return sorted({row.engine for row in outcome.candidates}, key=ENGINE_COLOURS.__getitem__)


def _precisions(outcome: FitOutcome) -> list[str]:
    return sorted({row.precision for row in outcome.candidates}, key=list(SHAPES).index)


def _marker(row: CandidateResult, key: int) -> Marker:
    costs = f"{row.score:.2f} at {row.latency_ms:.2f} ms, {format_megabytes(row.size_mb)} MB"
    return Marker(
        row.latency_ms,
        row.score,
        f"{row.words}: {costs}{'' if row.is_measured else ' (estimated)'}",
        ENGINE_COLOURS[row.engine],
        shape=_shape(row.precision),
        style="" if row.is_measured else "hollow",
        label="chosen" if row.is_chosen else "",
        key=key,
    )


def _lead(outcome: FitOutcome) -> str:
    reference = outcome.reference
    whole = ""
    if reference is not None and reference.is_measured:
        speed = reference.latency_ms / outcome.best.latency_ms
        times = f", {speed:.1f}\u00a0× as long" if outcome.fits and speed > 1 else ""
        whole = (
            f" The whole network ({reference.engine} {reference.precision}) has {reference.score:.2f} at "
            f"{reference.latency_ms:.2f}\u00a0ms{times}, and {format_megabytes(reference.size_mb)}\u00a0MB."
        )
    return f"Budget: {outcome.budget}.{whole}"


def _script_data(outcome: FitOutcome, name: str) -> dict[str, Any]:
    """Return the candidates, limits and fixed parts of the command, from which fit.js chooses for other limits."""
    limit = outcome.limit
    return {
        "rows": [
            {
                "network": row.network,
                "engine": row.engine,
                "precision": row.precision,
                "vocabulary": row.vocabulary,
                "score": row.score,
                "latency": row.latency_ms,
                "size": row.size_mb,
                "memory": row.memory_mb,
                "isMeasured": row.is_measured,
                "missed": row.is_measured and row.holds is False,
                "isChosen": row.is_chosen,
            }
            for row in outcome.candidates
        ],
        "whole": next((i for i, row in enumerate(outcome.candidates) if row == outcome.reference), None),
        "limits": {"latency": limit.latency_ms, "size": limit.size_mb, "memory": limit.memory_mb},
        "floor": limit.at_least,
        "prefer": outcome.prefer,
        "metric": outcome.metric,
        "command": _base_command(outcome),
        "out": f"--out {shlex.quote(f'{name}-new')}",
    }


def _base_command(outcome: FitOutcome) -> str:
    """Return the command of the search without limits, engines and output folder."""
    limit = outcome.limit
    words = ["bertsmith", "fit", outcome.model, "--data", outcome.data]
    words += ["--split", outcome.split] * (outcome.split != "dev")
    words += ["--percentile", str(limit.percentile)] * (limit.percentile != BudgetConfig().percentile)
    words += [word for length in limit.lengths for word in ("--length", str(length))]
    words += ["--batch", str(limit.batch)] * (limit.batch != 1)
    words += [] if limit.threads is None else ["--threads", str(limit.threads)]
    words += ["--prefer", outcome.prefer] * (outcome.prefer != "fast")
    return shlex.join(words)


def _command(outcome: FitOutcome, name: str) -> str:
    """Return the command that repeats the search."""
    limit = outcome.limit
    flags = {"latency-ms": limit.latency_ms, "size-mb": limit.size_mb, "memory-mb": limit.memory_mb}
    flags["at-least"] = limit.at_least
    given = "".join(f" --{flag} {value:g}" for flag, value in flags.items() if value is not None)
    return f"{_base_command(outcome)}{given} --out {shlex.quote(f'{name}-new')}"


def _candidate_row(row: CandidateResult) -> CandidateRow:
    estimate = "" if row.is_measured else "~"
    cut = ", cut vocabulary" if row.vocabulary == "cut" else ""
    numbers: list[tuple[str, float | None]] = [
        (f"{row.score:.2f}", row.score),
        (f"{estimate}{row.latency_ms:.2f}", row.latency_ms),
        (f"{estimate}{format_megabytes(row.size_mb)}", row.size_mb),
        (f"{row.memory_mb:.0f}" if row.is_measured else "–", row.memory_mb),
        (f"{row.parameters:,}", row.parameters),
    ]
    budget = "chosen" if row.is_chosen else {True: "met", False: "missed", None: ""}[row.holds]
    style = "chosen" if row.is_chosen else "" if row.is_measured else "estimate"
    return CandidateRow(row.network, f"{row.engine} {row.precision}{cut}", numbers, budget, style)


def _versions(outcome: FitOutcome) -> str:
    return ", ".join(f"{package} {version}" for package, version in outcome.versions.items())


def _facts(outcome: FitOutcome) -> dict[str, str]:
    machine, conditions = outcome.machine, outcome.conditions
    lengths = "; ".join(
        "lengths of the data" if load.name == "data" else f"{load.name} tokens" for load in conditions.workloads
    )
    return {
        "Model": outcome.model,
        "Data": f"{outcome.data} ({outcome.split}, {outcome.examples:,} examples)",
        "Task": outcome.task,
        "Processor": str(machine["processor"]),
        "Cores, threads used": f"{machine['cores']}, {outcome.threads}",
        "System": str(machine["system"]),
        "Sequences": f"{lengths}, {conditions.batch} at a time",
        "Versions": _versions(outcome),
        "Measurements": f"{outcome.measurements:,}",
    }
