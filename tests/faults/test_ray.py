"""Work on a local Ray cluster of two workers: the results of one process, even if a worker is killed."""

import filecmp
import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.data.build_corpus import build_corpus
from bertsmith.data.executor import LocalExecutor, RayExecutor

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
    found = list(RayExecutor(partial(Fragile, mark), "local").results(range(20)))
    assert mark.exists()
    assert found == list(LocalExecutor(Fragile(mark)).results(range(20)))


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


def test_seeds_have_the_scores_of_one_process(tmp_path: Path) -> None:
    rows = [("it works", "good"), ("it broke", "bad")] * 8
    network = "model.overrides={width=16,layers=1,heads=2}"
    settings = {"train": rows, "dev": rows, "seeds": 2, "set": ["run.epochs=1.0", network], "device": "cpu"}
    here = bertsmith.finetune("bert-tiny", out=tmp_path / "here", **settings)
    there = bertsmith.finetune("bert-tiny", out=tmp_path / "there", ray="local", **settings)
    assert here.runs == there.runs
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("here", "there")]
    assert weights[0] == weights[1]
