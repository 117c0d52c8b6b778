"""Quantiles and tests against scipy, and coverage of the intervals on simulated experiments."""

import numpy as np
import pytest
from scipy import stats

from bertsmith.reproduction.statistics import (
    cochran_test,
    dunnett_factor,
    f_tail,
    fit_blocks,
    kendall_tau,
    log_slope,
    mean_interval,
    optimum_share,
    page_test,
    paired_difference,
    sidak_factor,
)


@pytest.mark.parametrize("degrees", [1, 2, 4, 10, 40])
def test_one_comparison_has_the_factor_of_students_t(degrees: int) -> None:
    assert dunnett_factor(1, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-6)


@pytest.mark.parametrize(("comparisons", "degrees"), [(2, 2), (5, 10), (9, 30)])
def test_dunnett_factor_has_the_joint_level(comparisons: int, degrees: int) -> None:
    factor = dunnett_factor(comparisons, degrees)
    assert factor is not None
    correlation = 0.5 + 0.5 * np.eye(comparisons)
    joint = stats.multivariate_t(shape=correlation, df=degrees, seed=0)
    ends = np.full(comparisons, factor)
    assert joint.cdf(ends, lower_limit=-ends) == pytest.approx(0.95, abs=2e-3)


def test_sidak_factor_has_the_joint_level() -> None:
    assert sidak_factor(4, 12) == pytest.approx(stats.t.ppf(0.5 + 0.95**0.25 / 2, 12), rel=1e-6)
    assert sidak_factor(2, 0) is None


def test_f_tail_agrees_with_scipy() -> None:
    for value, numerator, denominator in ((3.1, 4, 10), (2.0, 1, 3), (0.2, 5, 2)):
        assert f_tail(value, numerator, denominator) == pytest.approx(stats.f.sf(value, numerator, denominator))


def test_cochran_test_finds_a_noisy_row_and_seldom_another() -> None:
    generator, found = np.random.default_rng(0), 0
    for _ in range(400):
        found += cochran_test(simulate(generator, [0.0] * 6, seeds=3)) < 0.05
    assert found / 400 < 0.1
    noisy = simulate(generator, [0.0] * 6, seeds=3)
    noisy["row-2"] = {0: -90.0, 1: 40.0, 2: 120.0}
    assert cochran_test(noisy) < 0.01


def test_page_test_agrees_with_scipy() -> None:
    values = simulate(np.random.default_rng(1), effects=[0.0, 0.4, 0.8, 1.2], seeds=4)
    blocks = [[values[row][seed] for row in values] for seed in range(4)]
    assert page_test(values, list(values)) == pytest.approx(stats.page_trend_test(blocks, method="exact").pvalue)


def simulate(
    generator: np.random.Generator, effects: list[float], seeds: int, std: float = 1.0, seed_std: float = 5.0
) -> dict[str, dict[int, float]]:
    """Return an experiment whose seeds differ by much more than the noise."""
    blocks = generator.normal(size=seeds) * seed_std
    return {
        f"row-{index}": {seed: float(effect + blocks[seed] + std * generator.normal()) for seed in range(seeds)}
        for index, effect in enumerate(effects)
    }


def test_simultaneous_intervals_cover_the_true_differences() -> None:
    generator, effects, inside = np.random.default_rng(2), [0.0, 0.3, -0.5, 2.0, 0.0], 0
    for _ in range(1000):
        fit = fit_blocks(simulate(generator, effects, seeds=3))
        factor = dunnett_factor(4, fit.degrees)
        differences = [fit.difference(f"row-{index}", "row-0", factor) for index in range(1, 5)]
        inside += all(one.low <= effect <= one.high for one, effect in zip(differences, effects[1:], strict=True))
    assert 0.93 < inside / 1000 < 0.97


def test_paired_intervals_cover_the_true_difference() -> None:
    generator, inside = np.random.default_rng(3), 0
    for _ in range(1000):
        one = paired_difference(simulate(generator, [0.7, 0.0], seeds=5), "row-0", "row-1")
        inside += one.low <= 0.7 <= one.high
    assert 0.93 < inside / 1000 < 0.97


def test_fit_handles_missing_seeds_and_finds_exact_effects() -> None:
    values = {"a": {0: 1.0, 1: 11.0, 2: 21.0}, "b": {0: 3.0, 2: 23.0}}
    fit = fit_blocks(values)
    assert fit.degrees == 1
    difference = fit.difference("b", "a", 2.0)
    assert (difference.mean, difference.low, difference.high) == pytest.approx((2.0, 2.0, 2.0))


def test_one_seed_has_no_interval() -> None:
    fit = fit_blocks({"a": {0: 1.0}, "b": {0: 2.0}})
    assert fit.difference("b", "a", dunnett_factor(1, fit.degrees)).low is None
    assert mean_interval([1.0]).low is None


def test_slope_optimum_and_rank_correlation() -> None:
    positions = {"a": 2.0, "b": 4.0, "c": 8.0}
    values = {row: {seed: (10 + seed) / x for seed in range(3)} for row, x in positions.items()}
    assert log_slope(values, positions, log_values=True).mean == pytest.approx(-1.0)
    assert kendall_tau([3.0, 2.0, 1.0]) == -1.0
    clear = {"a": {0: 1.0, 1: 1.1}, "b": {0: 3.0, 1: 3.1}, "c": {0: 2.0, 1: 2.1}}
    assert optimum_share(clear, list(clear), "b") == 1.0
