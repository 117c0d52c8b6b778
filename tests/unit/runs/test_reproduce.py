"""`bertsmith reproduce`: order, dependencies, failures and budget of runs; resuming; a small table from end to end."""

import json
import os
import signal
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import pytest

import bertsmith
from bertsmith import InputError
from bertsmith.data.executor import Executor, LocalWorker, LocalWorkers, LostWorker
from bertsmith.reproduction.plan import RunPlan
from bertsmith.reproduction.table import read_table
from bertsmith.runs.jobs import JobOrder, Outcome, open_jobs
from bertsmith.runs.reproduce import RunStore, run_plan

CHAIN = """
title = "A chain"
seeds = 2
[runs.teacher]
command = "measure"
seed = 0
seconds = 10
settings = { what = "favor_error", features = 8, head_width = 4, std = 1.0, length = 8, draws = 1 }
[runs.student]
command = "measure"
seconds = 10
settings = { what = "favor_error", features = 8, head_width = 4, std = 1.0, length = 8, feature_map = "{teacher}" }
[metrics.error]
run = "student"
value = "error"
label = "error"
better = "lower"
[rows.a]
[rows.b]
set.student.features = 16
"""


class FakeExecutor(Executor[JobOrder, Outcome]):
    """Finishes the oldest order whenever it is waited for; some fail."""

    def __init__(self, slots: int, clock: "FakeClock", failing: str = "") -> None:
        self.slots, self.clock, self.failing = slots, clock, failing
        self.pending: dict[Future[Outcome], JobOrder] = {}
        self.started: list[JobOrder] = []
        self.most = 0

    def submit(self, one: JobOrder, group: str = "") -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self.pending[future] = one
        self.started.append(one)
        self.most = max(self.most, len(self.pending))
        return future

    def first_finished(self, futures: Iterable[Future[Outcome]]) -> Future[Outcome]:
        future = next(iter(self.pending))
        order = self.pending.pop(future)
        self.clock.now += 20.0
        if order.key == self.failing:
            future.set_result({"error": "out of memory"})
        else:
            order.folder.mkdir(parents=True, exist_ok=True)
            (order.folder / "result.json").write_text("{}")
            future.set_result({"result": {"error": 0.5}, "seconds": 20.0})
        return future

    def close(self) -> None:
        pass


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    (tmp_path / "chain.toml").write_text(CHAIN)
    return RunPlan([read_table(tmp_path / "chain.toml")])


def run(plan: RunPlan, out: Path, slots: int = 2, failing: str = "", minutes: float | None = None) -> FakeExecutor:
    executor = FakeExecutor(slots, FakeClock(), failing)
    run_plan(plan, RunStore(out, None), executor, device="cpu", minutes=minutes, clock=executor.clock)
    return executor


def test_runs_start_after_those_they_read_and_side_by_side(plan: RunPlan, tmp_path: Path) -> None:
    executor = run(plan, tmp_path / "out", slots=3)
    teacher, *students = executor.started
    assert len(students) == 4
    assert executor.most == 3
    assert all(order.settings["feature_map"] == str(teacher.folder) for order in students)
    assert not run(plan, tmp_path / "out").started  # finished runs are not repeated


def test_failed_run_loses_only_the_runs_that_read_it(plan: RunPlan, tmp_path: Path) -> None:
    keys = list(plan.jobs)
    assert len(run(plan, tmp_path / "one", failing=keys[1]).started) == 5
    assert len(run(plan, tmp_path / "all", failing=keys[0]).started) == 1
    assert len(run(plan, tmp_path / "one").started) == 1  # only the failed one runs again


def test_budget_starts_nothing_that_would_not_end(plan: RunPlan, tmp_path: Path) -> None:
    # planned are 10 s per run, but the first ones take 20 s
    executor = run(plan, tmp_path / "out", slots=1, minutes=1.1)
    assert len(executor.started) == 3
    assert executor.clock.now == 60.0
    run(plan, tmp_path / "out")
    assert len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()) == 5


def test_run_is_repeated_if_its_output_is_gone_and_needed(plan: RunPlan, tmp_path: Path) -> None:
    keys = list(plan.jobs)
    run(plan, tmp_path / "out", failing=keys[-1])
    (tmp_path / "out" / "runs" / keys[0] / "result.json").unlink()
    assert [order.key for order in run(plan, tmp_path / "out").started] == [keys[0], keys[-1]]


