"""Statistics of small experiments, rows × seeds: block fit, simultaneous intervals, trend and slope tests.

A seed is a block: all rows of one seed share data order and masks, so differences between rows are paired. Quantiles
and p-values are computed by quadrature or enumeration, without simulation; the tests compare them with scipy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import permutations

import numpy as np
import torch

Values = Mapping[str, Mapping[int, float]]
"""One metric: its value by row and seed."""
LEVEL = 0.95
UNEQUAL_SPREAD = 0.05
"""p-value of Cochran's test below which rows do not share one standard deviation."""
OPTIMUM_DRAWS = 10_000


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; low and high are None without degrees of freedom."""

    mean: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def around(cls, mean: float, error: float, factor: float | None) -> "Interval":
        """Return mean ± factor · error."""
        return cls(mean) if factor is None else cls(mean, mean - factor * error, mean + factor * error)

    def shifted(self, offset: float) -> "Interval":
        """Return the interval moved by an offset."""
        ends = (None if end is None else end + offset for end in (self.low, self.high))
        return Interval(self.mean + offset, *ends)


@dataclass(frozen=True)
class BlockFit:
    """Least-squares fit of value = row + seed + residual."""

    rows: tuple[str, ...]
    effects: np.ndarray
    """(rows,): level of every row, up to one common constant."""
    covariance: np.ndarray
    """(rows, rows): covariance of the effects for a residual variance of 1."""
    residual_std: float
    degrees: int

    def difference(self, row: str, other: str, factor: float | None) -> Interval:
        """Return row − other; `factor` multiplies the standard error."""
        contrast = np.zeros(len(self.rows))
        contrast[self.rows.index(row)] += 1
        contrast[self.rows.index(other)] -= 1
        error = self.residual_std * math.sqrt(max(0.0, float(contrast @ self.covariance @ contrast)))
        return Interval.around(float(contrast @ self.effects), error, factor)


def fit_blocks(values: Values) -> BlockFit:
    """Fit row and seed effects; rows may lack seeds."""
    rows = tuple(values)
    seeds = sorted({seed for row in values.values() for seed in row})
    cells = [(index, seeds.index(seed), value) for index, row in enumerate(rows) for seed, value in values[row].items()]
    design = np.zeros((len(cells), len(rows) + len(seeds)))
    for number, (row_index, seed_index, _) in enumerate(cells):
        design[number, row_index] = design[number, len(rows) + seed_index] = 1
    observed = np.array([value for _, _, value in cells])
    inverse = np.linalg.pinv(design.T @ design)
    solution = inverse @ design.T @ observed
    residuals = observed - design @ solution
    degrees = len(cells) - int(np.linalg.matrix_rank(design))
    return BlockFit(
        rows=rows,
        effects=solution[: len(rows)],
        covariance=inverse[: len(rows), : len(rows)],
        residual_std=math.sqrt(float(residuals @ residuals) / degrees) if degrees else 0.0,
        degrees=degrees,
    )


def paired_difference(values: Values, row: str, other: str, comparisons: int = 1) -> Interval:
    """Return row − other from the seeds that both have, with a standard deviation of their own (Šidák intervals)."""
    seeds = values[row].keys() & values[other].keys()
    return mean_interval([values[row][seed] - values[other][seed] for seed in sorted(seeds)], comparisons)


def mean_interval(sample: Sequence[float], comparisons: int = 1) -> Interval:
    """Return the mean with its t interval, simultaneous over `comparisons` intervals (Šidák)."""
    mean, count = math.fsum(sample) / len(sample), len(sample)
    if count < 2:
        return Interval(mean)
    error = float(np.std(sample, ddof=1)) / math.sqrt(count)
    return Interval.around(mean, error, sidak_factor(comparisons, count - 1))


@cache
def dunnett_factor(comparisons: int, degrees: int, level: float = LEVEL) -> float | None:
    """Return Dunnett's two-sided factor for several rows against one reference; Student's t for one comparison.

    P(max |Tᵢ| ≤ d) = ∫ f(s) ∫ φ(z) [Φ(z + √2 d s) − Φ(z − √2 d s)]ᵏ dz ds, where s² is χ²/degrees (Dunnett 1955).
    """
    if degrees < 1:
        return None
    nodes, weights = _legendre(160)
    top = math.sqrt(1 + 9 * math.sqrt(2 / degrees) + 40 / degrees)
    scales = (nodes + 1) * top / 2
    density = np.exp((degrees - 1) * np.log(scales) - degrees * scales**2 / 2)
    scale_weights = weights * density / np.sum(weights * density)
    centres = nodes * 8.0
    centre_weights = weights * np.exp(-(centres**2) / 2)
    centre_weights /= centre_weights.sum()

    def coverage(factor: float) -> float:
        reach = math.sqrt(2) * factor * scales[:, None]  # (scales, 1)
        inside = _normal_cdf(centres + reach) - _normal_cdf(centres - reach)  # (scales, centres)
        return float(scale_weights @ inside**comparisons @ centre_weights)

    return _bisect(coverage, level, 0.0, 200.0)


def sidak_factor(comparisons: int, degrees: int, level: float = LEVEL) -> float | None:
    """Return the two-sided t factor of `comparisons` simultaneous intervals with any correlation (Šidák 1967)."""
    return dunnett_factor(1, degrees, level ** (1 / comparisons))


def cochran_test(values: Values) -> float:
    """Return the p-value of one row with a larger variance than the others (Cochran's C, Bonferroni bound).

    Seed effects are medians over rows, so that the noise of one row does not enter the others.
    """
    rows = {row: np.array(list(seeds.values())) for row, seeds in values.items() if len(seeds) > 1}
    if len(rows) < 3:
        return 1.0  # two rows cannot tell whose noise their difference is
    levels = {row: float(np.median(row_values)) for row, row_values in rows.items()}
    seeds = {seed for row in rows for seed in values[row]}
    effects = {
        seed: float(np.median([values[row][seed] - levels[row] for row in rows if seed in values[row]]))
        for seed in seeds
    }
    residuals = [np.array([value - effects[seed] for seed, value in values[row].items()]) for row in rows]
    variances = np.array([np.var(row, ddof=1) for row in residuals])
    if not variances.sum():
        return 1.0
    share = float(variances.max() / variances.sum())
    if share == 1.0:
        return 0.0
    count, degrees = len(rows), min(map(len, residuals)) - 1
    ratio = share * (count - 1) / (1 - share)
    return min(1.0, count * f_tail(ratio, degrees, (count - 1) * degrees))


def f_tail(value: float, numerator: int, denominator: int) -> float:
    """Return P(F > value) of the F distribution."""
    # with x = sin²θ the incomplete beta integral has a smooth integrand
    share = denominator / (denominator + numerator * value)
    nodes, weights = _legendre(160)

    def integral(end: float) -> float:
        angles = (nodes + 1) * end / 2
        return float(weights @ (np.sin(angles) ** (denominator - 1) * np.cos(angles) ** (numerator - 1))) * end

    return integral(math.asin(math.sqrt(share))) / integral(math.pi / 2)


def page_test(values: Values, order: Sequence[str]) -> float:
    """Return the exact one-sided p-value of Page's trend test; values rise along `order`, seeds are the blocks."""
    seeds = sorted(set.intersection(*(set(values[row]) for row in order)))
    places = np.arange(1, len(order) + 1)
    observed = sum(float(places @ _ranks([values[row][seed] for row in order])) for seed in seeds)
    sums = [int(places @ np.array(ranks)) for ranks in permutations(range(1, len(order) + 1))]
    one_block = np.bincount(sums) / len(sums)
    distribution = reduce(np.convolve, [one_block] * len(seeds))
    return float(distribution[math.ceil(observed - 1e-9) :].sum())


def kendall_tau(levels: Sequence[float]) -> float:
    """Return Kendall's τ between a sequence of levels and its order: 1 if it rises throughout."""
    pairs = [(first, second) for first in range(len(levels)) for second in range(first + 1, len(levels))]
    return sum(float(np.sign(levels[second] - levels[first])) for first, second in pairs) / len(pairs)


def log_slope(values: Values, positions: Mapping[str, float], log_values: bool = False) -> Interval:
    """Return the slope of the values against log(position), fitted for every seed; `log_values` for a power law."""
    seeds = sorted(set.intersection(*(set(values[row]) for row in positions)))
    logs = np.log(list(positions.values()))
    slopes = []
    for seed in seeds:
        heights = np.array([values[row][seed] for row in positions])
        slopes.append(float(np.polyfit(logs, np.log(heights) if log_values else heights, 1)[0]))
    return mean_interval(slopes)


def optimum_share(values: Values, rows: Sequence[str], best: str) -> float:
    """Return the share of draws, means with normal noise of the fit's standard error, whose maximum is at `best`."""
    fit = fit_blocks({row: values[row] for row in rows})
    counts = np.array([len(values[row]) for row in rows])
    noise = np.random.default_rng(0).standard_normal((OPTIMUM_DRAWS, len(rows))) * fit.residual_std / np.sqrt(counts)
    return float(np.mean((fit.effects + noise).argmax(axis=1) == list(rows).index(best)))


@cache
def _legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes and weights of Gauss-Legendre quadrature on [-1, 1]."""
    return np.polynomial.legendre.leggauss(count)


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return ranks from 1; equal values share their mean rank."""
    array = np.array(values)
    return np.array([(array < value).sum() + ((array == value).sum() + 1) / 2 for value in array])


def _normal_cdf(values: np.ndarray) -> np.ndarray:
    return torch.special.ndtr(torch.from_numpy(values)).numpy()


def _bisect(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2
