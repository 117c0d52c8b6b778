"""The bootstrap interval: repeatable, of the right width, and defined wherever a figure is."""

import math

import numpy as np
import pytest

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import confidence_interval
from bertsmith.tasks.metrics.classes import evaluate_classes


def mean_of(values: np.ndarray) -> Evaluation:
    return Evaluation("mean", {"mean": float(values.mean())}, lambda chosen: float(values[chosen].mean()))


def test_it_holds_the_figure_and_repeats() -> None:
    generator = np.random.default_rng(0)
    right = generator.integers(2, size=300)
    said = np.where(generator.random(300) < 0.8, right, 1 - right)
    evaluation = evaluate_classes(said, right, 2, "f1")
    found = confidence_interval(evaluation, 300)
    assert found is not None
    assert found[0] < evaluation.score < found[1]
    assert confidence_interval(evaluation, 300) == found
    assert confidence_interval(evaluation, 300, seed=1) != found


def test_it_is_as_wide_as_the_normal_interval_of_a_mean() -> None:
    values = np.random.default_rng(1).normal(50.0, 10.0, size=2000)
    found = confidence_interval(mean_of(values), 2000)
    assert found is not None
    half = 1.96 * values.std() / math.sqrt(2000)
    assert found[1] - found[0] == pytest.approx(2 * half, rel=0.1)
    assert sum(found) / 2 == pytest.approx(values.mean(), abs=0.1 * half)


def test_it_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        found = confidence_interval(mean_of(generator.normal(size=60)), 60, resamples=200)
        assert found is not None
        covered += found[0] <= 0.0 <= found[1]
    assert 180 <= covered <= 198


def test_a_narrower_level_lies_inside() -> None:
    values = np.random.default_rng(3).normal(size=100)
    wide, narrow = (confidence_interval(mean_of(values), 100, level=level) for level in (0.95, 0.5))
    assert wide is not None
    assert narrow is not None
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_one_example_has_no_spread_and_none_no_interval() -> None:
    assert confidence_interval(mean_of(np.array([3.0])), 1) == (3.0, 3.0)
    assert confidence_interval(mean_of(np.array([3.0])), 0) is None


def test_draws_without_a_figure_are_left_out() -> None:
    values = np.array([1.0, 2.0, 3.0])

    def measure(chosen: np.ndarray) -> float:
        return math.nan if len(set(chosen)) == 1 else float(values[chosen].mean())

    found = confidence_interval(Evaluation("mean", {"mean": 2.0}, measure), 3)
    assert found is not None
    assert 1.0 < found[0] < found[1] < 3.0
    assert confidence_interval(Evaluation("mean", {"mean": 2.0}, lambda _: math.nan), 3) is None
