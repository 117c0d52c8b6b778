"""Typed outcome of a search, the source of result.json, candidates.jsonl, page, card and console output.

Fields marked "nullable" are written as null if they are None; fields marked "hidden" are not written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bertsmith.models.cost import parameters
from bertsmith.shrinking.fit.bench import without_none
from bertsmith.shrinking.fit.candidates import Candidate, describe_subnet, pareto_front
from bertsmith.shrinking.fit.measure import Conditions, ProcessTiming, versions
from bertsmith.shrinking.fit.search import SearchOutcome
from bertsmith.shrinking.fit.settings import BudgetConfig, Miss
from bertsmith.shrinking.fit.table import stack_config

NULLABLE, HIDDEN = {"nullable": True}, {"hidden": True}


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """A candidate with its measured or estimated costs."""

    name: str
    words: str
    """Description of network and run mode."""
    network: str
    subnet: Mapping[str, object]
    engine: str
    precision: str
    vocabulary: str
    score: float
    float32_score: float
    latency_ms: float
    size_mb: float
    memory_mb: float | None = field(metadata=NULLABLE)
    is_measured: bool
    on_front: bool
    """Whether no other candidate beats it in score and latency."""
    holds: bool | None = field(metadata=NULLABLE)
    """Whether it met the budget in repeated measurements; None if not measured."""
    is_chosen: bool
    timings: tuple[ProcessTiming, ...] | None
    metrics: Mapping[str, float] | None
    """All metrics of the measured artefact."""
    interval: Sequence[float] | None
    parameters: int


@dataclass(frozen=True)
class MissResult:
    """A limit that the nearest candidate misses."""

    name: str
    limit: float
    value: float
    words: str


@dataclass(frozen=True, kw_only=True)
class FitOutcome:
    """All candidates of a search, with the chosen one or else the nearest to the budget."""

    fits: bool
    budget: str
    """Description of the budget."""
    metric: str
    chosen: CandidateResult | None = field(metadata=NULLABLE)
    nearest: CandidateResult | None = field(metadata=NULLABLE)
    """The candidate nearest to the budget, if none meets it."""
    misses: tuple[MissResult, ...]
    reference: CandidateResult | None = field(metadata=NULLABLE)
    """The whole network in the first run mode."""
    front: tuple[str, ...]
    notices: tuple[str, ...]
    machine: Mapping[str, str | int]
    threads: int
    conditions: Conditions
    versions: Mapping[str, str]
    examples: int
    measurements: int
    """Number of new measurements."""
    limits: Mapping[str, object]
    limit: BudgetConfig = field(metadata=HIDDEN)
    """The budget as settings."""
    prefer: Literal["fast", "small"] = field(metadata=HIDDEN)
    """Criterion among candidates that meet the minimum score."""
    model: str
    data: str
    split: str
    task: str
    candidates: tuple[CandidateResult, ...]
    """All candidates, the best score first."""
    score: float | None
    metrics: Mapping[str, float] = field(metadata={"spread": True})
    interval: Sequence[float] | None

    @property
    def best(self) -> CandidateResult:
        """The chosen candidate, or the nearest one."""
        best = self.chosen or self.nearest
        assert best is not None
        return best


def summarise_search(outcome: SearchOutcome) -> FitOutcome:
    """Return the outcome of a search."""
    inputs, settings, budget = outcome.inputs, outcome.inputs.settings, outcome.inputs.settings.budget
    # the score at a lower precision is unknown until it is measured
    scored = [one for one in outcome.candidates if one.measured is not None or one.mode.precision == "float32"]
    front = {one.name for one in pareto_front(scored, lambda one: one.costs.latency_ms or 0.0, lambda one: one.score)}
    ordered = sorted(outcome.candidates, key=lambda one: -one.score)
    sizes = {
        (vocabulary, shapes): parameters(stack_config(outcome.configs[vocabulary], shapes))
        for vocabulary, shapes in {(one.mode.vocabulary, one.shapes) for one in ordered}
    }
    rows = tuple(
        _candidate_result(
            one,
            on_front=one.name in front,
            is_chosen=one is outcome.best,
            size=sizes[one.mode.vocabulary, one.shapes],
        )
        for one in ordered
    )
    by_name = {row.name: row for row in rows}
    scores = outcome.nearest.artefact_score
    assert scores is not None
    fits = outcome.best is not None
    misses = [] if fits else budget.misses(outcome.nearest.costs)
    return FitOutcome(
        fits=fits,
        budget=budget.description,
        metric=scores.metric,
        chosen=None if outcome.best is None else by_name[outcome.best.name],
        nearest=None if fits else by_name[outcome.nearest.name],
        misses=tuple(_miss_result(miss) for miss in misses),
        reference=by_name.get(outcome.reference.name),
        front=tuple(row.name for row in rows if row.on_front),
        notices=tuple(outcome.notices),
        machine=outcome.machine,
        threads=inputs.conditions.threads,
        conditions=inputs.conditions,
        versions=versions(outcome.nearest.mode.engine),
        examples=len(inputs.scorer.examples),
        measurements=outcome.measurements,
        limits=without_none(budget),
        limit=budget,
        prefer=settings.prefer,
        model=settings.model.name,
        data=settings.data,
        split=settings.split,
        task=inputs.record.task.kind,
        candidates=rows,
        score=scores.score if fits else None,
        metrics=scores.metrics if fits else {},
        interval=scores.interval if fits else None,
    )


def _miss_result(miss: Miss) -> MissResult:
    return MissResult(*miss, words=miss.description)


def _candidate_result(one: Candidate, *, on_front: bool, is_chosen: bool, size: int) -> CandidateResult:
    costs, scores = one.costs, one.artefact_score
    assert costs.latency_ms is not None
    assert costs.size_mb is not None
    return CandidateResult(
        name=one.name,
        words=one.description,
        network=describe_subnet(one.subnet),
        subnet=without_none(one.subnet),
        engine=one.mode.engine,
        precision=one.mode.precision,
        vocabulary=one.mode.vocabulary,
        score=one.score,
        float32_score=one.float32_score,
        latency_ms=costs.latency_ms,
        size_mb=costs.size_mb,
        memory_mb=costs.memory_mb,
        is_measured=one.measured is not None,
        on_front=on_front,
        holds=one.holds,
        is_chosen=is_chosen,
        timings=tuple(one.timings) or None,
        metrics=None if scores is None else scores.metrics,
        interval=None if scores is None else scores.interval,
        parameters=size,
    )
