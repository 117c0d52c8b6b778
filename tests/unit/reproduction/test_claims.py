"""Every verdict of every kind of claim on values with known effects."""

import pytest

from bertsmith import InputError
from bertsmith.reproduction.claims import (
    BetterClaim,
    Claim,
    CurveClaim,
    EqualClaim,
    MetricSpec,
    OrderClaim,
    ValueClaim,
    Verdict,
)

SCORE = MetricSpec(run="run", value="score", label="score", sesoi=0.5)
LOSS = MetricSpec(run="run", value="loss", label="loss", better="lower", sesoi=0.5)
NOISE = ((0.00, 0.10, -0.10), (0.05, -0.05, 0.02), (-0.04, 0.06, 0.01), (0.03, -0.02, -0.06))


def values(**levels: float) -> dict[str, dict[int, float]]:
    """Return rows with these levels, a large effect of the seed and a little noise."""
    return {
        row: {seed: level + 10 * seed + NOISE[index % 4][seed] for seed in range(3)}
        for index, (row, level) in enumerate(levels.items())
    }


def verdict(claim: Claim, metric: MetricSpec = SCORE, **levels: float) -> Verdict | None:
    return claim.decide(values(**levels), metric).verdict


def better(*than: str, margin: float = 0.0) -> BetterClaim:
    return BetterClaim(kind="better", text="", metric="score", better="a", than=than, margin=margin)


@pytest.mark.parametrize(
    ("level", "expected"),
    [(2.0, Verdict.HOLDS), (0.4, Verdict.SMALL), (0.0, Verdict.NOISE), (-2.0, Verdict.REVERSED)],
)
def test_difference_decides_the_verdict(level: float, expected: Verdict) -> None:
    assert verdict(better("b"), a=level, b=0.0, c=0.0, d=1.0) is expected


def test_lower_is_better_for_a_loss() -> None:
    assert verdict(better("b"), LOSS, a=-2.0, b=0.0, c=0.0) is Verdict.HOLDS


def test_claim_about_several_rows_has_the_worst_verdict() -> None:
    assert verdict(better("b", "c", "d"), a=2.0, b=0.0, c=0.0, d=0.0) is Verdict.HOLDS
    assert verdict(better("b", "c", "d"), a=2.0, b=0.0, c=2.0, d=0.0) is Verdict.NOISE
    assert verdict(better("b", "c", "d"), a=2.0, b=0.0, c=2.0, d=4.0) is Verdict.REVERSED


def test_margin_allows_a_small_loss() -> None:
    assert verdict(better("b", margin=-1.0), a=-0.3, b=0.0, c=0.0) is Verdict.HOLDS
    assert verdict(better("b", margin=-1.0), a=-3.0, b=0.0, c=0.0) is Verdict.REVERSED


def test_within_noise_is_called_equal_inside_two_sesoi() -> None:
    (comparison,) = better("b").decide(values(a=0.0, b=0.0, c=1.0), SCORE).comparisons
    assert comparison.is_equal


def test_order_needs_the_trend_and_no_reversed_pair() -> None:
    claim = OrderClaim(kind="order", text="", metric="score", order=("a", "b", "c"))
    decision = claim.decide(values(a=4.0, b=2.0, c=0.0), SCORE)
    assert decision.verdict is Verdict.HOLDS
    assert "τ = 1.00" in decision.note
    assert verdict(claim, a=0.45, b=0.2, c=0.0) is Verdict.SMALL
    assert verdict(claim, a=0.0, b=0.0, c=0.0) is Verdict.NOISE
    assert verdict(claim, a=4.0, b=0.0, c=2.0) is Verdict.REVERSED


def test_equality_needs_the_whole_interval_inside_the_bound() -> None:
    claim = EqualClaim(kind="equal", text="", metric="score", equal=("a", "b"), within=0.5)
    assert verdict(claim, a=0.0, b=0.0, c=0.0) is Verdict.HOLDS
    assert verdict(claim, a=0.5, b=0.0, c=0.0) is Verdict.NOISE
    assert verdict(claim, a=3.0, b=0.0, c=0.0) is Verdict.REVERSED


def test_curve_tests_its_slope() -> None:
    rows = {"kind": "curve", "text": "", "metric": "score", "curve": ("a", "b", "c"), "x": (1.0, 2.0, 4.0)}
    rising = CurveClaim(**rows, trend="improves", optimum="c")
    decision = rising.decide(values(a=0.0, b=1.0, c=2.0), SCORE)
    assert decision.verdict is Verdict.HOLDS
    assert "100%" in decision.note
    assert verdict(rising, a=2.0, b=1.0, c=0.0) is Verdict.REVERSED
    assert verdict(CurveClaim(**rows, trend="flat", within=0.2), a=0.0, b=0.0, c=0.0) is Verdict.HOLDS
    law = CurveClaim(**rows, slope=1.0, within=0.1)
    power = {row: {seed: x * (1 + seed / 10) for seed in range(3)} for row, x in (("a", 1), ("b", 2), ("c", 4))}
    assert law.decide(power, SCORE).verdict is Verdict.HOLDS


def test_value_of_an_exact_metric_needs_one_seed() -> None:
    exact = SCORE.changed(exact=True)
    claim = ValueClaim(kind="value", text="", metric="score", row="a", at_most=1.0)
    assert claim.decide({"a": {0: 1.0}}, exact).verdict is Verdict.HOLDS
    assert claim.decide({"a": {0: 2.0}}, exact).verdict is Verdict.REVERSED
    assert claim.decide({"a": {0: 1.0}}, SCORE).verdict is None


def test_rows_of_different_spread_have_intervals_of_their_own() -> None:
    noisy = values(a=5.0, b=0.0, c=0.0, d=0.0)
    noisy["d"] = {0: -400.0, 1: 300.0, 2: 900.0}
    decision = better("b").decide(noisy, SCORE)
    assert decision.verdict is Verdict.HOLDS
    assert "spread" in decision.note


def test_incomplete_claim_is_refused() -> None:
    with pytest.raises(InputError, match="give one of trend and slope"):
        CurveClaim.parse({"kind": "curve", "text": "", "metric": "m", "curve": ["a", "b", "c"], "x": [1, 2, 3]})
