"""All that a search found as plain data: for result.json, candidates.jsonl, the page and the card."""

from collections.abc import Mapping
from typing import Any

from bertsmith.models.cost import parameters
from bertsmith.shrinking.fit.bench import described
from bertsmith.shrinking.fit.candidates import Candidate, subnet_words
from bertsmith.shrinking.fit.finals import pareto_front
from bertsmith.shrinking.fit.measure import versions
from bertsmith.shrinking.fit.search import Fitted
from bertsmith.shrinking.fit.settings import Costs
from bertsmith.shrinking.fit.table import stack_config

Plain = dict[str, Any]


def fit_figures(found: Fitted) -> Plain:
    """The figures of a search; `candidates` are all of them, the best first."""
    prepared, budget = found.prepared, found.prepared.settings.budget
    quality = prepared.quality
    # what a narrower precision does to a score is not known before it is measured
    known = [one for one in found.candidates if one.measured is not None or one.way.precision == "float32"]
    front = {one.name for one in pareto_front(known, _latency, _score)}
    ordered = sorted(found.candidates, key=lambda one: -_score(one))
    shapes = {(one.way.vocabulary, one.kinds) for one in ordered}
    counts = {shape: parameters(stack_config(found.configs[shape[0]], shape[1])) for shape in shapes}
    rows = [
        {**_row(one, found, one.name in front), "parameters": counts[one.way.vocabulary, one.kinds]} for one in ordered
    ]
    by_name = {row["name"]: row for row in rows}
    chosen = None if found.best is None else by_name[found.best.name]
    misses = [] if found.best is not None else budget.misses(found.nearest.costs)
    main = found.nearest.judged
    figures: Plain = {
        "fits": found.best is not None,
        "budget": budget.words,
        "metric": main["metric"],
        "chosen": chosen,
        "nearest": None if chosen else by_name[found.nearest.name],
        "misses": [{**miss._asdict(), "words": miss.words} for miss in misses],
        "reference": by_name.get(found.reference.name),
        "front": [row["name"] for row in rows if row["on_front"]],
        "notices": list(found.notices),
        "machine": dict(found.machine),
        "threads": prepared.conditions.threads,
        "conditions": prepared.conditions.plain(),
        "versions": versions((found.best or found.nearest).way.engine),
        "examples": len(quality.examples),
        "measurements": found.measurements,
        "limits": described(budget),
        "model": prepared.settings.model,
        "data": prepared.settings.data,
        "part": prepared.settings.part,
        "task": prepared.kept.task.kind,
        "candidates": rows,
    }
    if found.best is not None:
        figures |= {"score": main["score"], **main["figures"]}
        figures |= {"interval": main["interval"]} if "interval" in main else {}
    return figures


def _row(candidate: Candidate, found: Fitted, on_front: bool) -> Plain:
    row: Plain = {
        "name": candidate.name,
        "words": candidate.words,
        "network": subnet_words(candidate.subnet),
        "subnet": described(candidate.subnet),
        **candidate.way._asdict(),
        "score": _score(candidate),
        "float32_score": candidate.ranking,
        **_named(candidate.costs),
        "is_measured": candidate.measured is not None,
        "on_front": on_front,
        "holds": candidate.holds,
        "is_chosen": candidate is found.best,
    }
    if candidate.timings:
        row |= {"timings": candidate.timings, "figures": candidate.judged.get("figures", {})}
        row |= {"interval": candidate.judged["interval"]} if "interval" in candidate.judged else {}
    return row


def _named(costs: Costs) -> Mapping[str, float | None]:
    return {name: value for name, value in costs._asdict().items() if name != "score"}


def _latency(candidate: Candidate) -> float:
    return candidate.costs.latency_ms or 0.0


def _score(candidate: Candidate) -> float:
    return candidate.ranking if candidate.costs.score is None else candidate.costs.score
