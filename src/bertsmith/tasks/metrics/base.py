"""Evaluate tables of metrics and compute bootstrap confidence intervals."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from bertsmith.errors import InputError, nearest
from bertsmith.tasks.base import Evaluation


def main_metric(metric: str | None, allowed: Collection[str]) -> str:
    """Return the name of the main metric: `metric`, or the first allowed one by default."""
    main = metric or next(iter(allowed))
    if main not in allowed:
        raise InputError(f"task.metric is {main!r}; {nearest(main, allowed)}")
    return main


def evaluate_metrics(
    metrics: Mapping[str, Callable[..., float]], arrays: tuple[np.ndarray, ...], metric: str | None
) -> Evaluation:
    """Apply all metric functions to the arrays; the main metric is `metric`, or the first one.

    Shape: arrays (examples, …) each.
    """
    main = main_metric(metric, metrics)
    values = {name: compute(*arrays) for name, compute in metrics.items()}
    return Evaluation(main, values, lambda chosen: metrics[main](*(array[chosen] for array in arrays)))


LEVEL = 0.95
RESAMPLES = 1000


def confidence_interval(
    evaluation: Evaluation, examples: int, *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the main metric over examples; None if it is undefined.

    It does not include the variance between training seeds.
    """
    measure = evaluation.measure
    if examples == 0 or measure is None:
        return None
    generator = np.random.default_rng(seed)
    values = np.array([measure(generator.integers(examples, size=examples)) for _ in range(resamples)])
    # a correlation is undefined on a resample with a single distinct value
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def loss_bounds(
    full: Evaluation,
    others: Sequence[Evaluation],
    examples: int,
    *,
    level: float,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> list[float]:
    """Return upper confidence bounds of how much lower the others score than `full`; with probability `level` all hold.

    A paired bootstrap: all systems are scored on the same resampled examples. Because the bounds hold jointly, that of
    a system that was picked for its bound or score holds as well. bound = loss + c · deviation of the loss, where c is
    the `level` quantile of the largest (loss - resampled loss) / deviation of all systems.
    """
    if not others:
        return []
    systems = [full, *others]
    measures = [system.measure for system in systems if system.measure is not None]
    if len(measures) < len(systems):
        raise ValueError(f"{full.metric} has no measure of resampled examples")
    generator = np.random.default_rng(seed)
    drawn = [generator.integers(examples, size=examples) for _ in range(resamples)]
    scores = np.array([[measure(chosen) for measure in measures] for chosen in drawn])  # (resamples, systems)
    resampled = scores[:, :1] - scores[:, 1:]
    losses = np.array([full.score - other.score for other in others])
    deviations = resampled.std(axis=0)
    # a system with the answers of `full` has loss 0 on every resample
    ratios = (losses - resampled) / np.where(deviations > 0, deviations, 1)
    factor = np.quantile(ratios.max(axis=1), level)
    return [float(each) for each in losses + factor * deviations]
