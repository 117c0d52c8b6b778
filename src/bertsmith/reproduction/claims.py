"""Claims about the rows of a table, and the rules by which measured values decide them.

Values are turned so that + is better in the metric's sense. A difference holds if its interval lies above 0, is
reversed if it lies below 0, and is within noise otherwise; "small" means below the smallest difference worth naming.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Literal

from pydantic import Field, model_validator

from bertsmith.reproduction.statistics import (
    UNEQUAL_SPREAD,
    Interval,
    Values,
    cochran_test,
    dunnett_factor,
    fit_blocks,
    kendall_tau,
    log_slope,
    mean_interval,
    optimum_share,
    page_test,
    paired_difference,
    sidak_factor,
)
from bertsmith.settings import Record

TREND_P = 0.05


class Verdict(StrEnum):
    """Outcome of a claim."""

    HOLDS = "holds"
    SMALL = "holds, small"
    NOISE = "within noise"
    REVERSED = "reversed"
    UNTESTABLE = "not testable"


class MetricSpec(Record):
    """A figure of every row: where it is found, and which differences matter."""

    run: str
    """Name of the run that measures it."""
    value: str
    """Path in the run's result.json: score, held_out.masked_tokens_loss, grid[width=0.5,depth=1].score."""
    label: str
    better: Literal["higher", "lower"] = "higher"
    sesoi: float = Field(default=0.0, ge=0)
    """Smallest effect size of interest: a significant difference below it is reported as small."""
    digits: int = Field(default=2, ge=0, le=6)
    exact: bool = False
    """The value does not depend on the seed (a count, an exponent by construction): no interval is needed."""
    rows: tuple[str, ...] | None = None
    """Rows that have it; None for all."""

    @property
    def sign(self) -> float:
        return 1.0 if self.better == "higher" else -1.0


@dataclass(frozen=True)
class Comparison:
    """One tested difference, turned so that + supports the claim."""

    name: str
    interval: Interval
    verdict: Verdict | None
    """None without an interval: too few seeds."""
    is_equal: bool = False
    """Whether the interval lies inside ± 2 sesoi."""


@dataclass(frozen=True)
class Decision:
    """The verdict of a claim with the comparisons behind it; None if values are missing."""

    verdict: Verdict | None
    comparisons: tuple[Comparison, ...] = ()
    note: str = ""


class Claim(Record):
    """A claim about one metric."""

    kind: str
    text: str
    """The claim in words."""
    metric: str
    expected: str = ""
    """A guess made before the runs, kept beside the result."""

    @property
    def rows(self) -> tuple[str, ...]:
        """Rows that the claim is about."""
        raise NotImplementedError

    def decide(self, values: Values, metric: MetricSpec) -> Decision:
        """Decide the claim; `values` has all rows of the metric that passed its gates."""
        raise NotImplementedError


class BetterClaim(Claim):
    """One row is better than each of several others, by more than a margin."""

    kind: Literal["better"]
    better: str
    than: tuple[str, ...] = Field(min_length=1)
    margin: float = 0.0
    """Required difference; a negative margin claims "at most that much worse"."""

    @property
    def rows(self) -> tuple[str, ...]:
        return (self.better, *self.than)

    def decide(self, values: Values, metric: MetricSpec) -> Decision:
        pairs = [(self.better, other) for other in self.than]
        comparisons, note = compare_pairs(values, metric, pairs, shares_reference=True, margin=self.margin)
        return Decision(_joint([one.verdict for one in comparisons]), comparisons, note)


