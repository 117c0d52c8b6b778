"""A evaluation from a table of metrics: each a function of arrays with a row for every example."""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from bertsmith.errors import InputError, nearest
from bertsmith.tasks.base import Evaluation


def main_metric(asked: str | None, allowed: Collection[str]) -> str:
    """The name of the main figure: what was asked for, or the first that is allowed."""
    main = asked or next(iter(allowed))
    if main not in allowed:
        raise InputError(f"task.metric is {main!r}; {nearest(main, allowed)}")
    return main


def evaluate_metrics(
    metrics: Mapping[str, Callable[..., float]], arrays: tuple[np.ndarray, ...], asked: str | None
) -> Evaluation:
    """Evaluate all metrics of a table; the main one is the requested one, or else the first.

    Shape: arrays (examples, …) each.
    """
    main = main_metric(asked, metrics)
    values = {name: compute(*arrays) for name, compute in metrics.items()}
    return Evaluation(main, values, lambda chosen: metrics[main](*(array[chosen] for array in arrays)))


LEVEL = 0.95
RESAMPLES = 1000


def confidence_interval(
    evaluation: Evaluation, examples: int, *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float] | None:
    """The percentile bootstrap interval of the main figure: between which values it lies for the share `level` of as
    many examples drawn anew from those there are.

    None where no draw has a figure. It says nothing of how much another seed of the training would change.
    """
    measure = evaluation.measure
    if examples == 0 or measure is None:
        return None
    generator = np.random.default_rng(seed)
    drawn = np.array([measure(generator.integers(examples, size=examples)) for _ in range(resamples)])
    # a correlation is not defined where a draw happens to hold one value only
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return None
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
