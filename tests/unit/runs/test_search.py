"""Search over seeds and learning rates: results, the best model, resuming."""

import json
import os
import shutil
import signal
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median, stdev

import pytest
from helpers_finetune import SMALL, tune, write_task

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.runs import folder as run_folder
from bertsmith.runs import search
from bertsmith.runs.search import SearchPlan, Spread
from bertsmith.toml import read_toml
from bertsmith.training.trainer import Trainer

LONGER = ["run.epochs=6", "model.overrides.dropout=0.0", "head.pooling=mean"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


@pytest.fixture(scope="module")
def searched(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds with two learning rates, one of which is too small to learn."""
    out = tmp_path_factory.mktemp("search") / "out"
    arguments = ["finetune", "bert-tiny", "--data", str(data), "--out", str(out), "--device", "cpu"]
    arguments += [word for change in (*SMALL, *LONGER) for word in ("--set", change)]
    main([*arguments, "--seeds", "2", "--learning-rates", "1e-9", "1e-2"])
    return out


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_result_summarises_all_runs(searched: Path) -> None:
    metrics = result(searched)
    assert list(metrics["runs"]) == ["lr-1e-09-seed-0", "lr-1e-09-seed-1", "lr-0.01-seed-0", "lr-0.01-seed-1"]
    scores = {name: result(searched / name)["score"] for name in metrics["runs"]}
    assert {name: own["score"] for name, own in metrics["runs"].items()} == scores
    high = [scores["lr-0.01-seed-0"], scores["lr-0.01-seed-1"]]
    assert metrics["learning_rate"] == 1e-2
    assert metrics["score"] == metrics["mean"] == fmean(high)
    assert metrics["std"] == stdev(high)
    assert metrics["best"]["score"] == max(scores.values())
    assert "chosen on dev" in metrics["note"]
    assert metrics["runs"]["lr-1e-09-seed-0"]["is_degenerate"]


def test_folder_holds_only_the_best_model(searched: Path, data: Path, tmp_path: Path) -> None:
    best = result(searched)["best"]
    metrics = bertsmith.evaluate(searched, data=data, out=tmp_path / "evaluation", device="cpu")
    assert metrics["score"] == pytest.approx(best["score"])
    assert read_toml(searched / "recipe.toml")["run"]["seed"] == best["seed"]
    assert [path.parent for path in searched.rglob("*.safetensors")] == [searched]
    assert [path.parent for path in searched.rglob("task.json")] == [searched]


def test_each_run_equals_a_single_run(searched: Path, data: Path, tmp_path: Path) -> None:
    alone = tune(data, tmp_path / "alone", *LONGER, "run.seed=1", "optimizer.learning_rate=1e-2")
    assert result(searched / "lr-0.01-seed-1")["training_loss"] == alone["training_loss"]
    assert result(searched / "lr-0.01-seed-1")["score"] == alone["score"]


def test_search_is_resumed(searched: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the second run: finished runs are not repeated, and the result is the same."""
    out, real, started = tmp_path / "out", search.run_finetuning, []

    def count(*arguments: object, **more: object) -> object:
        started.append(arguments[2].name)  # type: ignore[attr-defined]
        if len(started) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "run_finetuning", count)
    with pytest.raises(KeyboardInterrupt):
        tune(data, out, *LONGER, seeds=2, learning_rates=[1e-9, 1e-2])
    assert len(list(out.rglob("model.safetensors"))) == 1
    started.append("")
    with pytest.raises(InputError, match="was started with other seeds or learning rates"):
        bertsmith.finetune(out=out, resume=True, seeds=3, device="cpu")
    with pytest.raises(InputError, match=r"--resume: run.epochs is 9.0, but the run was started with 6.0"):
        bertsmith.finetune(out=out, resume=True, epochs=9, device="cpu")
    made = bertsmith.finetune(out=out, resume=True, device="cpu")
    assert started[4:] == ["lr-0.01-seed-0", "lr-0.01-seed-1"]
    assert made.to_json() == result(out) == result(searched)
    assert (out / "model.safetensors").read_bytes() == (searched / "model.safetensors").read_bytes()
    assert made.predict(["the fine day"])[0] in ("good", "bad")
    with pytest.raises(InputError, match=r"is finished .*there is nothing to resume"):
        bertsmith.finetune(out=out, resume=True, device="cpu")


@pytest.mark.slow
def test_interrupted_run_of_a_search_is_resumed(data: Path, tmp_path: Path) -> None:
    """The run is saved, later runs are not started, and resuming gives the uninterrupted result."""
    out, real, steps = tmp_path / "out", Trainer._step, []

    def step(self: Trainer, *arguments: object) -> None:
        steps.append(real(self, *arguments))  # type: ignore[arg-type, func-returns-value]
        if len(steps) == 11:  # the third of the second run
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        made = tune(data, out, seeds=3)
    assert made.to_json() == {"steps": 3, "is_finished": False, "stage": "seed-1"}
    assert not (out / "seed-2").exists()
    whole = bertsmith.finetune(out=out, resume=True, device="cpu")
    assert whole["steps"] == 24
    alone = tune(data, tmp_path / "alone", "run.seed=1")
    assert result(out / "seed-1")["training_loss"] == alone["training_loss"]


def test_killed_while_copying_the_best_model(searched: Path, data: Path, tmp_path: Path) -> None:
    """The best run keeps its own copy until result.json is written."""
    out, real = tmp_path / "out", run_folder.write_result

    def refuse(folder: Path, metrics: dict, **options: bool) -> None:
        if folder == out:
            raise KeyboardInterrupt
        real(folder, metrics, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "write_result", refuse)
        with pytest.raises(KeyboardInterrupt):
            tune(data, out, seeds=2)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    (out / "model.safetensors").write_bytes(b"torn")
    made = bertsmith.finetune(out=out, resume=True, device="cpu")
    assert list(made["runs"]) == ["seed-0", "seed-1"]
    assert len(list(out.rglob("model.safetensors"))) == 1
    assert bertsmith.evaluate(out, data=data, out=tmp_path / "dev", device="cpu")["score"] == made["best"]["score"]


def test_failed_run_does_not_end_the_search(data: Path, tmp_path: Path) -> None:
    """A run whose loss becomes NaN is recorded as failed."""
    changes = ["optimizer.clip=0.0", "optimizer.weight_decay=1e30"]
    made = tune(data, tmp_path / "out", *changes, learning_rates=[1e-33, 10.0])
    assert "the loss is nan after step 2" in made["runs"]["lr-10-seed-0"]["failed"]
    assert made["learning_rate"] == 1e-33
    assert made["learning_rates"]["10"] == {"runs": 0}


def test_mean_and_spread() -> None:
    scores = [80.0, 84.0, 85.0]
    expected = {"runs": 3, "mean": fmean(scores), "std": stdev(scores), "min": 80.0, "median": median(scores)}
    assert asdict(Spread.of(scores)) == expected | {"max": 85.0}
    assert Spread.of([80.0]).std == 0.0
    assert SearchPlan(seeds=(3, 4), learning_rates=(1e-4,)).runs() == {"seed-3": (3, 1e-4), "seed-4": (4, 1e-4)}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"seeds": 0}, "--seeds is 0; allowed: above 0"),
        ({"learning_rates": [1e-3, -1.0]}, "--learning-rates is -1.0; allowed: above 0"),
        ({"learning_rates": [1e-3, 1e-3]}, "each may be given only once"),
    ],
)
def test_invalid_search_raises(more: dict, message: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        tune(data, tmp_path / "out", **more)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="--out is not given"):
        bertsmith.finetune("bert-tiny", train=[("a", "b"), ("b", "c")], seeds=2, device="cpu")
