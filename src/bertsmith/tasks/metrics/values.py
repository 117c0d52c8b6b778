"""How good answers are that are numbers."""

from dataclasses import replace

import numpy as np

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import evaluate_metrics


def pearson(said: np.ndarray, right: np.ndarray) -> float:
    """The correlation in percent; 0 where either side is one number over and over."""
    if len(said) == 0 or said.min() == said.max() or right.min() == right.max():
        return 0.0
    first, second = (_standard(values.astype(np.float64)) for values in (said, right))
    return 100 * float((first * second).mean())


def spearman(said: np.ndarray, right: np.ndarray) -> float:
    """The correlation of the ranks in percent; equal numbers share the mean of their ranks."""
    return pearson(ranks(said), ranks(right))


def squared_error(said: np.ndarray, right: np.ndarray) -> float:
    """The mean squared error, in the squares of the answers' own unit."""
    return float(((said.astype(np.float64) - right) ** 2).mean())


VALUE_METRICS = {"spearman": spearman, "pearson": pearson}


def evaluate_values(said: np.ndarray, right: np.ndarray, metric: str | None) -> Evaluation:
    """The metrics of some answers; the main one is Spearman's correlation unless told otherwise.

    The mean squared error is among them and cannot be the main one: less of it is better.
    Shape: said and right (examples,).
    """
    evaluation = evaluate_metrics(VALUE_METRICS, (said, right), metric)
    return replace(evaluation, metrics={**evaluation.metrics, "mse": squared_error(said, right)})


def ranks(values: np.ndarray) -> np.ndarray:
    """The place of every number among all of them by size, from 1; equal ones share the mean of theirs.

    Shape: (values,) -> (values,).
    """
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: np.ndarray = (last - (counts - 1) / 2)[group]
    return shared


def _standard(values: np.ndarray) -> np.ndarray:
    centred = values - values.mean()
    standard: np.ndarray = centred / np.sqrt((centred**2).mean())
    return standard
