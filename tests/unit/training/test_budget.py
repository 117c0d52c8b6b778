"""Budgets: parsing, conversion to steps, and timing, which must not change the run."""

from pathlib import Path

import pytest

import bertsmith
from bertsmith.errors import InputError
from bertsmith.recipes import FILES
from bertsmith.toml import read_toml
from bertsmith.training.budget import Budget, Pace, calibrate, max_steps, steps_within
from bertsmith.training.pretraining import PretrainSettings, make_trainer

RECIPE = FILES["bert-tiny-cpu"]
SMALL = ["sequences.micro_tokens=256", "batch.tokens=512", "run.evaluate_batches=2", "run.log_every=1"]
SMALL += ["model.overrides={width=32,layers=1,heads=2,max_length=128,dropout=0.1}"]


def settings(**changes: object) -> PretrainSettings:
    network = {"preset": "bert-tiny", "overrides": {"width": 16, "layers": 1, "heads": 1}}
    small = {"model": network, "sequences": {"micro_tokens": 256}, "batch": {"tokens": 1024}}
    return PretrainSettings.parse({**small, **changes})


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("90s", "seconds", 90),
        ("10min", "seconds", 600),
        ("1.5 hours", "seconds", 5400),
        ("300M", "tokens", 3e8),
        ("1.5B tokens", "tokens", 1.5e9),
        ("20_000 tokens", "tokens", 20_000),
        ("1e18 flops", "flops", 1e18),
        ("2T FLOPs", "flops", 2e12),
    ],
)
def test_budget_is_parsed(text: str, kind: str, amount: float) -> None:
    budget = Budget.parse(text)
    assert (budget.kind, budget.amount) == (kind, amount)


@pytest.mark.parametrize("text", ["", "10", "10m", "-3min", "0s", "ten minutes", "3 M min", "1e999 flops", "1h30min"])
def test_invalid_budget_raises(text: str) -> None:
    with pytest.raises(InputError, match=r"the budget is .*; allowed: .*10min"):
        Budget.parse(text)


def test_tokens_and_flops_determine_steps() -> None:
    assert steps_within(settings().method, Budget.parse("10240 tokens")) == 10
    assert steps_within(settings().method, Budget.parse("10239 tokens")) == 9
    assert steps_within(settings().method, Budget.parse("1e6 flops"), [100.0]) == 9
    with pytest.raises(InputError, match="is less than one step takes"):
        steps_within(settings().method, Budget.parse("1000 tokens"))
    with pytest.raises(InputError, match="has to be measured"):
        steps_within(settings().method, Budget.parse("10min"))
    with pytest.raises(InputError, match="steps; give less"):
        steps_within(settings().method, Budget.parse("1e30 flops"), [1.0])


def test_steps_account_for_ramp_and_phases() -> None:
    """Compare with a sum over all steps."""
    given = settings(
        batch={"tokens": 4096, "ramp_from": 256, "ramp": 0.5},
        phases=[{"begin": 0.8, "length": 256, "micro_tokens": 512, "batch_tokens": 8192}],
    )
    flops = (10.0, 30.0)

    def cost(steps: int) -> float:
        method = given.method.with_steps(steps)
        counts = [(method.phase(step), method.micro_batches(step, 1)) for step in range(steps)]
        assert [phase for phase, _ in counts] == sorted(phase for phase, _ in counts)
        return sum(count * (256, 512)[phase] * flops[phase] for phase, count in counts)

    steps = steps_within(given.method, Budget.parse("5e7 flops"), flops)
    assert cost(steps) <= 5e7 < cost(steps + 1)
    assert steps > 100
    assert max_steps(cost, Budget("flops", 5e7, "")) == steps


def test_pace_includes_evaluations_and_checkpoints() -> None:
    given = settings(
        batch={"tokens": 1024, "ramp_from": 256, "ramp": 1.0},
        run={"steps": 7, "evaluate_every": 2, "checkpoint_every": 3},
    )
    pace = Pace(({1: 1.0, 4: 4.0},), evaluation=10.0, checkpoint=100.0, tokens_per_second=1.0)
    micro = sum(given.method.micro_batches(step, 1) for step in range(7))
    # evaluations after 2, 4, 6, 7; checkpoints after 2, 3, 4, 6, 7, and the model at the end
    assert pace.seconds(given.method, 1) == pytest.approx(micro + 4 * 10 + 6 * 100)


@pytest.mark.slow
def test_timed_run_equals_run_without_timing(
    corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "new" / "run"
    # timed steps redraw a Performer's features and advance the step count of Adam without bias correction: both must be
    # restored as well
    small = [*SMALL, "model.preset=performer-base", "optimizer.bias_correction=false"]
    metrics = bertsmith.pretrain(RECIPE, data=corpus_folder, out=out, set=small, budget="2s", device="cpu")
    assert "budget 2s: " in capsys.readouterr().out
    recorded = read_toml(out / "recipe.toml")["run"]["steps"]
    assert metrics["steps"] == recorded
    assert {path.name for path in out.iterdir()} >= {"recipe.toml", "result.json", "log.jsonl"}
    assert not list(out.glob(".calibration*"))
    again = tmp_path / "again"
    bertsmith.pretrain(out / "recipe.toml", out=again, device="cpu")
    for name in ("model.safetensors", f"checkpoints/step-{recorded:08d}/optimizer.safetensors"):
        assert (again / name).read_bytes() == (out / name).read_bytes()


def test_calibration_restores_the_trainer(corpus_folder: Path, tmp_path: Path) -> None:
    given = settings(data=str(corpus_folder), phases=[{"begin": 0.5, "length": 64}])
    trainer = make_trainer(given, tmp_path / "a" / "run", device="cpu", show=False)
    assert calibrate(trainer, 8.0) > 1
    assert trainer.method.run.steps == given.run.steps
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=r"the budget of 0.01 s is spent"):
        calibrate(trainer, 0.01)
    trainer.close()


def test_steps_of_a_budget_are_recorded(corpus_folder: Path, tmp_path: Path) -> None:
    def run(out: Path, budget: str, **more: object) -> dict:
        return bertsmith.pretrain(RECIPE, data=corpus_folder, out=out, set=SMALL, budget=budget, device="cpu", **more)

    assert run(tmp_path / "run", "2048 tokens")["steps"] == 4
    assert read_toml(tmp_path / "run" / "recipe.toml")["run"]["steps"] == 4
    explanation = bertsmith.pretrain(RECIPE, set=SMALL, budget="2048 tokens", explain=True)
    assert explanation["tokens"] == "2,048 in 4 steps"
    # the same command resumes with the recorded steps, not the recipe's
    (tmp_path / "run" / "result.json").unlink()
    assert run(tmp_path / "run", "99 tokens", resume=True)["steps"] == 4
