"""Which candidates are tried next, whether one keeps the budget for good, and which is best of those that do."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bertsmith.layers.subnet import Subnet
from bertsmith.shrinking.fit.bench import Bench
from bertsmith.shrinking.fit.candidates import SLACK, Candidate, Estimates
from bertsmith.shrinking.fit.settings import BudgetConfig, Costs, FitSettings, excess

SPREADS = 2.0  # deviations above the mean that must be within the limit: about 98 of 100 processes
HOPELESS = 1.5  # times the limit: no disturbance makes up for that
CLEARLY = 0.95  # of a cost, below which it is worth to measure what is as good otherwise
MARGIN = 0.95  # of the limit, for the middle one where single processes were disturbed


def verdict(latencies: Sequence[float], limit: float, repeats: int) -> bool | None:
    """Whether a latency is kept for good, given what fresh processes found; None if more of them must tell.

    After `repeats` of them it is if all kept it with room for their spread. One that was disturbed is forgiven where
    twice as many were asked and all others kept it, the middle one with a margin; not where it is the first and far
    off.
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
    return statistics.fmean(latencies) + SPREADS * spread


def is_better(one: Candidate, other: Candidate, budget: BudgetConfig, prefer: str) -> bool:
    """Whether one of two measured candidates that keep the budget is the better one."""
    return worth(one, budget, prefer) > worth(other, budget, prefer)


def worth(candidate: Candidate, budget: BudgetConfig, prefer: str) -> tuple[float, ...]:
    """What is wanted of a candidate, first things first; larger is better.

    Score, then speed; but where a score is the budget, speed or size, then the score.
    """
    costs = candidate.costs
    score = candidate.ranking if costs.score is None else costs.score
    speed, size = -(costs.latency_ms or 0.0), -(costs.size_mb or 0.0)
    if budget.at_least is None:
        return score, speed, size
    return (speed, size, score) if prefer == "fast" else (size, speed, score)


def promising(
    candidates: Sequence[Candidate], budget: BudgetConfig, prefer: str, best: Candidate | None, slack: float
) -> list[Candidate]:
    """The candidates not yet measured that may keep the budget and be better than the best one so far, best first."""
    open_ones = [
        candidate
        for candidate in candidates
        if candidate.measured is None and not budget.misses(candidate.costs._replace(score=candidate.ranking), slack)
    ]
    if best is not None:
        open_ones = [candidate for candidate in open_ones if _may_beat(candidate, best, budget, prefer)]
    return sorted(open_ones, key=lambda candidate: worth(candidate, budget, prefer), reverse=True)


def _may_beat(candidate: Candidate, best: Candidate, budget: BudgetConfig, prefer: str) -> bool:
    """Whether it promises more of what is wanted first or, where that is equal, clearly more of the second thing."""
    (first, second, *_), (bar, second_bar, *_) = worth(candidate, budget, prefer), worth(best, budget, prefer)
    return first > bar or (first == bar and second > CLEARLY * second_bar)


def nearest_miss(candidates: Sequence[Candidate], budget: BudgetConfig) -> Candidate:
    """The candidate whose worst miss is smallest."""
    return min(candidates, key=lambda candidate: (miss_of(candidate, budget), -candidate.ranking))


def miss_of(candidate: Candidate, budget: BudgetConfig) -> float:
    """By what share a candidate misses the worst kept of its limits."""
    costs = candidate.costs
    if costs.score is None:
        costs = costs._replace(score=candidate.ranking)
    return excess(budget.misses(costs))


T = TypeVar("T")


def pareto_front(items: Sequence[T], cost: Callable[[T], float], score: Callable[[T], float]) -> list[T]:
    """The items that no other one beats in cost and score together, cheapest first.

    >>> pareto_front([(3, 9.0), (1, 5.0), (2, 4.0), (3, 8.0)], lambda p: p[0], lambda p: p[1])
    [(1, 5.0), (3, 9.0)]
    """
    front: list[T] = []
    for item in sorted(items, key=lambda one: (cost(one), -score(one))):
        if not front or score(item) > score(front[-1]):
            front.append(item)
    return front


TRIED_IN_VAIN = 3  # candidates that are measured although no estimate keeps the budget
FEW_TIMINGS = 3  # where the latency is not limited
Watch = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""


class Finals:
    """Measures candidates for real, the most promising first, until no other one can be better."""

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
        """The best candidate that keeps the budget for good; the reference is measured in any case."""
        self.watch(f"measured for real: {reference.words}", 0, self.settings.measure.finalists)
        self._try(reference)
        best = reference if reference.holds else None
        tried = in_vain = 0
        while best is None or tried < self.settings.measure.finalists:
            queue = self._queue(best)
            if not queue and best is None and in_vain < TRIED_IN_VAIN:
                rest = [one for one in self.candidates if one.measured is None]
                queue, in_vain = sorted(rest, key=lambda one: miss_of(one, self.budget)), in_vain + 1
            if not queue:
                break
            candidate = queue[0]
            if not self._has_whole_score(candidate):
                continue  # its score on all of dev may put it elsewhere in the queue
            tried += 1
            self.watch(f"measured for real: {candidate.words}", tried, max(tried, self.settings.measure.finalists))
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
        """What may keep the budget and be better, as far as is known now."""
        prefer = self.settings.prefer
        return [
            one
            for one in promising(self.candidates, self.budget, prefer, best, SLACK)
            if not self.budget.misses(one.costs, self.estimates.slack(self.candidates, one.way))
        ]

    def _has_whole_score(self, candidate: Candidate) -> bool:
        """Whether its ranking is the score on all of dev; if not, it is so afterwards."""
        if self.bench.quality.is_whole or candidate.subnet in self._on_all:
            return True
        score = self.bench.subnet_score(candidate.subnet, on_all=True)
        self._on_all.add(candidate.subnet)
        for one in self.candidates:
            if one.subnet == candidate.subnet:
                one.ranking = score
        return False

    def _try(self, candidate: Candidate) -> bool:
        """Whether a candidate could be measured; one that could not is no candidate any more."""
        try:
            size = self.bench.size_mb(candidate)
            candidate.timings = [self.bench.timing(candidate, 0)]
            candidate.judged = self.bench.evaluate(candidate)
            self._note(candidate, size)
            self._settle(candidate)
        except OSError:  # a full disk is nothing of the candidate
            raise
        except Exception as error:  # engines raise what the packages below them raise
            self.notices.append(f"{candidate.words} is left out: {first_line(error)}")
            self.candidates.remove(candidate)
            candidate.measured = None
            return False
        self.estimates.correct(self.candidates, candidate.way)
        return True

    def _settle(self, candidate: Candidate) -> None:
        """Finds out whether it keeps the budget for good, by as many fresh processes as that takes."""
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
            self._note(candidate, size)
        candidate.holds = False

    def _note(self, candidate: Candidate, size: float | None) -> None:
        """What all its timings so far tell: their middle latency, the most memory."""
        latency = statistics.median(self._latency(timing) for timing in candidate.timings)
        memory = max(float(timing["memory_mb"]) for timing in candidate.timings)
        candidate.measured = Costs(latency, size, memory, float(candidate.judged["score"]))

    def _latency(self, timing: dict[str, Any]) -> float:
        return max(float(found[f"p{self.budget.percentile}"]) for found in timing["latency"].values())


def first_line(error: Exception) -> str:
    """The first line of what an exception says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
