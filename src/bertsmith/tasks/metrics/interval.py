"""How far a figure could be from its true value for the choice of examples alone."""

import numpy as np

from bertsmith.tasks.base import Judgement

LEVEL = 0.95
RESAMPLES = 1000


def confidence_interval(
    judgement: Judgement, examples: int, *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float] | None:
    """The percentile bootstrap interval of the main figure: between which values it lies for the share `level` of as
    many examples drawn anew from those there are.

    None where no draw has a figure. It says nothing of how much another seed of the training would change.
    """
    if examples == 0:
        return None
    generator = np.random.default_rng(seed)
    drawn = np.array([judgement.measure(generator.integers(examples, size=examples)) for _ in range(resamples)])
    # a correlation is not defined where a draw happens to hold one value only
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return None
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
