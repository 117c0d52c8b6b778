"""The figures of classes equal those of scikit-learn, on random and on adversarial answers."""

import numpy as np
import pytest
from sklearn import metrics as theirs

from bertsmith.errors import InputError
from bertsmith.tasks.metrics.classes import (
    CLASS_METRICS,
    UNKNOWN,
    ClassCounts,
    class_figure,
    evaluate_classes,
    matthews,
)

NEAR = 1e-5


def by_scikit_learn(said: np.ndarray, right: np.ndarray, classes: int, positive: int = 1) -> dict[str, float]:
    """The same figures from scikit-learn, in percent."""
    present = np.union1d(said, right)
    f1 = theirs.f1_score(right, said, labels=np.arange(classes), average=None, zero_division=0)
    macro = theirs.f1_score(right, said, labels=present, average="macro", zero_division=0)
    # scikit-learn warns of one label only, where the correlation is 0 by its definition
    correlation = 0.0 if len(present) == 1 else theirs.matthews_corrcoef(right, said)
    return {
        "accuracy": 100 * theirs.accuracy_score(right, said),
        "f1": 100 * (f1[positive] if classes == 2 else macro),
        "macro_f1": 100 * macro,
        "weighted_f1": 100 * theirs.f1_score(right, said, average="weighted", zero_division=0),
        "matthews": 100 * correlation,
    }


def random_case(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Answers of any quality to few or many examples, with classes that may be rare or absent."""
    classes, examples = int(generator.integers(2, 8)), int(generator.choice([1, 2, 3, 7, 40, 200]))
    shares = generator.dirichlet(np.full(classes, generator.choice([0.1, 1.0, 10.0])))
    right = generator.choice(classes, size=examples, p=shares)
    said = np.where(generator.random(examples) < generator.random(), right, generator.integers(classes, size=examples))
    return said, right, classes


def test_figures_equal_scikit_learn_on_random_cases() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        said, right, classes = random_case(generator)
        counts = ClassCounts.of(said, right, classes)
        expected = by_scikit_learn(said, right, classes)
        assert {name: class_figure(name, counts) for name in CLASS_METRICS} == pytest.approx(expected, abs=NEAR)
        precision, recall, f1, support = theirs.precision_recall_fscore_support(
            right, said, labels=np.arange(classes), zero_division=0
        )
        np.testing.assert_allclose(counts.precision, precision, atol=1e-12)
        np.testing.assert_allclose(counts.recall, recall, atol=1e-12)
        np.testing.assert_allclose(counts.f1, f1, atol=1e-12)
        np.testing.assert_array_equal(counts.right, support)


@pytest.mark.parametrize(
    ("said", "right", "classes"),
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
def test_adversarial_cases_equal_scikit_learn(said: list[int], right: list[int], classes: int) -> None:
    arrays = np.array(said), np.array(right)
    evaluation = evaluate_classes(*arrays, classes, "accuracy")
    expected = by_scikit_learn(*arrays, classes)
    assert evaluation.metrics == pytest.approx({name: expected[name] for name in evaluation.metrics}, abs=NEAR)


def test_matthews_is_zero_where_nothing_varies() -> None:
    for said, right in (([1, 1], [0, 1]), ([0, 1], [1, 1]), ([1, 1], [1, 1]), ([0, 0], [1, 1])):
        assert matthews(ClassCounts.of(np.array(said), np.array(right), 2)) == 0.0


@pytest.mark.parametrize("metric", CLASS_METRICS)
def test_measure_is_the_figure_of_the_chosen_examples(metric: str) -> None:
    generator = np.random.default_rng(2)
    for _ in range(100):
        said, right, classes = random_case(generator)
        evaluation = evaluate_classes(said, right, classes, metric)
        assert evaluation.measure(np.arange(len(said))) == evaluation.score
        chosen = generator.integers(len(said), size=len(said))
        expected = by_scikit_learn(said[chosen], right[chosen], classes)[metric]
        assert evaluation.measure(chosen) == pytest.approx(expected, abs=NEAR)


def test_examples_of_an_unknown_class_count_nowhere() -> None:
    generator = np.random.default_rng(3)
    said, right = generator.integers(3, size=50), generator.integers(3, size=50)
    hidden = np.where(np.arange(50) % 4 == 0, UNKNOWN, right)
    kept = hidden != UNKNOWN
    assert evaluate_classes(said, hidden, 3, None).metrics == evaluate_classes(said[kept], right[kept], 3, None).metrics
    nobody_knows = evaluate_classes(said, np.full(50, UNKNOWN), 3, None)
    assert set(nobody_knows.metrics.values()) == {0.0}


def test_positive_class_is_the_second_unless_told() -> None:
    said, right = np.array([1, 0, 0, 1, 0]), np.array([1, 1, 0, 0, 0])
    assert evaluate_classes(said, right, 2, "f1").score == pytest.approx(50.0)
    assert evaluate_classes(said, right, 2, "f1", positive=0).score == pytest.approx(200 / 3)
    assert evaluate_classes(said, right, 2, "f1", positive=0).measure(np.arange(5)) == pytest.approx(200 / 3)


def test_confusion_gives_the_same_counts() -> None:
    said, right, classes = random_case(np.random.default_rng(4))
    matrix = theirs.confusion_matrix(right, said, labels=np.arange(classes))
    ours, direct = ClassCounts.of_confusion(matrix), ClassCounts.of(said, right, classes)
    for name in ("hits", "said", "right"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(direct, name))


def test_unknown_metric_is_named() -> None:
    with pytest.raises(InputError, match=r"task\.metric is 'f2'"):
        evaluate_classes(np.array([0]), np.array([0]), 2, "f2")
