"""The bootstrap interval: reproducible, of the correct width, and undefined only if the metric is."""

import math

import numpy as np
import pytest

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import confidence_interval, loss_bounds
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


def test_loss_bounds_hold_together_at_their_level() -> None:
    generator = np.random.default_rng(4)
    true_losses = np.array([0.0, 0.2, 0.5, 0.5, 1.0])
    held, single = 0, 0
    for _ in range(200):
        texts = generator.normal(30, 10, size=(80, 1))  # what makes a text hard is shared by all systems
        scores = texts - true_losses + generator.normal(0, 2, size=(80, 5))
        full, *others = (mean_evaluation(column) for column in np.hstack([texts, scores]).T)
        bounds = np.array(loss_bounds(full, others, 80, level=0.9, resamples=200))
        held += bool((true_losses <= bounds).all())
        single += true_losses[0] <= bounds[0]
    assert 170 <= held <= 192
    assert single > held


def test_paired_bounds_are_narrower_than_the_spread_of_scores() -> None:
    generator = np.random.default_rng(5)
    texts = generator.normal(30, 10, size=500)
    full, other = mean_evaluation(texts), mean_evaluation(texts - generator.normal(0.1, 0.5, size=500))
    (bound,) = loss_bounds(full, [other], 500, level=0.95)
    loss = full.score - other.score
    assert bound - loss == pytest.approx(1.645 * 0.5 / math.sqrt(500), rel=0.2)
    assert loss_bounds(full, [full], 500, level=0.95) == [0.0]
    assert loss_bounds(full, [], 500, level=0.95) == []


def test_more_candidates_widen_the_bounds() -> None:
    generator = np.random.default_rng(6)
    texts = generator.normal(30, 10, size=200)
    full = mean_evaluation(texts)
    others = [mean_evaluation(texts + generator.normal(0, 2, size=200)) for _ in range(20)]
    (alone,) = loss_bounds(full, others[:1], 200, level=0.95)
    assert loss_bounds(full, others, 200, level=0.95)[0] > alone


def test_bounds_need_a_score_of_resampled_examples() -> None:
    with pytest.raises(ValueError, match="no measure"):
        loss_bounds(Evaluation("mean", {"mean": 1.0}), [Evaluation("mean", {"mean": 1.0})], 3, level=0.9)
