"""How good answers are that are one of several classes.

All metrics come from three counts per class, in double precision: of a thousand resamples each must cost microseconds.
The tests compare them with scikit-learn.
"""

from dataclasses import dataclass

import numpy as np

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import main_metric

UNKNOWN = -1  # the class of an example of which nobody knows what is right: it counts nowhere


@dataclass(frozen=True)
class ClassCounts:
    """How often each class was right, was said, and both.

    Shape: all (classes,).
    """

    hits: np.ndarray
    said: np.ndarray
    right: np.ndarray

    @classmethod
    def of(cls, said: np.ndarray, right: np.ndarray, classes: int) -> "ClassCounts":
        """The counts of answers; examples whose right class is UNKNOWN are left out.

        Shape: said and right (examples,), the numbers of classes.
        """
        is_known = right != UNKNOWN
        if not is_known.all():
            said, right = said[is_known], right[is_known]
        return cls(
            np.bincount(right[said == right], minlength=classes),
            np.bincount(said, minlength=classes),
            np.bincount(right, minlength=classes),
        )

    @classmethod
    def of_confusion(cls, counts: np.ndarray) -> "ClassCounts":
        """The counts of a confusion matrix.

        Shape: counts (classes that were right, classes that were said).
        """
        return cls(counts.diagonal(), counts.sum(0), counts.sum(1))

    @property
    def examples(self) -> int:
        return int(self.right.sum())

    @property
    def precision(self) -> np.ndarray:
        """Of each class, the share of its answers that was right; 0 where it was never said."""
        return _ratio(self.hits, self.said)

    @property
    def recall(self) -> np.ndarray:
        """Of each class, the share of its examples that was found; 0 where there are none."""
        return _ratio(self.hits, self.right)

    @property
    def f1(self) -> np.ndarray:
        """Of each class, the harmonic mean of precision and recall; 0 where it is neither said nor right."""
        return _ratio(2 * self.hits, self.said + self.right)


def accuracy(counts: ClassCounts) -> float:
    """The share of answers that are right, in percent, as all metrics here."""
    return 100 * float(counts.hits.sum()) / max(1, counts.examples)


def macro_f1(counts: ClassCounts) -> float:
    """The mean of F1 over the classes that were said or right at least once."""
    is_there = counts.said + counts.right > 0
    return 100 * float(counts.f1[is_there].mean()) if is_there.any() else 0.0


def weighted_f1(counts: ClassCounts) -> float:
    """The mean of F1 over all classes, each as often as it was right."""
    return 100 * float(counts.f1 @ counts.right) / max(1, counts.examples)


def matthews(counts: ClassCounts) -> float:
    """The correlation of what was said with what was right; 0 where one of them never varies."""
    examples = counts.examples
    said, right = counts.said.astype(np.float64), counts.right.astype(np.float64)
    together = float(counts.hits.sum()) * examples - float(said @ right)
    spread = (examples**2 - float(said @ said)) * (examples**2 - float(right @ right))
    return 100 * together / float(np.sqrt(spread)) if spread > 0 else 0.0


def class_f1(counts: ClassCounts, positive: int) -> float:
    """F1 of one class where there are two; of more, the mean over all."""
    return 100 * float(counts.f1[positive]) if len(counts.right) == 2 else macro_f1(counts)


CLASS_METRICS = ("accuracy", "f1", "macro_f1", "weighted_f1", "matthews")


def class_figure(metric: str, counts: ClassCounts, positive: int = 1) -> float:
    """One of CLASS_METRICS."""
    if metric == "f1":
        return class_f1(counts, positive)
    compute = {"accuracy": accuracy, "macro_f1": macro_f1, "weighted_f1": weighted_f1, "matthews": matthews}
    return compute[metric](counts)


def evaluate_classes(
    said: np.ndarray, right: np.ndarray, classes: int, metric: str | None, positive: int = 1
) -> Evaluation:
    """The metrics of some answers; the main one is accuracy unless told otherwise.

    `positive` is the class whose F1 is "f1" where there are two.
    Shape: said and right (examples,), the numbers of classes.
    """
    main = main_metric(metric, CLASS_METRICS)
    counts = ClassCounts.of(said, right, classes)
    # of more than two classes "f1" is the macro mean already
    names = [name for name in CLASS_METRICS if name != "macro_f1" or classes == 2 or main == name]
    metrics = {name: class_figure(name, counts, positive) for name in names}

    def measure(chosen: np.ndarray) -> float:
        return class_figure(main, ClassCounts.of(said[chosen], right[chosen], classes), positive)

    return Evaluation(main, metrics, measure)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    shares: np.ndarray = part / np.maximum(whole, 1)
    return shares
