"""Order in which candidates are measured, and when one meets the budget reliably."""

from random import Random

import pytest

from bertsmith.layers.subnet import Subnet
from bertsmith.shrinking.fit.candidates import Candidate, RunMode, slow_precisions
from bertsmith.shrinking.fit.finals import is_better, nearest_miss, promising, verdict
from bertsmith.shrinking.fit.settings import BudgetConfig, Costs


def candidate(score: float, latency: float, size: float = 1.0, *, measured: bool = False) -> Candidate:
    costs = Costs(latency, size, 100.0, score)
    estimate = Costs(latency, size)
    return Candidate(Subnet(), RunMode("torch", "float32"), (), score, estimate, costs if measured else None)


@pytest.mark.parametrize(
    ("latencies", "expected"),
    [
        ([], None),
        ([7.0] * 4, None),
        ([7.0, 7.1, 6.9, 7.0, 7.2], True),
        ([7.99, 7.5, 7.98, 7.6, 7.9], None),  # all within the limit, but the spread predicts misses
        ([8.1, 7.0], None),  # one may have been disturbed
        ([8.1, 7.0, 9.0], False),
        ([7.0, 20.0], None),
        ([20.0], False),  # too far off to be noise
        ([7.0, 7.1, 9.0, 7.0, 7.0, 7.1, 7.0, 7.1, 7.0, 7.0], True),
        ([7.9, 7.9, 9.0, 7.9, 7.9, 7.9, 7.9, 7.9, 7.9, 7.9], False),
    ],
)
def test_limit_is_met_with_a_margin_for_the_spread(latencies: list[float], expected: bool | None) -> None:
    assert verdict(latencies, 8.0, 5) is expected


def test_one_process_decides_if_repeats_is_1() -> None:
    assert verdict([7.9], 8.0, 1) is True
    assert verdict([8.1], 8.0, 1) is False


def test_accepted_candidates_meet_the_limit_later() -> None:
    """Most accepted candidates meet the limit in nine of ten later processes."""
    random = Random(0)
    reliable = accepted = 0
    for _ in range(400):
        typical, spread = random.uniform(6.5, 8.5), random.uniform(0.05, 0.6)

        def process(typical: float = typical, spread: float = spread) -> float:
            return random.gauss(typical, spread)

        latencies = [process()]
        while verdict(latencies, 8.0, 5) is None:
            latencies.append(process())
        if verdict(latencies, 8.0, 5):
            accepted += 1
            reliable += sum(process() <= 8.0 for _ in range(10)) >= 9
    assert accepted > 100
    assert reliable / accepted > 0.93


def test_candidates_are_ordered_by_score_then_latency() -> None:
    few = [candidate(90, 7.0), candidate(91, 7.5), candidate(91, 6.0), candidate(95, 20.0)]
    queue = promising(few, BudgetConfig(latency_ms=8.0), "fast", None, 0.0)
    assert [(one.float32_score, one.estimate.latency_ms) for one in queue] == [(91, 6.0), (91, 7.5), (90, 7.0)]


def test_only_candidates_that_may_be_better_are_measured() -> None:
    best = candidate(91, 7.0, measured=True)
    few = [best, candidate(90.9, 1.0), candidate(91, 6.9), candidate(91, 6.0), candidate(91.1, 7.9)]
    queue = promising(few, BudgetConfig(latency_ms=8.0), "fast", best, 0.0)
    assert [(one.float32_score, one.estimate.latency_ms) for one in queue] == [(91.1, 7.9), (91, 6.0)]


def test_minimum_score_prefers_the_fastest_or_the_smallest() -> None:
    budget = BudgetConfig(at_least=90.0)
    few = [candidate(95, 9.0, 5.0), candidate(90, 4.0, 9.0), candidate(89.9, 1.0, 1.0)]
    assert [one.float32_score for one in promising(few, budget, "fast", None, 0.0)] == [90, 95]
    assert [one.float32_score for one in promising(few, budget, "small", None, 0.0)] == [95, 90]
    fast, small = candidate(90, 4.0, 9.0, measured=True), candidate(95, 9.0, 5.0, measured=True)
    assert is_better(fast, small, budget, "fast")
    assert is_better(small, fast, budget, "small")


def test_nearest_miss_has_the_smallest_worst_excess() -> None:
    budget = BudgetConfig(latency_ms=8.0, size_mb=10.0)
    few = [candidate(99, 8.8, 40.0), candidate(70, 12.0, 9.0), candidate(80, 10.0, 12.0)]
    assert nearest_miss(few, budget).float32_score == 80


def test_precisions_without_speed_up_give_a_notice() -> None:
    plain, narrow = RunMode("torch", "float32"), RunMode("torch", "int8")
    assert slow_precisions({plain: 8.0, narrow: 5.0}) == []
    (notice,) = slow_precisions({plain: 8.0, narrow: 9.1})
    assert notice.startswith("int8 is slower than float32 here in torch: 9.10 ms against 8.00 ms")
    assert slow_precisions({narrow: 9.0}) == []
