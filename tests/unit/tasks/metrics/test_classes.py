"""Classification metrics against scikit-learn, on random and adversarial predictions."""

import numpy as np
import pytest
from sklearn import metrics as theirs

from bertsmith.errors import InputError
from bertsmith.tasks.metrics.classes import (
    CLASS_METRICS,
    UNKNOWN,
    ClassCounts,
    class_metric,
    evaluate_classes,
    matthews,
)

NEAR = 1e-5


def by_scikit_learn(predicted: np.ndarray, labels: np.ndarray, classes: int, positive: int = 1) -> dict[str, float]:
    """The same metrics from scikit-learn, in percent."""
    present = np.union1d(predicted, labels)
    f1 = theirs.f1_score(labels, predicted, labels=np.arange(classes), average=None, zero_division=0)
    macro = theirs.f1_score(labels, predicted, labels=present, average="macro", zero_division=0)
    # scikit-learn warns if there is a single label; the correlation is then 0 by definition
    correlation = 0.0 if len(present) == 1 else theirs.matthews_corrcoef(labels, predicted)
    return {
        "accuracy": 100 * theirs.accuracy_score(labels, predicted),
        "f1": 100 * (f1[positive] if classes == 2 else macro),
        "macro_f1": 100 * macro,
        "weighted_f1": 100 * theirs.f1_score(labels, predicted, average="weighted", zero_division=0),
        "matthews": 100 * correlation,
    }


def random_case(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Predictions of any quality for few or many examples, with classes that may be rare or absent."""
    classes, examples = int(generator.integers(2, 8)), int(generator.choice([1, 2, 3, 7, 40, 200]))
    shares = generator.dirichlet(np.full(classes, generator.choice([0.1, 1.0, 10.0])))
    labels = generator.choice(classes, size=examples, p=shares)
    predicted = np.where(
        generator.random(examples) < generator.random(), labels, generator.integers(classes, size=examples)
    )
    return predicted, labels, classes


def test_metrics_equal_scikit_learn_on_random_cases() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        predicted, labels, classes = random_case(generator)
        counts = ClassCounts.of(predicted, labels, classes)
        expected = by_scikit_learn(predicted, labels, classes)
        assert {name: class_metric(name, counts) for name in CLASS_METRICS} == pytest.approx(expected, abs=NEAR)
        precision, recall, f1, support = theirs.precision_recall_fscore_support(
            labels, predicted, labels=np.arange(classes), zero_division=0
        )
        np.testing.assert_allclose(counts.precision, precision, atol=1e-12)
        np.testing.assert_allclose(counts.recall, recall, atol=1e-12)
        np.testing.assert_allclose(counts.f1, f1, atol=1e-12)
        np.testing.assert_array_equal(counts.actual, support)


@pytest.mark.parametrize(
    ("predicted", "labels", "classes"),
    [
        ([0], [0], 2),
        ([1], [1], 2),
        ([1], [0], 2),
        ([0, 0, 0], [0, 0, 0], 2),
        ([1, 1, 1], [1, 1, 1], 2),
        ([0, 0, 0], [1, 1, 1], 2),
        ([1, 0, 1, 0], [0, 1, 0, 1], 2),
        ([0, 0, 0, 0], [0, 1, 0, 1], 2),
        ([1, 1, 1, 1], [0, 1, 0, 1], 2),
        ([0, 1, 2], [0, 1, 2], 5),
        ([4, 4, 4], [0, 1, 2], 5),
        ([3, 3], [3, 3], 4),
        ([1, 2, 0], [0, 1, 2], 3),
    ],
    ids=str,
)
def test_adversarial_cases_equal_scikit_learn(predicted: list[int], labels: list[int], classes: int) -> None:
    arrays = np.array(predicted), np.array(labels)
    evaluation = evaluate_classes(*arrays, classes, "accuracy")
    expected = by_scikit_learn(*arrays, classes)
    assert evaluation.metrics == pytest.approx({name: expected[name] for name in evaluation.metrics}, abs=NEAR)


def test_matthews_is_zero_for_constant_predictions_or_labels() -> None:
    for predicted, labels in (([1, 1], [0, 1]), ([0, 1], [1, 1]), ([1, 1], [1, 1]), ([0, 0], [1, 1])):
        assert matthews(ClassCounts.of(np.array(predicted), np.array(labels), 2)) == 0.0


@pytest.mark.parametrize("metric", CLASS_METRICS)
def test_measure_computes_the_metric_of_a_subset(metric: str) -> None:
    generator = np.random.default_rng(2)
    for _ in range(100):
        predicted, labels, classes = random_case(generator)
        evaluation = evaluate_classes(predicted, labels, classes, metric)
        assert evaluation.measure(np.arange(len(predicted))) == evaluation.score
        chosen = generator.integers(len(predicted), size=len(predicted))
        expected = by_scikit_learn(predicted[chosen], labels[chosen], classes)[metric]
        assert evaluation.measure(chosen) == pytest.approx(expected, abs=NEAR)


def test_examples_without_a_label_are_ignored() -> None:
    generator = np.random.default_rng(3)
    predicted, labels = generator.integers(3, size=50), generator.integers(3, size=50)
    hidden = np.where(np.arange(50) % 4 == 0, UNKNOWN, labels)
    is_known = hidden != UNKNOWN
    expected = evaluate_classes(predicted[is_known], labels[is_known], 3, None)
    assert evaluate_classes(predicted, hidden, 3, None).metrics == expected.metrics
    unlabelled = evaluate_classes(predicted, np.full(50, UNKNOWN), 3, None)
    assert set(unlabelled.metrics.values()) == {0.0}


def test_positive_class_defaults_to_the_second() -> None:
    predicted, labels = np.array([1, 0, 0, 1, 0]), np.array([1, 1, 0, 0, 0])
    assert evaluate_classes(predicted, labels, 2, "f1").score == pytest.approx(50.0)
    assert evaluate_classes(predicted, labels, 2, "f1", positive=0).score == pytest.approx(200 / 3)
    assert evaluate_classes(predicted, labels, 2, "f1", positive=0).measure(np.arange(5)) == pytest.approx(200 / 3)


def test_counts_of_a_confusion_matrix() -> None:
    predicted, labels, classes = random_case(np.random.default_rng(4))
    matrix = theirs.confusion_matrix(labels, predicted, labels=np.arange(classes))
    ours, direct = ClassCounts.of_confusion(matrix), ClassCounts.of(predicted, labels, classes)
    for name in ("hits", "predicted", "actual"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(direct, name))


def test_unknown_metric_is_rejected() -> None:
    with pytest.raises(InputError, match=r"task\.metric is 'f2'"):
        evaluate_classes(np.array([0]), np.array([0]), 2, "f2")
