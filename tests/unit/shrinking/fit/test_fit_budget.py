"""Budgets: which limits are missed and by how much, and invalid budgets."""

import pytest

from bertsmith.errors import InputError
from bertsmith.shrinking.fit.candidates import pareto_front
from bertsmith.shrinking.fit.settings import BudgetConfig, Costs, FitSettings, excess


def test_unlimited_and_unknown_costs_are_ignored() -> None:
    budget = BudgetConfig(latency_ms=8.0)
    assert budget.misses(Costs(latency_ms=8.0, size_mb=1e9)) == []
    assert budget.misses(Costs(size_mb=1.0)) == []


def test_misses_describe_their_excess() -> None:
    budget = BudgetConfig(latency_ms=8.0, size_mb=60.0, memory_mb=400.0, at_least=88.0)
    misses = budget.misses(Costs(latency_ms=12.0, size_mb=60.1, memory_mb=300.0, score=87.5))
    assert [miss.name for miss in misses] == ["latency", "size", "score"]
    assert misses[0].description == "latency 12 ms instead of 8 ms (50% over)"
    assert misses[2].description == "score 87.50 instead of 88 (0.50 too low)"
    assert excess(misses) == pytest.approx(0.5)


def test_slack_applies_to_costs_but_not_to_the_score() -> None:
    budget = BudgetConfig(latency_ms=10.0, at_least=88.0)
    assert budget.misses(Costs(latency_ms=11.0, score=88.0), slack=0.2) == []
    assert [miss.name for miss in budget.misses(Costs(latency_ms=11.0, score=87.9), slack=0.2)] == ["score"]


def test_nan_misses_every_limit() -> None:
    budget = BudgetConfig(latency_ms=10.0, at_least=1.0)
    assert len(budget.misses(Costs(latency_ms=float("nan"), score=float("nan")))) == 2


def test_empty_budget_raises() -> None:
    with pytest.raises(InputError, match=r"no budget is set.*--latency-ms"):
        BudgetConfig(threads=2).require_any()
    BudgetConfig(size_mb=3.0).require_any()


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        ({"latency_ms": -1}, r"budget.latency_ms is -1: .*greater than 0"),
        ({"percentile": 90}, r"budget.percentile is 90"),
        ({"lengths": [0]}, r"budget.lengths.0 is 0"),
        ({"batch": 0}, r"budget.batch is 0"),
        ({"latencyms": 3}, r"did you mean 'latency_ms'"),
    ],
)
def test_invalid_limits_raise(budget: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        FitSettings.parse({"model": "m", "data": "d", "budget": budget})


def test_description_lists_every_limit() -> None:
    budget = BudgetConfig(latency_ms=8.0, lengths=(32, 128), batch=4, size_mb=60.0, at_least=88.0)
    assert budget.description == "p95 ≤ 8 ms at 32 and 128 tokens in batches of 4, size ≤ 60 MB, score ≥ 88"


def test_pareto_front_has_only_undominated_points() -> None:
    points = [(5, 80.0), (1, 60.0), (2, 60.0), (3, 75.0), (4, 74.0), (5, 80.0), (9, 79.0)]
    assert pareto_front(points, lambda p: p[0], lambda p: p[1]) == [(1, 60.0), (3, 75.0), (5, 80.0)]
    assert pareto_front([], lambda p: p[0], lambda p: p[1]) == []
