"""`bertsmith fit` as a command: bad input, output files, resuming after a kill, impossible budgets."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_finetuning import RECIPE, write_task

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.shrinking.fit import measure
from bertsmith.shrinking.fit.measure import Conditions, Timing

QUICK = ["--set", "measure.repeats=1", "--set", "measure.runs=20", "--set", "measure.table_runs=20"]
QUICK += ["--engine", "torch", "--precision", "float32", "--subnets", "even", "--threads", "1", "--length", "8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit")
    (folder / "recipe.toml").write_text(RECIPE)
    changes = ["run.epochs=10", "optimizer.learning_rate=3e-3"]
    recipe = folder / "recipe.toml"
    result = bertsmith.finetune(recipe=recipe, data=data, out=folder / "model", device="cpu", set=changes)
    assert result["score"] > 60
    return folder / "model"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def fake_measurement(folders: Sequence[Path], conditions: Conditions, runs: int, seconds: float) -> Timing:
    """Return one millisecond per layer."""
    latencies = []
    for folder in folders:
        layers = len(json.loads((folder / "config.json").read_text())["model"]["encoder"]["layers"])
        metrics = {"p50": layers, "p95": layers + 0.1, "mean": layers, "runs": runs}
        latencies.append({load.name: metrics for load in conditions.workloads})
    return Timing(latencies, 300.0, 10.0)


@pytest.fixture
def _fake_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "in_fresh_process", fake_measurement)


def command(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return ["fit", str(model), "--data", str(data), "--out", str(out), *QUICK, *more]


@pytest.mark.usefixtures("_fake_times")
def test_fastest_of_equal_scores_is_chosen(model: Path, data: Path, tmp_path: Path) -> None:
    main(command(model, data, tmp_path / "out", "--latency-ms", "100"))
    rows = [json.loads(line) for line in (tmp_path / "out" / "candidates.jsonl").read_text().splitlines()]
    (chosen,) = [row for row in rows if row["is_chosen"]]
    best = max(row["float32_score"] for row in rows)
    assert chosen["score"] == best
    # latencies of the others are estimates with an error of some per cent
    assert chosen["latency_ms"] < 1.06 * min(row["latency_ms"] for row in rows if row["float32_score"] == best)


@pytest.mark.usefixtures("_fake_times")
def test_output_folder_is_ready_to_serve(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    main(command(model, data, out, "--latency-ms", "1.5", "--size-mb", "60"))
    names = {path.name for path in out.iterdir()}
    assert names >= {"artefact.json", "config.json", "model.safetensors", "tokenizer.json", "task.json"}
    assert names >= {"card.md", "report.html", "result.json", "candidates.jsonl", "measurements.jsonl", "recipe.toml"}
    assert ".candidates" not in names
    metrics = json.loads((out / "result.json").read_text())
    assert metrics["fits"]
    assert metrics["chosen"]["subnet"]["depth"] == 0.5
    assert len((out / "candidates.jsonl").read_text().splitlines()) == metrics["candidates"]
    evaluated = bertsmith.evaluate(out, data=data, out=tmp_path / "evaluation", device="cpu")
    assert evaluated["score"] == metrics["score"]
    assert evaluated["interval"] == metrics["interval"]
    answers = bertsmith.Predictor.load(out).predict(["the lovely day"])
    assert answers[0] in ("good", "bad")


@pytest.mark.usefixtures("_fake_times")
def test_impossible_budget_exits_with_1(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as exit_info:
        main(command(model, data, out, "--latency-ms", "0.5"))
    assert exit_info.value.code == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "no candidate meets p95 ≤ 0.5 ms at 8 tokens; the nearest is" in output
    assert "latency 1.1 ms instead of 0.5 ms (120% over)" in output
    names = {path.name for path in out.iterdir()}
    assert names == {
        ".bertsmith",
        "report.html",
        "seal.json",
        "result.json",
        "candidates.jsonl",
        "measurements.jsonl",
        "recipe.toml",
    }


@pytest.mark.usefixtures("_fake_times")
def test_resume_with_another_budget(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--resume uses the settings of the search, and removes an artefact that no longer meets the budget."""
    out = tmp_path / "out"
    settings: dict[str, Any] = {"engine": ["torch"], "precision": ["float32"], "subnets": "even", "length": [8]}
    first = bertsmith.fit(model, data=data, out=out, latency_ms=1.5, **settings)
    assert first["fits"]

    def refuse(*arguments: Any) -> Timing:
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "in_fresh_process", refuse)
    again = bertsmith.fit(out=out, resume=True)
    assert again["chosen"] == first["chosen"]
    assert again["measurements"] == 0
    elsewhere = bertsmith.fit(model, data=data, out=tmp_path / "other", latency_ms=1.5, **settings)
    assert elsewhere["measurements"] == 0
    monkeypatch.setattr(measure, "in_fresh_process", fake_measurement)
    assert not bertsmith.fit(out=out, resume=True, latency_ms=0.5)["fits"]
    assert not (out / "artefact.json").exists()
    fresh = bertsmith.fit(model, data=data, out=out, latency_ms=1.5, fresh=True, force=True, **settings)
    assert fresh["measurements"] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "no budget is set"),
        (["--latency-ms", "-3"], "budget.latency_ms is -3.0"),
        (["--latency-ms", "0.000001"], "--latency-ms is 1e-06, but the smallest sub-network takes"),
        (["--size-mb", "0.0001"], "--size-mb is 0.0001, but the layers of the smallest sub-network alone take"),
        (["--latency-ms", "3", "--engine", "onnx"], "--engine is 'onnx'"),
        (["--latency-ms", "3", "--precision", "int9"], "search.precisions"),
        (["--latency-ms", "3", "--length", "4000"], "--length is 4000; the model takes at most 32"),
        (["--latency-ms", "3", "--split", "tset"], "tset"),
        (["--latency-ms", "3", "--measurements", "nowhere"], "--measurements 'nowhere' has no measurements.jsonl"),
        (["--latency-ms", "3", "--set", "measure.repeat=3"], "did you mean 'repeats'?"),
        (["--size-mb", "3", "--resume"], "contains no run to resume"),
    ],
)
def test_bad_fit_arguments_print_one_sentence(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", str(model), "--data", str(data), "--out", str(tmp_path / "out"), *more])
    assert exit_info.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_model_without_task_raises(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"MODEL is .* not a folder"):
        bertsmith.fit(tmp_path / "missing", data=data, out=tmp_path / "out", latency_ms=3)
    (tmp_path / "bare").mkdir()
    with pytest.raises(InputError, match=r"has no task\.json"):
        bertsmith.fit(tmp_path / "bare", data=data, out=tmp_path / "out", latency_ms=3)
    with pytest.raises(InputError, match="MODEL is not given"):
        bertsmith.fit(data=data, out=tmp_path / "out", latency_ms=3)


def test_explain_lists_the_planned_measurements(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(command(model, data, tmp_path / "out", "--latency-ms", "3", "--explain"))
    output = capsys.readouterr().out
    for text in ("latency_ms = 3.0", "torch float32", "width 0.5", "fresh processes", "8: 8 tokens"):
        assert text in output
    assert not (tmp_path / "out").exists()


KILLED = """
import sys, time
from test_fit_faults import fake_measurement
from bertsmith.cli import main
from bertsmith.shrinking.fit import measure

def slow(*arguments):
    time.sleep(0.2)
    return fake_measurement(*arguments)

measure.in_fresh_process = slow
main(sys.argv[1:])
"""


@pytest.mark.usefixtures("_fake_times")
def test_killed_and_resumed(model: Path, data: Path, tmp_path: Path) -> None:
    """A resumed search reuses all measurements of the killed one."""
    out = tmp_path / "out"
    arguments = command(model, data, out, "--latency-ms", "1.5")
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen([sys.executable, "-c", KILLED, *arguments], env={**os.environ, "PYTHONPATH": paths})
    file, deadline = out / "measurements.jsonl", time.monotonic() + 120
    while not (file.exists() and '"table"' in file.read_text()) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = [json.loads(line) for line in file.read_text().splitlines()]
    assert not (out / "result.json").exists()
    main([*arguments, "--resume"])
    after = [json.loads(line) for line in file.read_text().splitlines()]
    assert after[: len(before)] == before
    keys = [json.dumps(row["key"], sort_keys=True) for row in after]
    assert len(set(keys)) == len(keys)
    metrics = json.loads((out / "result.json").read_text())
    assert metrics["fits"]
    assert metrics["measurements"] == len(after) - len(before)
