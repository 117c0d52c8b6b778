"""Report page of recipes trained with an equal budget: loss curves over each cost, and a table with seed variation."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup

from bertsmith.report.charts import LogRow, Panel, Series, line_chart, short_number
from bertsmith.report.page import render

COSTS = {  # label of the axis and of its switch
    "tokens": ("tokens", "Tokens"),
    "flops": ("training operations", "Operations"),
    "seconds": ("seconds of training", "Time"),
}
METRICS = {  # metrics of a held-out row: heading of the column and format of a value
    "token_loss": ("token loss", "{:.3f}"),
    "token_accuracy": ("MLM accuracy", "{:.1%}"),
    "replaced_recall": ("RTD recall", "{:.1%}"),
    "replaced_precision": ("RTD precision", "{:.1%}"),
    "next_sentence_accuracy": ("NSP accuracy", "{:.1%}"),
}
NOTE = (
    "Token losses are comparable only between models that predict tokens in the same way: in replaced-token detection "
    "the small generator predicts them, and a causal model sees only the left context. Compare such recipes on a task."
)


@dataclass(frozen=True)
class ComparedRun:
    """One recipe with one seed."""

    seed: int
    result: Mapping[str, Any]
    """The run's result.json."""
    held_out: list[dict[str, float]]
    """Rows with tokens, flops and seconds spent so far, and the metrics of METRICS."""


@dataclass(frozen=True)
class MeanSpread:
    """Mean and standard deviation (`spread`) over seeds; a single seed has no standard deviation."""

    mean: float
    spread: float | None


@dataclass(frozen=True)
class RecipeSummary:
    """The last held-out metrics of a recipe over its seeds, and its mean costs."""

    seeds: int
    tier: str
    metrics: Mapping[str, MeanSpread]
    parameters: float
    steps: float
    tokens: float
    seconds: float
    tokens_per_second: float
    flops: float

    def plain(self) -> dict[str, Any]:
        """Return the summary as stored in result.json."""
        fields = asdict(self)
        metrics = fields.pop("metrics")
        return {"seeds": fields.pop("seeds"), "tier": fields.pop("tier"), **metrics, **fields}

    def cells(self) -> dict[str, str]:
        """Return the formatted columns of the table by heading."""
        cells = {}
        for name, (heading, form) in METRICS.items():
            metric = self.metrics.get(name)
            if metric is not None:
                spread = "" if metric.spread is None else f" ± {form.format(metric.spread)}"
                cells[heading] = form.format(metric.mean) + spread
        if self.tier != "custom":
            cells["tier"] = self.tier
        cells["parameters"] = short_number(self.parameters)
        cells["tokens"] = short_number(self.tokens)
        cells["operations"] = f"{self.flops:.2e}"
        cells["seconds"] = f"{self.seconds:,.0f}"
        cells["tokens/s"] = short_number(float(f"{self.tokens_per_second:.3g}"))
        return cells


Runs = Mapping[str, Sequence[ComparedRun]]
"""Runs by recipe name."""


def read_run(seed: int, result: Mapping[str, Any], rows: Sequence[LogRow]) -> ComparedRun:
    """Build the record of a run from its result.json and its log rows."""
    term = result["token_term"]
    training = [row for row in rows if row["kind"] == "training"]
    held_out = []
    for row in rows:
        if row["kind"] != "held_out":
            continue
        spent = {name: _spent(training, row["step"], name) for name in COSTS}
        metrics = {name: row[name] for name in METRICS if name in row}
        metrics |= {"token_loss": row[f"{term}_loss"], "token_accuracy": row[f"{term}_accuracy"]}
        held_out.append({"step": row["step"], **spent, **metrics})
    return ComparedRun(seed, result, held_out)


def summarize(runs: Runs) -> dict[str, RecipeSummary]:
    """Summarize every recipe over its seeds."""
    summaries = {}
    for name, seeds in runs.items():
        metrics = {}
        for metric in METRICS:
            values = [run.held_out[-1][metric] for run in seeds if run.held_out and metric in run.held_out[-1]]
            if values:
                metrics[metric] = MeanSpread(fmean(values), stdev(values) if len(values) > 1 else None)
        costs = {
            cost: fmean(run.result[cost] for run in seeds)
            for cost in ("parameters", "steps", "tokens", "seconds", "tokens_per_second")
        }
        flops = fmean(run.result["training_flops"] for run in seeds)
        tier = seeds[0].result.get("tier", "custom")
        summaries[name] = RecipeSummary(seeds=len(seeds), tier=tier, metrics=metrics, flops=flops, **costs)
    return summaries


def table_headings(summaries: Mapping[str, RecipeSummary]) -> list[str]:
    """Return the headings for which at least one recipe has a value, metrics before costs."""
    metrics = [heading for heading, _ in METRICS.values()]
    headings = list(dict.fromkeys(heading for summary in summaries.values() for heading in summary.cells()))
    return sorted(headings, key=lambda heading: metrics.index(heading) if heading in metrics else len(metrics))


