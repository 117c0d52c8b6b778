"""Figures of vectors against scikit-learn's and against plain loops."""

import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from bertsmith.answers.embedding import partner_ranks
from bertsmith.errors import InputError
from bertsmith.tasks.metrics.ranking import (
    evaluate_likeness,
    evaluate_retrieval,
    evaluate_similarity,
    evaluate_spread,
)


def unit(*shape: int) -> np.ndarray:
    vectors = np.random.default_rng(2).normal(size=shape)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.parametrize("is_tied", [True, False])
def test_likeness_is_that_of_scikit_learn(is_tied: bool) -> None:
    draw = np.random.default_rng(1)
    is_alike = draw.random(80) < 0.4
    cosines = np.clip(draw.normal(size=80) / 3 + 0.3 * is_alike, -1, 1)
    cosines = cosines.round(1) if is_tied else cosines
    evaluation = evaluate_likeness(cosines, is_alike, None)
    assert evaluation.metric == "average_precision"
    assert evaluation.score == pytest.approx(100 * average_precision_score(is_alike, cosines), abs=1e-4)
    assert evaluation.metrics["roc_area"] == pytest.approx(100 * roc_auc_score(is_alike, cosines), abs=1e-4)


def test_samples_of_one_side_only() -> None:
    evaluation = evaluate_likeness(np.array([0.1, 0.2]), np.array([False, False]), None)
    assert evaluation.metrics == {"average_precision": 0.0, "roc_area": 50.0}


def test_similarity() -> None:
    evaluation = evaluate_similarity(np.array([0.1, 0.5, 0.2]), np.array([0.0, 1.0, 0.5]), "pearson")
    assert evaluation.metric == "pearson"
    assert evaluation.metrics["spearman"] == pytest.approx(100)
    assert evaluation.measure(np.array([0, 2, 2])) == pytest.approx(100)
    with pytest.raises(InputError, match=r"task\.metric is 'mrr'; allowed: pearson, spearman"):
        evaluate_similarity(np.ones(2), np.ones(2), "mrr")


def test_ranks_of_partners() -> None:
    first, second = unit(7, 4), unit(9, 4)[2:]
    own = np.array([0, 1, 2, 1, 3, 4, 5])
    second[3] = second[1]  # the same text has the same vector
    expected = []
    for i in range(7):
        others = {int(own[j]): float(first[i] @ second[j]) for j in range(7)}
        expected.append(1 + sum(value > others[own[i]] for key, value in others.items() if key != own[i]))
    ranks = partner_ranks(first, second, own)
    assert ranks.tolist() == expected
    assert len(set(expected)) > 2
    evaluation = evaluate_retrieval(ranks, None)
    assert evaluation.score == pytest.approx(100 * sum(1 / rank for rank in expected) / 7)
    assert evaluation.metrics["accuracy_at_1"] == pytest.approx(100 * expected.count(1) / 7)


def test_vectors_that_are_all_one_find_nothing() -> None:
    vectors = np.ones((5, 4)) / 2
    assert partner_ranks(vectors, vectors, np.arange(5)).tolist() == [5] * 5


def test_uniformity() -> None:
    vectors = unit(6, 3)
    distances = [((vectors[i] - vectors[j]) ** 2).sum() for i in range(6) for j in range(6) if i != j]
    expected = -math.log(sum(math.exp(-2 * distance) for distance in distances) / len(distances))
    assert evaluate_spread(vectors, None).score == pytest.approx(expected)
    assert evaluate_spread(np.ones((4, 4)) / 2, None).score == pytest.approx(0)