def test_changed_data_runs_again(tmp_path: Path) -> None:
    text = CHAIN.replace('feature_map = "{teacher}"', 'feature_map = "{data}/rows.jsonl"')
    (tmp_path / "chain.toml").write_text(text)
    plan, data = RunPlan([read_table(tmp_path / "chain.toml")]), tmp_path / "data"
    data.mkdir()
    started = []
    for content in ("one", "one", "two"):
        (data / "rows.jsonl").write_text(content)
        executor = FakeExecutor(1, FakeClock())
        run_plan(plan, RunStore(tmp_path / "out", data), executor, device="cpu", clock=executor.clock)
        started.append(len(executor.started))
    assert started == [4, 0, 4]


def test_torn_line_is_removed_and_foreign_folder_refused(plan: RunPlan, tmp_path: Path) -> None:
    run(plan, tmp_path / "out")
    lines = tmp_path / "out" / "runs.jsonl"
    lines.write_text(lines.read_text()[:-9])
    assert len(run(plan, tmp_path / "out").started) == 1
    with pytest.raises(InputError, match="is not empty"):
        RunStore(tmp_path, None)


@pytest.mark.slow  # starts processes
def test_processes_run_side_by_side_and_one_may_die(tmp_path: Path) -> None:
    settings = {"what": "favor_error", "features": 8, "head_width": 4, "std": 1.0, "length": 8, "draws": 1, "seed": 0}
    with open_jobs(2, "cpu", None) as executor:
        orders = [JobOrder(key, "measure", settings, tmp_path / key, "cpu") for key in ("first", "second")]
        assert all(outcome["result"]["error"] > 0 for _, outcome in executor.results(orders))
        long = {**settings, "length": 4096, "draws": 10_000}
        dies = executor.submit(JobOrder("dies", "measure", long, tmp_path / "dies", "cpu"))
        bad = executor.submit(JobOrder("bad", "measure", {**settings, "std": None}, tmp_path / "bad", "cpu"))
        assert "TypeError" in bad.result()["error"]
        assert isinstance(executor, LocalWorkers)
        (busy,) = executor._busy
        assert isinstance(busy, LocalWorker)
        os.kill(busy.process.pid, signal.SIGKILL)
        with pytest.raises(LostWorker, match="its process ended with exit code -9"):
            dies.result()


EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "corpora.toml"


@pytest.fixture
def own_data(texts: Path, tmp_path: Path) -> Path:
    """Two corpora and a tagging task."""
    folder = tmp_path / "data"
    stories = (texts / "stories.txt").read_text()
    for name, part in (("news", stories[: len(stories) // 2]), ("wikipedia", stories[len(stories) // 2 :])):
        (folder / name).mkdir(parents=True)
        (folder / name / "texts.txt").write_text(part)
    (folder / "ner").mkdir()
    row = {"tokens": ["the", "smith", "forges"], "ner": ["O", "B-PER", "O"]}
    other = {"tokens": ["my", "neighbour", "forgets"], "ner": ["O", "O", "O"]}
    for split in ("train", "dev"):
        (folder / "ner" / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (row, other) * 6))
    return folder


@pytest.mark.slow
def test_table_of_the_documentation_runs_from_end_to_end(own_data: Path, tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    small = text.replace("seeds = 3", "seeds = 2").replace("2000", "2").replace("32768", "256")
    small = small.replace('preset = "bert-mini"', NARROW).replace("settings.run = { epochs = 3.0", LONGER)
    (tmp_path / "corpora.toml").write_text(small)
    result = bertsmith.reproduce([str(tmp_path / "corpora.toml")], data=own_data, out=tmp_path / "out", device="cpu")
    assert result.exit_code == 0
    folder = tmp_path / "out" / "corpora"
    outcome = json.loads((folder / "result.json").read_text())
    assert outcome["is_complete"]
    assert outcome["claims"][0]["verdict"] in ("holds", "holds, small", "within noise", "reversed")
    assert "± " in (folder / "table.md").read_text()
    assert "<svg" in (folder / "report.html").read_text()
    lines = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert [line["command"] for line in lines].count("pretrain") == 4
    assert not list((tmp_path / "out" / "runs").glob("*/task.json")), "weights that nothing reads are deleted"


LONGER = "settings.optimizer.learning_rate = 0.01\nsettings.run = { epochs = 30.0"
NARROW = 'preset = "bert-mini"\nmodel.overrides = { width = 32, heads = 2, layers = 1, max_length = 128 }'
