"""Write, score and time the most promising candidates until no other can beat the best one."""

import statistics
from collections.abc import Callable, Sequence

from bertsmith.errors import first_line
from bertsmith.layers.subnet import Subnet
from bertsmith.shrinking.fit.bench import Bench
from bertsmith.shrinking.fit.candidates import SLACK, Candidate, Estimates
from bertsmith.shrinking.fit.measure import ProcessTiming
from bertsmith.shrinking.fit.settings import BudgetConfig, Costs, FitSettings, excess

DEVIATIONS = 2.0  # mean + this many standard deviations must be within the limit: about 98 of 100 processes
HOPELESS = 1.5  # multiple of the limit that noise cannot explain
MIN_COST_RATIO = 0.95  # measure an equally good candidate only if it is at least 5 % cheaper
MARGIN = 0.95  # share of the limit that the median must meet if one process missed the limit


def verdict(latencies: Sequence[float], limit: float, repeats: int) -> bool | None:
    """Return whether latencies of fresh processes meet a limit reliably; None if more processes are needed.

    They do after `repeats` processes if all meet the limit and mean + 2 standard deviations does. One outlier is
    accepted after 2 · `repeats` processes if all others meet the limit and the median meets it with a margin.
    """
    missed = sum(latency > limit for latency in latencies)
    if missed > 1 or (missed and (repeats == 1 or min(latencies) > HOPELESS * limit)):
        return False
    if len(latencies) < repeats:
        return None
    if missed == 0 and _bound(latencies) <= limit:
        return True
    if len(latencies) < 2 * repeats:
        return None
    return statistics.median(latencies) <= MARGIN * limit


def _bound(latencies: Sequence[float]) -> float:
    spread = statistics.stdev(latencies) if len(latencies) > 1 else 0.0
    return statistics.fmean(latencies) + DEVIATIONS * spread


def is_better(one: Candidate, other: Candidate, budget: BudgetConfig, prefer: str) -> bool:
    """Whether `one` beats `other`; both are measured and meet the budget."""
    return preference(one, budget, prefer) > preference(other, budget, prefer)


def preference(candidate: Candidate, budget: BudgetConfig, prefer: str) -> tuple[float, ...]:
    """Sort key, larger is better: score, then speed; with a minimum score in the budget, speed or size first."""
    costs = candidate.costs
    speed, size = -(costs.latency_ms or 0.0), -(costs.size_mb or 0.0)
    if budget.at_least is None:
        return candidate.score, speed, size
    return (speed, size, candidate.score) if prefer == "fast" else (size, speed, candidate.score)


def promising(
    candidates: Sequence[Candidate], budget: BudgetConfig, prefer: str, best: Candidate | None, slack: float
) -> list[Candidate]:
    """Return unmeasured candidates that may meet the budget and beat the best one so far, best first."""
    unmeasured = [
        candidate
        for candidate in candidates
        if candidate.measured is None
        and not budget.misses(candidate.costs._replace(score=candidate.float32_score), slack)
    ]
    if best is not None:
        unmeasured = [candidate for candidate in unmeasured if _may_beat(candidate, best, budget, prefer)]
    return sorted(unmeasured, key=lambda candidate: preference(candidate, budget, prefer), reverse=True)


def _may_beat(candidate: Candidate, best: Candidate, budget: BudgetConfig, prefer: str) -> bool:
    """Whether a candidate may be better in the first criterion or, if equal, clearly better in the second."""
    (first, second, *_), (bar, second_bar, *_) = preference(candidate, budget, prefer), preference(best, budget, prefer)
    return first > bar or (first == bar and second > MIN_COST_RATIO * second_bar)


def nearest_miss(candidates: Sequence[Candidate], budget: BudgetConfig) -> Candidate:
    """Return the candidate with the smallest worst miss."""
    return min(candidates, key=lambda candidate: (worst_miss(candidate, budget), -candidate.float32_score))


def worst_miss(candidate: Candidate, budget: BudgetConfig) -> float:
    """Largest relative excess of a candidate over a limit."""
    costs = candidate.costs
    if costs.score is None:
        costs = costs._replace(score=candidate.float32_score)
    return excess(budget.misses(costs))


HOPELESS_TRIES = 3  # candidates to measure even though no estimate meets the budget
FEW_TIMINGS = 3  # if the budget has no latency limit
Watch = Callable[[str, int, int], None]
"""Progress callback: description, steps done, steps in total."""


