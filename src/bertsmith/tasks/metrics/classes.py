"""Metrics of single-label classification.

All of them are computed in double precision from three counts per class, because the bootstrap needs each of a thousand
resamples within microseconds. The tests compare them with scikit-learn.
"""

from dataclasses import dataclass

import numpy as np

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import main_metric

UNKNOWN = -1  # label of an example without a target; ignored by all metrics


@dataclass(frozen=True)
class ClassCounts:
    """True positives, predictions and labels of each class.

    Shape: all (classes,).
    """

    hits: np.ndarray
    predicted: np.ndarray
    actual: np.ndarray

    @classmethod
    def of(cls, predicted: np.ndarray, labels: np.ndarray, classes: int) -> "ClassCounts":
        """Count predictions; examples with the label UNKNOWN are ignored.

        Shape: predicted and labels (examples,), class indices.
        """
        is_known = labels != UNKNOWN
        if not is_known.all():
            predicted, labels = predicted[is_known], labels[is_known]
        return cls(
            np.bincount(labels[predicted == labels], minlength=classes),
            np.bincount(predicted, minlength=classes),
            np.bincount(labels, minlength=classes),
        )

    @classmethod
    def of_confusion(cls, counts: np.ndarray) -> "ClassCounts":
        """Return the counts of a confusion matrix.

        Shape: counts (labels, predictions).
        """
        return cls(counts.diagonal(), counts.sum(0), counts.sum(1))

    @property
    def examples(self) -> int:
        return int(self.actual.sum())

    @property
    def precision(self) -> np.ndarray:
        """Precision of each class; 0 for a class that was never predicted."""
        return _ratio(self.hits, self.predicted)

    @property
    def recall(self) -> np.ndarray:
        """Recall of each class; 0 for a class without examples."""
        return _ratio(self.hits, self.actual)

    @property
    def f1(self) -> np.ndarray:
        """F1 of each class; 0 for a class that is neither predicted nor present."""
        return _ratio(2 * self.hits, self.predicted + self.actual)


def accuracy(counts: ClassCounts) -> float:
    """Accuracy in percent, like all metrics here."""
    return 100 * float(counts.hits.sum()) / max(1, counts.examples)


def macro_f1(counts: ClassCounts) -> float:
    """Mean F1 over the classes that were predicted or present at least once."""
    is_used = counts.predicted + counts.actual > 0
    return 100 * float(counts.f1[is_used].mean()) if is_used.any() else 0.0


def weighted_f1(counts: ClassCounts) -> float:
    """Mean F1 over all classes, weighted by their number of examples."""
    return 100 * float(counts.f1 @ counts.actual) / max(1, counts.examples)


def matthews(counts: ClassCounts) -> float:
    """Matthews correlation of predictions and labels; 0 if one of them is constant."""
    examples = counts.examples
    predicted, actual = counts.predicted.astype(np.float64), counts.actual.astype(np.float64)
    covariance = float(counts.hits.sum()) * examples - float(predicted @ actual)
    variances = (examples**2 - float(predicted @ predicted)) * (examples**2 - float(actual @ actual))
    return 100 * covariance / float(np.sqrt(variances)) if variances > 0 else 0.0


def class_f1(counts: ClassCounts, positive: int) -> float:
    """F1 of the positive class for two classes, macro F1 for more."""
    return 100 * float(counts.f1[positive]) if len(counts.actual) == 2 else macro_f1(counts)


CLASS_METRICS = ("accuracy", "f1", "macro_f1", "weighted_f1", "matthews")


def class_metric(metric: str, counts: ClassCounts, positive: int = 1) -> float:
    """Compute one of CLASS_METRICS."""
    if metric == "f1":
        return class_f1(counts, positive)
    compute = {"accuracy": accuracy, "macro_f1": macro_f1, "weighted_f1": weighted_f1, "matthews": matthews}
    return compute[metric](counts)


def evaluate_classes(
    predicted: np.ndarray, labels: np.ndarray, classes: int, metric: str | None, positive: int = 1
) -> Evaluation:
    """Compute the metrics of predicted classes; the default main metric is accuracy.

    `positive` is the class whose F1 is reported as "f1" if there are two.
    Shape: predicted and labels (examples,), class indices.
    """
    main = main_metric(metric, CLASS_METRICS)
    counts = ClassCounts.of(predicted, labels, classes)
    # for more than two classes "f1" already is the macro mean
    names = [name for name in CLASS_METRICS if name != "macro_f1" or classes == 2 or main == name]
    metrics = {name: class_metric(name, counts, positive) for name in names}

    def measure(chosen: np.ndarray) -> float:
        return class_metric(main, ClassCounts.of(predicted[chosen], labels[chosen], classes), positive)

    return Evaluation(main, metrics, measure)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    ratios: np.ndarray = numerator / np.maximum(denominator, 1)
    return ratios
