"""Correlations against scipy's, with ties and with answers that are all the same."""

import numpy as np
import pytest
from scipy import stats

from bertsmith.errors import InputError
from bertsmith.tasks.metrics.ranking import evaluate_values, pearson, ranks, spearman


def numbers(kind: str) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    if kind == "tied":
        return draw.integers(0, 6, 300) / 4, draw.integers(0, 4, 300).astype(float)
    said = draw.normal(size=200)
    right = said + draw.normal(size=200)
    # an untrained model says about the same of everything
    return (said * 1e-6 + 3, right) if kind == "close" else (said, right)


@pytest.mark.parametrize("kind", ["random", "tied", "close"])
def test_correlations_are_scipys(kind: str) -> None:
    said, right = numbers(kind)
    assert pearson(said, right) == pytest.approx(100 * stats.pearsonr(said, right).statistic, abs=1e-6)
    assert spearman(said, right) == pytest.approx(100 * stats.spearmanr(said, right).statistic, abs=1e-9)
    assert (ranks(said) == stats.rankdata(said)).all()


def test_one_answer_for_all_has_no_correlation() -> None:
    said, right = np.full(7, 0.1, dtype=np.float32), np.arange(7.0)
    assert pearson(said, right) == spearman(said, right) == pearson(right, said) == 0.0


def test_judgement() -> None:
    said, right = numbers("random")
    evaluation = evaluate_values(said, right, None)
    assert evaluation.metric == "spearman"
    assert evaluation.metrics["mse"] == pytest.approx(np.mean((said - right) ** 2))
    assert evaluation.measure(np.arange(50)) == pytest.approx(spearman(said[:50], right[:50]))
    with pytest.raises(InputError, match=r"task\.metric is 'mse'"):
        evaluate_values(said, right, "mse")