class Finals:
    """Measure candidates, the most promising first, until no other can be better."""

    def __init__(
        self,
        settings: FitSettings,
        bench: Bench,
        estimates: Estimates,
        candidates: list[Candidate],
        notices: list[str],
        watch: Watch,
    ) -> None:
        self.settings, self.budget, self.bench = settings, settings.budget, bench
        self.estimates, self.candidates, self.notices, self.watch = estimates, candidates, notices, watch
        self._on_all: set[Subnet] = set()

    def best(self, reference: Candidate) -> Candidate | None:
        """Return the best candidate that meets the budget reliably; the reference is always measured."""
        self.watch(f"measuring {reference.description}", 0, self.settings.measure.finalists)
        self._try(reference)
        best = reference if reference.holds else None
        tried = hopeless = 0
        while best is None or tried < self.settings.measure.finalists:
            queue = self._queue(best)
            if not queue and best is None and hopeless < HOPELESS_TRIES:
                rest = [one for one in self.candidates if one.measured is None]
                queue, hopeless = sorted(rest, key=lambda one: worst_miss(one, self.budget)), hopeless + 1
            if not queue:
                break
            candidate = queue[0]
            if not self._has_whole_score(candidate):
                continue  # the score on all of dev may change its rank
            tried += 1
            self.watch(f"measuring {candidate.description}", tried, max(tried, self.settings.measure.finalists))
            if not self._try(candidate):
                continue
            if candidate.holds and (best is None or is_better(candidate, best, self.budget, self.settings.prefer)):
                best, dropped = candidate, best
            else:
                dropped = candidate
            if dropped is not None:
                self.bench.discard(dropped)
        return best

    def _queue(self, best: Candidate | None) -> list[Candidate]:
        """Candidates that may meet the budget and beat the best one, by the current estimates."""
        prefer = self.settings.prefer
        return [
            one
            for one in promising(self.candidates, self.budget, prefer, best, SLACK)
            if not self.budget.misses(one.costs, self.estimates.slack(self.candidates, one.mode))
        ]

    def _has_whole_score(self, candidate: Candidate) -> bool:
        """Whether the score was computed on all of dev; if not, compute it and return False."""
        if self.bench.scorer.is_whole or candidate.subnet in self._on_all:
            return True
        score = self.bench.subnet_score(candidate.subnet, on_all=True)
        self._on_all.add(candidate.subnet)
        for one in self.candidates:
            if one.subnet == candidate.subnet:
                one.float32_score = score
        return False

    def _try(self, candidate: Candidate) -> bool:
        """Measure a candidate; remove it and return False if that fails."""
        try:
            size = self.bench.size_mb(candidate)
            candidate.timings = [self.bench.timing(candidate, 0)]
            candidate.artefact_score = self.bench.score(candidate)
            self._update_costs(candidate, size)
            self._repeat(candidate)
        except OSError:  # such as a full disk: not a failure of the candidate
            raise
        except Exception as error:  # engines raise exceptions of their own packages
            self.notices.append(f"{candidate.description} is skipped: {first_line(error)}")
            self.candidates.remove(candidate)
            candidate.measured = None
            return False
        self.estimates.correct(self.candidates, candidate.mode)
        return True

    def _repeat(self, candidate: Candidate) -> None:
        """Time a candidate in fresh processes until `verdict` decides."""
        assert candidate.measured is not None
        size, repeats, limit = candidate.measured.size_mb, self.settings.measure.repeats, self.budget.latency_ms
        while not self.budget.misses(candidate.measured._replace(latency_ms=None)):
            latencies = [self._latency(timing) for timing in candidate.timings]
            if limit is not None:
                candidate.holds = verdict(latencies, limit, repeats)
            elif len(latencies) >= min(FEW_TIMINGS, repeats):
                candidate.holds = True
            if candidate.holds is not None:
                return
            candidate.timings.append(self.bench.timing(candidate, len(candidate.timings)))
            self._update_costs(candidate, size)
        candidate.holds = False

    def _update_costs(self, candidate: Candidate, size: float | None) -> None:
        """Set the median latency and the largest memory of all timings so far."""
        assert candidate.artefact_score is not None
        latency = statistics.median(self._latency(timing) for timing in candidate.timings)
        memory = max(float(timing.memory_mb) for timing in candidate.timings)
        candidate.measured = Costs(latency, size, memory, float(candidate.artefact_score.score))

    def _latency(self, timing: ProcessTiming) -> float:
        return max(float(workload[f"p{self.budget.percentile}"]) for workload in timing.latency.values())
