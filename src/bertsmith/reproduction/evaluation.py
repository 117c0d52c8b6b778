"""Evaluate a table from the lines of runs.jsonl: values, gates, verdicts and missing runs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

from bertsmith.errors import InputError
from bertsmith.reproduction.claims import Claim, Decision, Verdict
from bertsmith.reproduction.plan import RunPlan, find_value
from bertsmith.reproduction.statistics import Values
from bertsmith.reproduction.table import ExperimentTable

MIN_SEEDS = 2
"""Seeds of every row that a provisional verdict needs."""

DEGENERATE = "the same answer for every row of dev"

Lines = Mapping[str, Mapping[str, Any]]
"""Lines of runs.jsonl by key."""


@dataclass(frozen=True)
class MetricCell:
    """Values of one metric of one row."""

    values: Mapping[int, float]
    """By seed."""
    missing: tuple[int, ...] = ()
    """Seeds that have not run."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Error messages by seed."""

    @property
    def mean(self) -> float | None:
        return fmean(self.values.values()) if self.values else None

    @property
    def std(self) -> float | None:
        return stdev(self.values.values()) if len(self.values) > 1 else None


Cells = Mapping[str, Mapping[str, MetricCell]]
"""By metric and row."""


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict."""

    claim: Claim
    decision: Decision
    missing: tuple[str, ...] = ()
    """Runs without which the verdict is provisional, or None."""

    @property
    def status(self) -> str:
        """The verdict in words."""
        if self.decision.verdict is None:
            return "not run yet" if self.missing else "too few seeds"
        return f"provisional: {self.decision.verdict}" if self.missing else str(self.decision.verdict)


@dataclass(frozen=True)
class TableEvaluation:
    """All figures of a table."""

    table: ExperimentTable
    cells: Cells
    claims: tuple[JudgedClaim, ...]
    runs_done: int
    runs: int
    seconds: float
    """Time of the finished runs, added up."""
    planned_seconds: float
    """Planned time of the same runs."""
    devices: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        return self.runs_done == self.runs

    def to_json(self) -> dict[str, Any]:
        """Return the content of the table's result.json."""
        table = self.table
        return {
            "table": table.name,
            "title": table.title,
            "paper": table.paper,
            "is_complete": self.is_complete,
            "runs": self.runs,
            "runs_done": self.runs_done,
            "seconds": round(self.seconds, 1),
            "planned_seconds": self.planned_seconds,
            "devices": list(self.devices),
            "rows": {
                row: {
                    "label": table.label(row),
                    "published": table.rows[row].published,
                    "measured": {
                        metric: _cell_json(cells[row]) for metric, cells in self.cells.items() if row in cells
                    },
                }
                for row in table.rows
            },
            "claims": [
                {
                    "text": one.claim.text,
                    "metric": one.claim.metric,
                    "status": one.status,
                    "verdict": one.decision.verdict,
                    "note": one.decision.note,
                    "expected": one.claim.expected,
                    "missing": list(one.missing),
                    "comparisons": [asdict(comparison) for comparison in one.decision.comparisons],
                }
                for one in self.claims
            ],
        }


def _cell_json(cell: MetricCell) -> dict[str, Any]:
    values = {str(seed): value for seed, value in cell.values.items()}
    return {"mean": cell.mean, "std": cell.std, "values": values, "failed": dict(cell.failed)}


def evaluate_table(table: ExperimentTable, plan: RunPlan, lines: Lines) -> TableEvaluation:
    """Return values and verdicts of a table."""
    cells = {
        metric: {row: _cell(table, plan, lines, metric, row) for row in table.rows_of(metric)}
        for metric in table.metrics
    }
    keys = plan.keys_of(table.name)
    done = [lines[key] for key in keys if key in lines and "error" not in lines[key]]
    planned = {key: job.seconds for key, job in plan.jobs.items()}
    return TableEvaluation(
        table=table,
        cells=cells,
        claims=tuple(_judge(table, claim, cells) for claim in table.claims),
        runs_done=len(done),
        runs=len(keys),
        seconds=sum(line.get("seconds", 0.0) for line in done),
        planned_seconds=sum(planned[line["key"]] for line in done),
        devices=tuple(sorted({str(line["device"]) for line in done if "device" in line})),
    )


def _cell(table: ExperimentTable, plan: RunPlan, lines: Lines, metric: str, row: str) -> MetricCell:
    path = table.metric_of(metric, row).value
    values, missing, failed = {}, [], {}
    for seed in table.seeds_of(row):
        key = plan.key_of(table.name, metric, row, seed)
        errors = [lines[one]["error"] for one in (key, *plan.ancestors(key)) if "error" in lines.get(one, {})]
        if errors:
            failed[seed] = errors[0]
        elif key not in lines:
            missing.append(seed)
        elif lines[key]["result"].get("is_degenerate"):
            failed[seed] = DEGENERATE
        else:
            try:
                values[seed] = find_value(lines[key]["result"], path)
            except InputError as problem:
                raise InputError(f"table {table.name!r}, metric {metric!r}: {problem}") from None
    return MetricCell(values, tuple(missing), failed)


def _judge(table: ExperimentTable, claim: Claim, cells: Cells) -> JudgedClaim:
    own = cells[claim.metric]
    missing = tuple(f"seed {seed} of {table.label(row)} not run" for row in claim.rows for seed in own[row].missing)
    for row in claim.rows:
        problem = _problem(table, claim.metric, row, cells)
        if problem is not None:
            return JudgedClaim(claim, Decision(Verdict.UNTESTABLE, note=f"{table.label(row)}: {problem}"))
    metric = table.metrics[claim.metric]
    needed = 1 if metric.exact else MIN_SEEDS
    if any(len(own[row].values) < min(needed, len(table.seeds_of(row))) for row in claim.rows):
        return JudgedClaim(claim, Decision(None), missing)
    # rows outside of the claim only add to the estimate of the spread
    values: Values = {
        row: cell.values
        for row, cell in own.items()
        if cell.values and (row in claim.rows or _problem(table, claim.metric, row, cells) is None)
    }
    return JudgedClaim(claim, claim.decide(values, metric), missing)


def _problem(table: ExperimentTable, metric: str, row: str, cells: Cells) -> str | None:
    """Return why a row cannot be judged by a metric: a failed run, a non-finite value, a gate; None if it can."""
    cell = cells[metric][row]
    for seed, error in cell.failed.items():
        return f"seed {seed}: {error}"
    if not all(map(math.isfinite, cell.values.values())):
        return "a value is not finite"
    for gate in table.gates:
        is_covered = metric in (gate.covers or (gate.metric,)) and (not gate.rows or row in gate.rows)
        gated = cells[gate.metric].get(row) if is_covered else None
        if gated is not None and not all(map(gate.admits, gated.values.values())):
            return gate.reason
    return None
