"""Metrics of embeddings against scikit-learn and plain loops."""

import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from bertsmith.answers.embedding import partner_ranks
from bertsmith.errors import InputError
from bertsmith.tasks.metrics.ranking import (
    evaluate_pair_labels,
    evaluate_retrieval,
    evaluate_similarity,
    evaluate_uniformity,
)


def unit(*shape: int) -> np.ndarray:
    vectors = np.random.default_rng(2).normal(size=shape)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.parametrize("is_tied", [True, False])
def test_pair_label_metrics_equal_scikit_learn(is_tied: bool) -> None:
    draw = np.random.default_rng(1)
    is_similar = draw.random(80) < 0.4
    cosines = np.clip(draw.normal(size=80) / 3 + 0.3 * is_similar, -1, 1)
    cosines = cosines.round(1) if is_tied else cosines
    evaluation = evaluate_pair_labels(cosines, is_similar, None)
    assert evaluation.metric == "average_precision"
    assert evaluation.score == pytest.approx(100 * average_precision_score(is_similar, cosines), abs=1e-4)
    assert evaluation.metrics["roc_area"] == pytest.approx(100 * roc_auc_score(is_similar, cosines), abs=1e-4)


def test_pairs_with_a_single_label() -> None:
    evaluation = evaluate_pair_labels(np.array([0.1, 0.2]), np.array([False, False]), None)
    assert evaluation.metrics == {"average_precision": 0.0, "roc_area": 50.0}


def test_similarity_metrics() -> None:
    evaluation = evaluate_similarity(np.array([0.1, 0.5, 0.2]), np.array([0.0, 1.0, 0.5]), "pearson")
    assert evaluation.metric == "pearson"
    assert evaluation.metrics["spearman"] == pytest.approx(100)
    assert evaluation.measure(np.array([0, 2, 2])) == pytest.approx(100)
    with pytest.raises(InputError, match=r"task\.metric is 'mrr'; allowed: pearson, spearman"):
        evaluate_similarity(np.ones(2), np.ones(2), "mrr")


def test_retrieval_ranks_equal_a_plain_loop() -> None:
    first, second = unit(7, 4), unit(9, 4)[2:]
    text_ids = np.array([0, 1, 2, 1, 3, 4, 5])
    second[3] = second[1]  # the same text has the same vector
    expected = []
    for i in range(7):
        others = {int(text_ids[j]): float(first[i] @ second[j]) for j in range(7)}
        expected.append(1 + sum(value > others[text_ids[i]] for key, value in others.items() if key != text_ids[i]))
    ranks = partner_ranks(first, second, text_ids)
    assert ranks.tolist() == expected
    assert len(set(expected)) > 2
    evaluation = evaluate_retrieval(ranks, None)
    assert evaluation.score == pytest.approx(100 * sum(1 / rank for rank in expected) / 7)
    assert evaluation.metrics["accuracy_at_1"] == pytest.approx(100 * expected.count(1) / 7)


def test_equal_vectors_get_the_last_rank() -> None:
    vectors = np.ones((5, 4)) / 2
    assert partner_ranks(vectors, vectors, np.arange(5)).tolist() == [5] * 5


def test_uniformity_equals_a_plain_loop() -> None:
    vectors = unit(6, 3)
    distances = [((vectors[i] - vectors[j]) ** 2).sum() for i in range(6) for j in range(6) if i != j]
    expected = -math.log(sum(math.exp(-2 * distance) for distance in distances) / len(distances))
    assert evaluate_uniformity(vectors, None).score == pytest.approx(expected)
    assert evaluate_uniformity(np.ones((4, 4)) / 2, None).score == pytest.approx(0)
