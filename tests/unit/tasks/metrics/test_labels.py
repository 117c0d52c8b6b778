"""Figures over many labels against scikit-learn's."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score

from bertsmith.tasks.metrics.ranking import evaluate_labels


@pytest.mark.parametrize("labels", [1, 2, 7])
@pytest.mark.parametrize("is_tied", [True, False])
def test_figures_are_those_of_scikit_learn(labels: int, is_tied: bool) -> None:
    draw = np.random.default_rng(labels)
    scores = draw.random((60, labels))
    scores = scores.round(1) if is_tied else scores
    right = draw.random((60, labels)) < 0.3
    said = scores >= 0.5
    metrics = evaluate_labels(said, scores, right, None).metrics
    asked = {"zero_division": 0.0, "y_true": right.astype(int), "y_pred": said.astype(int)}
    if labels > 1:  # scikit-learn takes one column for two classes
        assert metrics["micro_f1"] == pytest.approx(100 * f1_score(average="micro", **asked))
        assert metrics["macro_f1"] == pytest.approx(100 * f1_score(average="macro", **asked))
    precisions = [average_precision_score(right[:, i], scores[:, i]) for i in range(labels)]
    assert metrics["mean_average_precision"] == pytest.approx(100 * np.mean(precisions), abs=1e-4)
    assert metrics["subset_accuracy"] == pytest.approx(100 * (said == right).all(1).mean())


def test_labels_that_no_example_has() -> None:
    right = np.array([[True, False], [False, False]])
    scores = np.array([[0.9, 0.2], [0.1, 0.3]])
    evaluation = evaluate_labels(scores > 0.5, scores, right, "macro_f1")
    assert evaluation.metrics == {
        "micro_f1": 100.0,
        "macro_f1": 50.0,
        "subset_accuracy": 100.0,
        "mean_average_precision": 100.0,
    }
    assert evaluation.measure(np.array([1, 1])) == 0.0
    nothing = evaluate_labels(scores > 0.5, scores, np.zeros_like(right), None)
    assert nothing.metrics["mean_average_precision"] == nothing.score == 0.0
