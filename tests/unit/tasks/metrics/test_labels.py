"""Multi-label metrics against scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score

from bertsmith.tasks.metrics.ranking import evaluate_labels


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("is_tied", [True, False])
def test_metrics_equal_scikit_learn(count: int, is_tied: bool) -> None:
    draw = np.random.default_rng(count)
    scores = draw.random((60, count))
    scores = scores.round(1) if is_tied else scores
    labels = draw.random((60, count)) < 0.3
    predicted = scores >= 0.5
    metrics = evaluate_labels(predicted, scores, labels, None).metrics
    arguments = {"zero_division": 0.0, "y_true": labels.astype(int), "y_pred": predicted.astype(int)}
    if count > 1:  # scikit-learn treats a single column as two classes
        assert metrics["micro_f1"] == pytest.approx(100 * f1_score(average="micro", **arguments))
        assert metrics["macro_f1"] == pytest.approx(100 * f1_score(average="macro", **arguments))
    precisions = [average_precision_score(labels[:, i], scores[:, i]) for i in range(count)]
    assert metrics["mean_average_precision"] == pytest.approx(100 * np.mean(precisions), abs=1e-4)
    assert metrics["subset_accuracy"] == pytest.approx(100 * (predicted == labels).all(1).mean())


def test_labels_without_examples() -> None:
    labels = np.array([[True, False], [False, False]])
    scores = np.array([[0.9, 0.2], [0.1, 0.3]])
    evaluation = evaluate_labels(scores > 0.5, scores, labels, "macro_f1")
    assert evaluation.metrics == {
        "micro_f1": 100.0,
        "macro_f1": 50.0,
        "subset_accuracy": 100.0,
        "mean_average_precision": 100.0,
    }
    assert evaluation.measure(np.array([1, 1])) == 0.0
    unlabelled = evaluate_labels(scores > 0.5, scores, np.zeros_like(labels), None)
    assert unlabelled.metrics["mean_average_precision"] == unlabelled.score == 0.0
