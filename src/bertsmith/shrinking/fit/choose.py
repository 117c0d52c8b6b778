"""Which candidates are tried next, whether one keeps the budget for good, and which is best of those that do."""

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from bertsmith.shrinking.fit.budget import BudgetConfig, excess
from bertsmith.shrinking.fit.candidates import Candidate

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
