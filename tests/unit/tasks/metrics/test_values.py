"""Correlations against scipy, with ties and constant predictions."""

import numpy as np
import pytest
from scipy import stats

from bertsmith.errors import InputError
from bertsmith.tasks.metrics.ranking import evaluate_values, pearson, ranks, spearman


def sample_values(kind: str) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    if kind == "tied":
        return draw.integers(0, 6, 300) / 4, draw.integers(0, 4, 300).astype(float)
    predicted = draw.normal(size=200)
    values = predicted + draw.normal(size=200)
    # an untrained model predicts nearly the same value for every example
    return (predicted * 1e-6 + 3, values) if kind == "close" else (predicted, values)


@pytest.mark.parametrize("kind", ["random", "tied", "close"])
def test_correlations_equal_scipy(kind: str) -> None:
    predicted, values = sample_values(kind)
    assert pearson(predicted, values) == pytest.approx(100 * stats.pearsonr(predicted, values).statistic, abs=1e-6)
    assert spearman(predicted, values) == pytest.approx(100 * stats.spearmanr(predicted, values).statistic, abs=1e-9)
    assert (ranks(predicted) == stats.rankdata(predicted)).all()


def test_correlation_of_a_constant_is_zero() -> None:
    predicted, values = np.full(7, 0.1, dtype=np.float32), np.arange(7.0)
    assert pearson(predicted, values) == spearman(predicted, values) == pearson(values, predicted) == 0.0


def test_evaluation_of_values() -> None:
    predicted, values = sample_values("random")
    evaluation = evaluate_values(predicted, values, None)
    assert evaluation.metric == "spearman"
    assert evaluation.metrics["mse"] == pytest.approx(np.mean((predicted - values) ** 2))
    assert evaluation.measure(np.arange(50)) == pytest.approx(spearman(predicted[:50], values[:50]))
    with pytest.raises(InputError, match=r"task\.metric is 'mse'"):
        evaluate_values(predicted, values, "mse")
