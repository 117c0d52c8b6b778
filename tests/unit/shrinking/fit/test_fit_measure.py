"""Timing artefacts: in this process with a fake clock, and in a fresh process as a search does."""

import itertools
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers_fit import write_folders

import bertsmith
from bertsmith.engines.artefact import write_artefact
from bertsmith.engines.base import Artefact
from bertsmith.errors import InputError
from bertsmith.shrinking.fit import worker
from bertsmith.shrinking.fit.measure import (
    Conditions,
    Job,
    Workload,
    fingerprint,
    in_fresh_process,
    usable_cores,
    versions,
)

CONDITIONS = Conditions(workloads=(Workload(name="8", lengths=(8,)), Workload(name="data", lengths=(3, 12))), batch=2)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = write_folders(tmp_path_factory.mktemp("measure"))
    folder = model.with_name("artefact")
    folder.mkdir()
    write_artefact(bertsmith.load(model), folder, Artefact(engine="torch"))
    return folder


def test_percentiles_of_a_fake_clock(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each duration is one millisecond longer than the last."""
    readings = itertools.accumulate(itertools.count(1), lambda total, step: total + step / 1000, initial=0.0)
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(readings))
    job = Job(folders=(str(artefact),), runs=24, seconds=1e9, workloads=CONDITIONS.workloads[:1])
    found = worker.measure(job).latencies[0]["8"]
    assert found["runs"] == 24
    assert found["p50"] < found["mean"] * 1.01
    assert found["p50"] < found["p95"]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_inputs_have_the_lengths_and_batch_size_of_the_job(artefact: Path, layout: str) -> None:
    job = Job.parse({"folders": [], "runs": 1, "seconds": 1, **CONDITIONS.plain(), "layout": layout})
    runner = worker.open_runner(artefact)
    batches = worker.inputs(runner, CONDITIONS.workloads[1], job)
    assert [found.lengths().tolist() for _, found, _ in batches] == [[3, 3], [12, 12]]
    assert all(found.is_packed == (layout == "packed") for _, found, _ in batches)
    again = worker.inputs(runner, CONDITIONS.workloads[1], job)
    assert all(np.array_equal(one[0], other[0]) for one, other in zip(batches, again, strict=True))
    assert all(int(tokens.max()) < runner.config.encoder.vocabulary for tokens, _, _ in batches)


def test_fresh_process_times_several_artefacts(artefact: Path) -> None:
    timing = in_fresh_process([artefact, artefact], CONDITIONS, runs=20, seconds=0.1)
    assert [sorted(found) for found in timing.latencies] == [["8", "data"]] * 2
    assert all(0 < found["p50"] <= found["p95"] for both in timing.latencies for found in both.values())
    assert timing.memory_mb > timing.memory_of_model_mb >= 0


def test_failed_process_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback …\nValueError: the folder does not exist\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(InputError, match=r"measuring 'missing' failed: ValueError: the folder does not exist"):
        in_fresh_process([tmp_path / "missing"], CONDITIONS, runs=1, seconds=1)


def test_fingerprint_of_the_machine() -> None:
    machine = fingerprint()
    assert machine["processor"]
    assert machine["cores"] == usable_cores() >= 1
    assert {"bertsmith", "python", "torch"} <= versions("torch").keys()
