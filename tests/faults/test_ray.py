"""Work on a local Ray cluster of two workers: the results of one process, even if a worker is killed."""

import filecmp
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_training import RECIPE

import bertsmith
from bertsmith.data.build_corpus import build_corpus
from bertsmith.data.executor import RayWorkers, ThisProcess
from bertsmith.reproduction.measurements import MEASUREMENTS
from bertsmith.runs.encode import encode
from bertsmith.runs.jobs import JobOrder, Outcome, _prepare

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    torch.set_num_threads(1)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    not_nice = {"worker_niceness": 0}  # Ray's default lets workers starve on a busy machine
    ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False, _system_config=not_nice)
    yield
    ray.shutdown()


class Fragile:
    """Doubles numbers; kills its process at 5, once."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, number: int) -> int:
        if number == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 2 * number


def test_killed_worker_costs_no_result(tmp_path: Path) -> None:
    mark = tmp_path / "killed"
    with RayWorkers(partial(Fragile, mark), "local") as executor:
        found = list(executor.results(range(20)))
    assert mark.exists()
    assert found == list(ThisProcess(Fragile(mark)).results(range(20)))


def test_corpus_is_equal_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(0).choice(["ships", "sail", "the", "sea", "at", "night"], (400, 12))
    (tmp_path / "texts.txt").write_text("\n\n".join(" ".join(row) + "." for row in words))
    monkeypatch.setitem(build_corpus.__kwdefaults__, "shard_megabytes", 0.004)
    for name, where in (("here", {"workers": 1}), ("there", {"ray": "local"})):
        bertsmith.corpus([tmp_path / "texts.txt"], tokenizer="small", out=tmp_path / name, **where)
    names = sorted(path.name for path in (tmp_path / "here").iterdir() if path.name != "result.json")
    assert sum(name.endswith(".shard") for name in names) > 4
    equal, *different = filecmp.cmpfiles(tmp_path / "here", tmp_path / "there", names, shallow=False)
    assert (sorted(equal), different) == (names, [[], []])


def test_predictions_are_equal_row_for_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertsmith.runs.predict.WINDOW_ROWS", 7)
    rows = [("it works", "good"), ("it broke", "bad")] * 8
    network = "model.overrides={width=16,layers=1,heads=2}"
    bertsmith.finetune("bert-tiny", train=rows, dev=rows, out=tmp_path / "run", set=["run.epochs=1.0", network])
    data = tmp_path / "new.jsonl"
    data.write_text("".join(json.dumps({"text": f"it works {number}"}) + "\n" for number in range(50)))
    for name, where in (("here", None), ("there", "local")):
        bertsmith.predict(tmp_path / "run", data=str(data), out=tmp_path / name, device="cpu", ray=where)
    here, there = (tmp_path / name / "predictions.jsonl" for name in ("here", "there"))
    assert here.read_bytes() == there.read_bytes()


def test_vectors_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertsmith.data.inference.FIRST_WINDOW", 16)
    (tmp_path / "texts.txt").write_text("\n\n".join(f"text {number} " * (number % 7 + 1) for number in range(100)))
    network = bertsmith.preset("bert-tiny", width=16, layers=1, heads=2)
    model = bertsmith.build(network)
    model.tokenizer = bertsmith.load("small").tokenizer
    bertsmith.save(model, tmp_path / "model")
    for name, where in (("here", None), ("there", "local")):
        encode(tmp_path / "model", data=[tmp_path / "texts.txt"], out=tmp_path / name, device="cpu", ray=where)
    here, there = ((tmp_path / name / "vectors.npy").read_bytes() for name in ("here", "there"))
    assert here == there


def test_pairs_are_equal_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertsmith.runs.pairs.BLOCK_CHARACTERS", 500)
    sentences = "The river flows down to the sea. Old houses of this street are made of stone. A third one is here."
    (tmp_path / "texts.txt").write_text("\n\n".join(f"{sentences} Number {number} is last." for number in range(40)))
    for name, where in (("here", None), ("there", "local")):
        bertsmith.pairs([tmp_path / "texts.txt"], out=tmp_path / name, ray=where)
    here, there = ((tmp_path / name / "train.jsonl.gz").read_bytes() for name in ("here", "there"))
    assert here == there


CHAIN = """
title = "A chain"
seeds = 3
[runs.first]
command = "measure"
settings = { what = "favor_error", features = 8, head_width = 4, std = 1.0, length = 8, draws = 1 }
[runs.second]
command = "measure"
settings = { what = "fragile", first = "{first}", mark = "MARK" }
[metrics.error]
run = "second"
value = "error"
label = "error"
better = "lower"
[rows.a]
"""


def fragile(first: str, mark: str, device: str, seed: int) -> dict[str, float]:
    """Return the error of another run; the first call kills its process."""
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"error": json.loads((Path(first) / "result.json").read_text())["error"] + seed}


def prepare_fragile(threads: int) -> Callable[[JobOrder], Outcome]:
    from bertsmith.reproduction.measurements import MEASUREMENTS  # of the worker, not a copy of this process's

    MEASUREMENTS["fragile"] = fragile
    return _prepare(threads)


def test_table_has_the_results_of_one_process_although_a_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "killed"
    (tmp_path / "chain.toml").write_text(CHAIN.replace("MARK", str(mark)))
    monkeypatch.setattr("bertsmith.runs.jobs._prepare", prepare_fragile)
    monkeypatch.setitem(MEASUREMENTS, "fragile", fragile)
    lines = {}
    for name, where in (("there", "local"), ("here", None)):
        result = bertsmith.reproduce([str(tmp_path / "chain.toml")], out=tmp_path / name, device="cpu", ray=where)
        assert result.exit_code == 0
        assert mark.exists()
        rows = map(json.loads, (tmp_path / name / "runs.jsonl").read_text().splitlines())
        lines[name] = {row["key"]: row["result"] for row in rows}
    assert len(lines["here"]) == 6
    assert lines["here"] == lines["there"]


def test_comparison_has_the_losses_of_one_process(corpus_folder: Path, tmp_path: Path) -> None:
    recipes = [tmp_path / "narrow.toml", tmp_path / "wide.toml"]
    recipes[0].write_text(RECIPE)
    recipes[1].write_text(RECIPE.replace("width = 32", "width = 48"))
    settings = {"budget": "3k tokens", "data": corpus_folder, "evaluations": 2, "device": "cpu"}
    for name, where in (("here", None), ("there", "local")):
        bertsmith.compare(recipes, out=tmp_path / name, ray=where, **settings)
    here, there = (json.loads((tmp_path / name / "result.json").read_text())["curves"] for name in ("here", "there"))

    def losses(curves: dict) -> dict:
        return {name: [row["token_loss"] for row in rows] for name, (rows,) in curves.items()}

    assert losses(here) == losses(there)


def test_seeds_have_the_scores_of_one_process(tmp_path: Path) -> None:
    rows = [("it works", "good"), ("it broke", "bad")] * 8
    network = "model.overrides={width=16,layers=1,heads=2}"
    settings = {"train": rows, "dev": rows, "seeds": 2, "set": ["run.epochs=1.0", network], "device": "cpu"}
    here = bertsmith.finetune("bert-tiny", out=tmp_path / "here", **settings)
    there = bertsmith.finetune("bert-tiny", out=tmp_path / "there", ray="local", **settings)
    assert here.runs == there.runs
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("here", "there")]
    assert weights[0] == weights[1]