class OrderClaim(Claim):
    """Rows from best to worst: no adjacent pair is reversed, and Page's trend test over seeds has p < 0.05."""

    kind: Literal["order"]
    order: tuple[str, ...] = Field(min_length=3, max_length=8)

    @property
    def rows(self) -> tuple[str, ...]:
        return self.order

    def decide(self, values: Values, metric: MetricSpec) -> Decision:
        comparisons, note = compare_pairs(values, metric, list(pairwise(self.order)))
        if any(one.verdict is None for one in comparisons):
            return Decision(None, comparisons, note)
        turned = _turned(values, metric)
        rising = self.order[::-1]
        p_value = page_test(turned, rising)
        levels = dict(zip(turned, fit_blocks(turned).effects, strict=True))
        tau = kendall_tau([levels[row] for row in rising])
        note = f"Page's trend test p = {p_value:.3f}, Kendall's τ = {tau:.2f}" + (f"; {note}" if note else "")
        if any(one.verdict is Verdict.REVERSED for one in comparisons):
            return Decision(Verdict.REVERSED, comparisons, note)
        if p_value >= TREND_P:
            return Decision(Verdict.NOISE, comparisons, note)
        is_small = levels[self.order[0]] - levels[self.order[-1]] < metric.sesoi
        return Decision(Verdict.SMALL if is_small else Verdict.HOLDS, comparisons, note)


class EqualClaim(Claim):
    """Two rows differ by less than a bound."""

    kind: Literal["equal"]
    equal: tuple[str, str]
    within: float | None = Field(default=None, gt=0)
    """Bound of the difference; None for 2 sesoi."""

    @property
    def rows(self) -> tuple[str, ...]:
        return self.equal

    def decide(self, values: Values, metric: MetricSpec) -> Decision:
        (comparison,), note = compare_pairs(values, metric, [self.equal])
        bound = 2 * metric.sesoi if self.within is None else self.within
        verdict = _inside(comparison.interval, -bound, bound)
        name = f"{self.equal[0]} − {self.equal[1]}, bound ± {bound:g}"
        return Decision(verdict, (replace(comparison, name=name, verdict=verdict),), note)


class CurveClaim(Claim):
    """The metric against the position x of the rows: the slope of a line in log x."""

    kind: Literal["curve"]
    curve: tuple[str, ...] = Field(min_length=3)
    x: tuple[float, ...]
    """Position of every row."""
    trend: Literal["improves", "worsens", "flat"] | None = None
    slope: float | None = None
    """Exponent of a power law, instead of a trend."""
    within: float | None = Field(default=None, gt=0)
    """Bound of the slope around the exponent, or around 0 for a flat trend."""
    optimum: str | None = None
    """ExperimentRow that has the best value; the share of draws in which it has is reported."""

    @model_validator(mode="after")
    def _check(self) -> "CurveClaim":
        if len(self.x) != len(self.curve):
            raise ValueError(f"x has {len(self.x)} positions for {len(self.curve)} rows of curve")
        if (self.trend is None) == (self.slope is None):
            raise ValueError("give one of trend and slope")
        if self.within is None and (self.slope is not None or self.trend == "flat"):
            raise ValueError("within is not given; a slope and a flat trend need it")
        if self.optimum is not None and self.optimum not in self.curve:
            raise ValueError(f"optimum is {self.optimum!r}, which is not a row of curve")
        return self

    @property
    def rows(self) -> tuple[str, ...]:
        return self.curve

    def decide(self, values: Values, metric: MetricSpec) -> Decision:
        positions = dict(zip(self.curve, self.x, strict=True))
        turned = _turned(values, metric)
        if self.slope is not None:
            interval = log_slope(values, positions, log_values=True)
            name, target = f"slope in log–log, claimed {self.slope:g}", self.slope
        else:
            interval = log_slope(turned, positions)
            interval = _negated(interval) if self.trend == "worsens" else interval
            name, target = f"slope in log x, claimed: {self.trend}", 0.0
        if self.within is None:
            verdict = _sign_verdict(interval, 0.0)
        else:
            verdict = _inside(interval, target - self.within, target + self.within)
        note = ""
        if self.optimum is not None:
            note = f"best at {self.optimum} in {optimum_share(turned, self.curve, self.optimum):.0%} of the draws"
        return Decision(verdict, (Comparison(name, interval, verdict),), note)


