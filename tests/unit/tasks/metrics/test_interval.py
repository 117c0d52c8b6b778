"""The bootstrap interval: reproducible, of the correct width, and undefined only if the metric is."""

import math

import numpy as np
import pytest

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import confidence_interval
from bertsmith.tasks.metrics.classes import evaluate_classes


def mean_evaluation(values: np.ndarray) -> Evaluation:
    return Evaluation("mean", {"mean": float(values.mean())}, lambda chosen: float(values[chosen].mean()))


def test_interval_contains_the_score_and_is_reproducible() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(2, size=300)
    predicted = np.where(generator.random(300) < 0.8, labels, 1 - labels)
    evaluation = evaluate_classes(predicted, labels, 2, "f1")
    interval = confidence_interval(evaluation, 300)
    assert interval is not None
    assert interval[0] < evaluation.score < interval[1]
    assert confidence_interval(evaluation, 300) == interval
    assert confidence_interval(evaluation, 300, seed=1) != interval


def test_width_equals_the_normal_interval_of_a_mean() -> None:
    values = np.random.default_rng(1).normal(50.0, 10.0, size=2000)
    interval = confidence_interval(mean_evaluation(values), 2000)
    assert interval is not None
    half = 1.96 * values.std() / math.sqrt(2000)
    assert interval[1] - interval[0] == pytest.approx(2 * half, rel=0.1)
    assert sum(interval) / 2 == pytest.approx(values.mean(), abs=0.1 * half)


def test_coverage_is_close_to_the_level() -> None:
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        interval = confidence_interval(mean_evaluation(generator.normal(size=60)), 60, resamples=200)
        assert interval is not None
        covered += interval[0] <= 0.0 <= interval[1]
    assert 180 <= covered <= 198


def test_lower_level_gives_a_narrower_interval() -> None:
    values = np.random.default_rng(3).normal(size=100)
    wide, narrow = (confidence_interval(mean_evaluation(values), 100, level=level) for level in (0.95, 0.5))
    assert wide is not None
    assert narrow is not None
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_intervals_of_one_example_and_of_none() -> None:
    assert confidence_interval(mean_evaluation(np.array([3.0])), 1) == (3.0, 3.0)
    assert confidence_interval(mean_evaluation(np.array([3.0])), 0) is None


def test_undefined_resamples_are_ignored() -> None:
    values = np.array([1.0, 2.0, 3.0])

    def measure(chosen: np.ndarray) -> float:
        return math.nan if len(set(chosen)) == 1 else float(values[chosen].mean())

    interval = confidence_interval(Evaluation("mean", {"mean": 2.0}, measure), 3)
    assert interval is not None
    assert 1.0 < interval[0] < interval[1] < 3.0
    assert confidence_interval(Evaluation("mean", {"mean": 2.0}, lambda _: math.nan), 3) is None
