"""Tables as files: bases and templates, references between runs, keys, values of results, and clear errors."""

from pathlib import Path

import pytest

from bertsmith import InputError
from bertsmith.reproduction.evaluation import evaluate_table
from bertsmith.reproduction.plan import RunPlan, find_value
from bertsmith.reproduction.table import merge_run_settings, read_table

BASE = """
[runs.corpus]
command = "corpus"
seed = 0
settings = { data = ["{data}/texts"], tokenizer = "small" }
[runs.pretrained]
command = "pretrain"
seconds = 20
settings = { data = "{corpus}", model = { preset = "bert-mini", overrides = { layers = 2 } } }
[runs.task]
command = "finetune"
settings = { data = "{data}/task", model = { folder = "{pretrained}" } }
[metrics.loss]
run = "pretrained"
value = "held_out.loss"
label = "loss"
better = "lower"
sesoi = 0.1
[metrics.score]
run = "task"
value = "score"
label = "score"
[templates.wide]
label = "wide"
set.pretrained.model.overrides.width = 128
"""
TABLE = """
base = "base.toml"
title = "A table"
[metrics.loss]
[metrics.score]
rows = ["first"]
[rows.first]
[rows.second]
template = "wide"
set.pretrained.model.overrides.heads = 2
seconds.pretrained = 30
[[gates]]
metric = "loss"
below = 5.0
covers = ["loss", "score"]
reason = "it has not learned"
[[claims]]
kind = "better"
text = "The second is better."
metric = "loss"
better = "second"
than = ["first"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "mine.toml").write_text(TABLE)
    return tmp_path / "mine.toml"


def test_rows_extend_their_base_and_template(path: Path) -> None:
    table = read_table(path)
    assert table.name == "mine"
    assert list(table.metrics) == ["loss", "score"]
    assert table.label("second") == "wide"
    jobs = RunPlan([table]).jobs.values()
    overrides = [job.settings["model"]["overrides"] for job in jobs if job.command == "pretrain"]
    assert overrides.count({"layers": 2}) == 3
    assert overrides.count({"layers": 2, "width": 128, "heads": 2}) == 3


def test_runs_are_planned_once_in_the_order_of_seeds(path: Path) -> None:
    table = read_table(path)
    jobs = list(RunPlan([table, table]).jobs.values())
    assert [job.command for job in jobs].count("corpus") == 1
    assert [(job.command, job.seed) for job in jobs[1:4]] == [("pretrain", 0), ("pretrain", 0), ("finetune", 0)]
    assert [job.seed for job in jobs[1:]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert {job.seconds for job in jobs if job.command == "pretrain"} == {20, 30}
    pretrained = {job.key for job in jobs if job.command == "pretrain"}
    assert all(set(job.needs) < pretrained for job in jobs if job.command == "finetune")


def test_key_ignores_speed_and_depends_on_everything_else(path: Path) -> None:
    def keys(change: str) -> set[str]:
        path.write_text(TABLE.replace("seconds.pretrained = 30", change))
        return set(RunPlan([read_table(path)]).jobs)

    plain = keys("")
    assert keys("set.pretrained.run = { compile = 'on', workers = 2 }") == plain
    assert len(keys("set.pretrained.run = { steps = 7 }") & plain) == len(plain) - 3
    assert len(keys("set.corpus.held_out = 0.1") & plain) == len(plain) - 3


def test_only_runs_that_compile_have_an_affinity(path: Path) -> None:
    path.write_text(TABLE + "[runs.pretrained.settings.run]\ncompile = 'on'\n")
    jobs = RunPlan([read_table(path)]).jobs.values()
    assert {job.affinity for job in jobs if job.command != "pretrain"} == {""}
    # one compiled network a row, the same for all seeds
    assert len({job.affinity for job in jobs if job.command == "pretrain"} - {""}) == 2


def test_located_settings_have_paths(path: Path) -> None:
    jobs = RunPlan([read_table(path)]).jobs
    task = next(job for job in jobs.values() if job.command == "finetune")
    located = task.located(Path("/data"), {task.needs[0]: Path("/runs/key")})
    assert located["data"] == "/data/task"
    assert located["model"]["folder"] == "/runs/key"
    assert task.data_paths == ("task",)
    with pytest.raises(InputError, match="give the folder with --data"):
        task.located(None, {task.needs[0]: Path("/runs/key")})


def test_model_of_a_command_stays_text() -> None:
    assert merge_run_settings({"model": "{long}", "to": "favor"}, {"features": 64}) == {
        "model": "{long}",
        "to": "favor",
        "features": 64,
    }
    recipe = merge_run_settings({"model": "small"}, {"model": {"subnet": {"depth": 0.5}}})
    assert recipe["model"] == {"folder": "small", "subnet": {"depth": 0.5}}


def test_values_are_found_by_path() -> None:
    result = {"score": 3, "grid": [{"width": 1.0, "score": 5.0}, {"width": 0.5, "score": 4.0}], "name": "x"}
    assert find_value(result, "score") == 3.0
    assert find_value(result, "grid[width=0.5].score") == 4.0
    assert find_value(result, "grid[-1].score") == 4.0
    for path in ("loss", "grid[width=0.1].score", "name", "score.mean"):
        with pytest.raises(InputError, match=r"result\.json"):
            find_value(result, path)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('better = "second"', 'better = "third"', "names 'third'"),
        ('metric = "loss"\nbetter', 'metric = "lost"\nbetter', "did you mean 'loss'"),
        ('template = "wide"', 'template = "wider"', "did you mean 'wide'"),
        ("set.pretrained", "set.pretraind", "did you mean 'pretrained'"),
        ('base = "base.toml"', 'base = "txt"', "did you mean 'text'"),
        ('kind = "better"', 'kind = "beter"', "did you mean 'better'"),
    ],
)
def test_misspelt_names_are_refused(path: Path, before: str, after: str, message: str) -> None:
    path.write_text(TABLE.replace(before, after))
    with pytest.raises(InputError, match=message):
        read_table(path)


def test_runs_that_read_each_other_are_refused(path: Path) -> None:
    path.write_text(TABLE.replace("[rows.first]", '[rows.first]\nset.pretrained.data = "{task}"'))
    with pytest.raises(InputError, match="read each other"):
        RunPlan([read_table(path)])


def lines(plan: RunPlan, losses: dict[str, list[float]]) -> dict[str, dict]:
    """Return finished runs whose loss is given by row and seed."""
    results = {
        plan.key_of("mine", "loss", row, seed): {"held_out": {"loss": loss}}
        for row, values in losses.items()
        for seed, loss in enumerate(values)
    }
    return {key: {"key": key, "result": result, "seconds": 1.0} for key, result in results.items()}


def test_verdict_is_provisional_until_all_seeds_have_run(path: Path) -> None:
    table = read_table(path)
    plan = RunPlan([table])
    first, second = [3.0, 3.3, 3.1], [2.0, 2.31, 2.11]
    statuses = []
    for seeds in (0, 1, 2, 3):
        evaluation = evaluate_table(table, plan, lines(plan, {"first": first[:seeds], "second": second[:seeds]}))
        statuses.append(evaluation.claims[0].status)
    assert statuses == ["not run yet", "not run yet", "provisional: holds", "holds"]
    assert evaluation.cells["loss"]["first"].mean == pytest.approx(3.1333, abs=1e-3)
    assert not evaluation.is_complete  # the fine-tunings are missing


def test_failed_gates_and_runs_are_not_testable(path: Path) -> None:
    table = read_table(path)
    plan = RunPlan([table])
    late = evaluate_table(table, plan, lines(plan, {"first": [3.0, 6.0, 3.1], "second": [2.0, 2.3, 2.1]}))
    assert late.claims[0].status == "not testable"
    assert "it has not learned" in late.claims[0].decision.note
    failed = lines(plan, {"first": [3.0, 3.0, 3.1], "second": [2.0, 2.3]})
    key = plan.key_of("mine", "loss", "second", 2)
    failed[key] = {"key": key, "error": "NaN loss"}
    assert "NaN loss" in evaluate_table(table, plan, failed).claims[0].decision.note
