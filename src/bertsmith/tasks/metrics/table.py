"""A judgement from a table of metrics: each a function of arrays with a row for every example."""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from bertsmith.errors import InputError, nearest
from bertsmith.tasks.base import Judgement


def main_metric(asked: str | None, allowed: Collection[str]) -> str:
    """The name of the main figure: what was asked for, or the first that is allowed."""
    main = asked or next(iter(allowed))
    if main not in allowed:
        raise InputError(f"task.metric is {main!r}; {nearest(main, allowed)}")
    return main


def table_judgement(
    metrics: Mapping[str, Callable[..., float]], arrays: tuple[np.ndarray, ...], asked: str | None
) -> Judgement:
    """All figures of a table, the main one being what was asked for, or else the first.

    Shape: arrays (examples, …) each.
    """
    main = main_metric(asked, metrics)
    figures = {name: compute(*arrays) for name, compute in metrics.items()}
    return Judgement(main, figures, lambda chosen: metrics[main](*(array[chosen] for array in arrays)))