def render_comparison_page(title: str, runs: Runs, facts: Mapping[str, str], unigram: float | None) -> str:
    """Return the comparison as one self-contained HTML document; `unigram` is the unigram level of the corpus."""
    summaries = summarize(runs)
    headings = table_headings(summaries)
    best = _best_recipes(summaries) if _is_comparable(runs) else {}
    return render(
        "comparison.html",
        title=title,
        headline=_headline(runs, summaries),
        lead="" if _is_comparable(runs) else NOTE,
        seeds=max(len(seeds) for seeds in runs.values()),
        headings=headings,
        rows=[
            (name, [(cells.get(heading, "–"), best.get(heading) == name) for heading in headings])
            for name, cells in ((name, summary.cells()) for name, summary in summaries.items())
        ],
        losses=_loss_panels(runs, unigram),
        recall=_recall_chart(runs, summaries),
        facts=facts,
    )


def mean_curve(runs: Sequence[ComparedRun], cost: str, metric: str) -> list[tuple[float, float]]:
    """Return the mean over seeds at each held-out row; the cost is averaged, too, because seconds differ."""
    return [
        (fmean(row[cost] for row in rows), fmean(row[metric] for row in rows))
        for rows in zip(*(run.held_out for run in runs), strict=False)
    ]


def _spent(training: Sequence[LogRow], step: int, name: str) -> float:
    """Return a cost at a step, interpolated between two rows of the log."""
    start: LogRow = {"step": 0, name: 0.0}
    for first, second in pairwise([start, *training]):
        if step <= second["step"]:
            share = (step - first["step"]) / max(1, second["step"] - first["step"])
            return first[name] + share * (second[name] - first[name])
    return training[-1][name] if training else 0.0


def _is_comparable(runs: Runs) -> bool:
    """Whether all models predict tokens in the same way and without a generator."""
    terms = {run.result["token_term"] for seeds in runs.values() for run in seeds}
    return len(terms) == 1 and "generator" not in terms


def _headline(runs: Runs, summaries: Mapping[str, RecipeSummary]) -> str:
    losses = {name: one.metrics["token_loss"] for name, one in summaries.items() if "token_loss" in one.metrics}
    if not losses or not _is_comparable(runs):
        return f"{len(runs)} recipes with an equal budget."
    best, second = sorted(losses, key=lambda name: losses[name].mean)[:2]
    spread = max(losses[name].spread or 0.0 for name in (best, second))
    is_close = losses[second].mean - losses[best].mean <= spread
    caveat = f", but {second} is within one standard deviation of the seeds" if is_close else ""
    return f"{best} has the lowest loss, {losses[best].mean:.3f} nats per token{caveat}."


def _best_recipes(summaries: Mapping[str, RecipeSummary]) -> dict[str, str]:
    """Return the recipe with the best mean of each metric, by heading; ties have none."""
    best = {}
    for metric, (heading, _) in METRICS.items():
        means = {name: one.metrics[metric].mean for name, one in summaries.items() if metric in one.metrics}
        first, *others = sorted(means, key=lambda name: means[name], reverse=metric != "token_loss") or [""]
        if others and means[first] != means[others[0]]:
            best[heading] = first
    return best


def _series(runs: Runs, cost: str, metric: str) -> list[Series]:
    """Return a curve per recipe, with a band of one standard deviation over its seeds."""
    return [Series(name, mean_curve(seeds, cost, metric), _band(seeds, cost, metric)) for name, seeds in runs.items()]


def _band(runs: Sequence[ComparedRun], cost: str, metric: str) -> list[tuple[float, float, float]]:
    if len(runs) < 2:
        return []
    band = []
    for rows in zip(*(run.held_out for run in runs), strict=False):
        values = [row[metric] for row in rows]
        mean, spread = fmean(values), stdev(values)
        band.append((fmean(row[cost] for row in rows), mean - spread, mean + spread))
    return band


def _loss_panels(runs: Runs, unigram: float | None) -> list[Panel]:
    """Draw the token loss over each cost; the heading is the label of the switch."""
    reference = None if unigram is None else (f"unigram level {unigram:.2f}", unigram)
    return [
        Panel(
            switch,
            line_chart(
                _series(runs, cost, "token_loss"),
                x_label=label,
                y_label="nats per token",
                reference=reference,
                height=380,
                has_end_labels=True,
            ),
        )
        for cost, (label, switch) in COSTS.items()
    ]


def _recall_chart(runs: Runs, summaries: Mapping[str, RecipeSummary]) -> Markup | None:
    detecting = {name: seeds for name, seeds in runs.items() if "replaced_recall" in summaries[name].metrics}
    if not detecting:
        return None
    series = _series(detecting, "tokens", "replaced_recall")
    return line_chart(series, x_label="tokens", y_label="recall", height=260, y_from_zero=True, has_end_labels=True)
