"""Schedules, optimiser groups and the batch ramp."""

import math

import pytest
import torch

import bertsmith
from bertsmith.objectives.base import Portion
from bertsmith.training.optimizer import BatchConfig, OptimizerConfig, ScheduleConfig


def curve(schedule: ScheduleConfig, steps: int = 1000) -> list[float]:
    return [schedule.factor(step, steps) for step in range(steps)]


def test_warmup_is_linear() -> None:
    for kind in ("linear", "cosine", "wsd", "noam", "constant"):
        factors = curve(ScheduleConfig(kind=kind, warmup=0.1))
        assert factors[0] == pytest.approx(0.01)
        assert factors[99] == pytest.approx(1.0)
        assert max(factors) == pytest.approx(1.0)


def test_schedules_end_at_the_floor() -> None:
    for kind in ("linear", "cosine", "wsd"):
        assert curve(ScheduleConfig(kind=kind))[-1] == pytest.approx(0.0, abs=1e-9)
        assert curve(ScheduleConfig(kind=kind, floor=0.1))[-1] == pytest.approx(0.1)
    middle = curve(ScheduleConfig(kind="cosine", warmup=0.0))[499]
    assert middle == pytest.approx(0.5, abs=1e-3)


def test_wsd_is_constant_then_decays() -> None:
    factors = curve(ScheduleConfig(kind="wsd", warmup=0.05, decay=0.2))
    assert set(factors[50:800]) == {1.0}
    assert factors[849] == pytest.approx(1 - math.sqrt(50 / 200))


def test_noam_equals_the_paper() -> None:
    width, warmup, steps = 512, 4000, 100_000
    schedule = ScheduleConfig(kind="noam", warmup=warmup / steps)
    peak = width**-0.5 * warmup**-0.5
    for step in (1, 100, 4000, 4001, 50_000):
        expected = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert peak * schedule.factor(step - 1, steps) == pytest.approx(expected)


def test_cramming_triangle_is_a_linear_schedule() -> None:
    factors = curve(ScheduleConfig(kind="linear", warmup=0.75, begin=0.25))
    for step in (1, 250, 500, 750):
        assert factors[step - 1] == pytest.approx(0.25 + 0.75 * step / 750)
    for step in (751, 900, 1000):
        assert factors[step - 1] == pytest.approx((1000 - step) / 250)


def test_linear_decay_from_the_first_step() -> None:
    """BERT's and DeBERTa's rates jump after the warm-up, ELECTRA multiplies; the formulas count steps from 1."""
    jumping, multiplied = (curve(ScheduleConfig(warmup=0.1, fall=fall)) for fall in ("from_start", "throughout"))
    for step in (1, 50, 100, 101, 500, 999, 1000):
        assert jumping[step - 1] == pytest.approx(step / 100 if step <= 100 else 1 - step / 1000)
        assert multiplied[step - 1] == pytest.approx(min(1, step / 100) * (1 - step / 1000))
    assert jumping[99] - jumping[100] == pytest.approx(0.101)
    with pytest.raises(ValueError, match="fall is 'throughout' with kind 'wsd'"):
        ScheduleConfig(kind="wsd", fall="throughout")


def test_biases_and_norms_are_not_decayed() -> None:
    model = bertsmith.build(bertsmith.preset("electra-small", layers=1))
    optimizer = OptimizerConfig(weight_decay=0.3).build([Portion.of(tuple(model.parameters()))])
    decayed, not_decayed = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    for name, parameter in model.named_parameters():
        is_not_decayed = name.endswith("bias") or "norm" in name
        assert (id(parameter) in not_decayed) == is_not_decayed, name
        assert (id(parameter) in decayed) == (not is_not_decayed), name


def test_batch_grows_along_its_ramp() -> None:
    batch = BatchConfig(tokens=8192, ramp_from=1024, ramp=0.5)
    counts = [batch.micro_batches(step, 100, micro_tokens=1024, processes=1) for step in range(100)]
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert set(counts[50:]) == {8}
    assert BatchConfig(tokens=8192).micro_batches(0, 100, micro_tokens=1024, processes=4) == 2
    with pytest.raises(ValueError, match="ramp_from is 16384; allowed: up to tokens, 8192"):
        BatchConfig(tokens=8192, ramp_from=16384)
    assert BatchConfig(tokens=10).micro_batches(0, 100, micro_tokens=1024, processes=1) == 1


def test_learning_rate_reaches_the_optimiser() -> None:
    model = torch.nn.Linear(2, 2)
    assert (
        OptimizerConfig(learning_rate=0.5).build([Portion.of(tuple(model.parameters()))]).param_groups[0]["lr"] == 0.5
    )