class ValueClaim(Claim):
    """The value of one row lies in a range."""

    kind: Literal["value"]
    row: str
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _check(self) -> "ValueClaim":
        if self.at_least is None and self.at_most is None:
            raise ValueError("give at_least, at_most or both")
        return self

    @property
    def rows(self) -> tuple[str, ...]:
        return (self.row,)

    def decide(self, values: Values, metric: MetricSpec) -> Decision:
        sample = list(values[self.row].values())
        interval = Interval(sample[0], sample[0], sample[0]) if metric.exact else mean_interval(sample)
        low = float("-inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        verdict = _inside(interval, low, high)
        bounds = [f"≥ {low:g}"] * (self.at_least is not None) + [f"≤ {high:g}"] * (self.at_most is not None)
        return Decision(verdict, (Comparison(f"{self.row} {' and '.join(bounds)}", interval, verdict),))


CLAIMS: dict[str, type[Claim]] = {
    "better": BetterClaim,
    "order": OrderClaim,
    "equal": EqualClaim,
    "curve": CurveClaim,
    "value": ValueClaim,
}


def compare_pairs(
    values: Values,
    metric: MetricSpec,
    pairs: Sequence[tuple[str, str]],
    *,
    shares_reference: bool = False,
    margin: float = 0.0,
) -> tuple[tuple[Comparison, ...], str]:
    """Return the simultaneous comparisons first − second − margin, and a note on the intervals.

    The residual spread is pooled over all rows, unless Cochran's test rejects one common spread. Rows of exact metrics
    are compared without an interval.
    """
    turned = _turned(values, metric)
    fit, note = fit_blocks(turned), ""
    if metric.exact:
        differences = [fit.difference(first, second, 0.0) for first, second in pairs]
    elif cochran_test(turned) >= UNEQUAL_SPREAD:
        find_factor = dunnett_factor if shares_reference else sidak_factor
        factor = find_factor(len(pairs), fit.degrees)
        differences = [fit.difference(first, second, factor) for first, second in pairs]
    else:
        differences = [paired_difference(turned, first, second, len(pairs)) for first, second in pairs]
        note = "rows differ in their spread, so every pair has an interval of its own"
    comparisons = []
    for (first, second), difference in zip(pairs, differences, strict=True):
        interval = difference.shifted(-margin)
        name = f"{first} − {second}" + (f" − ({margin:g})" if margin else "")
        bound = 2 * metric.sesoi
        is_equal = difference.low is not None and difference.high is not None
        is_equal = is_equal and -bound < (difference.low or 0.0) and (difference.high or 0.0) < bound
        # against a margin the size of the excess does not matter
        verdict = _sign_verdict(interval, 0.0 if margin else metric.sesoi)
        comparisons.append(Comparison(name, interval, verdict, is_equal))
    return tuple(comparisons), note


def _turned(values: Values, metric: MetricSpec) -> Values:
    return {row: {seed: metric.sign * value for seed, value in seeds.items()} for row, seeds in values.items()}


def _sign_verdict(interval: Interval, sesoi: float) -> Verdict | None:
    if interval.low is None or interval.high is None:
        return None
    if interval.high < 0:
        return Verdict.REVERSED
    if interval.low <= 0:
        return Verdict.NOISE
    return Verdict.HOLDS if interval.mean >= sesoi else Verdict.SMALL


def _inside(interval: Interval, low: float, high: float) -> Verdict | None:
    """Return the verdict of "inside the range": holds inside, reversed outside, else within noise."""
    if interval.low is None or interval.high is None:
        return None
    if low <= interval.low and interval.high <= high:
        return Verdict.HOLDS
    return Verdict.REVERSED if interval.high < low or interval.low > high else Verdict.NOISE


def _joint(verdicts: Sequence[Verdict | None]) -> Verdict | None:
    """Return the verdict of all comparisons together: the worst one."""
    for verdict in (None, Verdict.REVERSED, Verdict.NOISE):
        if verdict in verdicts:
            return verdict
    return Verdict.HOLDS if Verdict.HOLDS in verdicts else Verdict.SMALL


def _negated(interval: Interval) -> Interval:
    low, high = (None if end is None else -end for end in (interval.high, interval.low))
    return Interval(-interval.mean, low, high)
