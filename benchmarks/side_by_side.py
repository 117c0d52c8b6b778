"""Run independent jobs as parallel processes on one GPU, or one after the other.

Every finished run is appended to a file immediately, and runs that are already in the file are skipped.
"""

import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError

# imported once by the fork server: twelve concurrent imports of PyTorch take half a minute
_PRELOADED = ["torch", "accelerate", "bertsmith.runs.finetune", "bertsmith.training.finetuning"]


@dataclass(frozen=True)
class Run:
    """One run: the settings that identify it, and its paths on this machine."""

    record: Mapping[str, Any]
    """JSON-compatible settings that identify the run; they are part of its line in the file."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Paths and device, which do not identify the run."""
    cost: float = 0.0
    """Estimated duration in any unit; the longest runs start first."""

    @property
    def key(self) -> str:
        return _key(self.record, self.record)


Work = Callable[[Run], dict[str, Any]]
"""Function that returns the metrics of a run, with a "message" to print; a module-level function, so that other
processes can import it."""


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of runs, up to one that was cut off when its process was killed."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def lines_of(runs: Sequence[Run], lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of these runs, without failures."""
    names = {frozenset(run.record): run.record for run in runs}
    wanted = {run.key for run in runs}
    done = (dict(line) for line in lines if "error" not in line)
    return [line for line in done if any(_key(line, record) in wanted for record in names.values())]


def run_all(work: Work, runs: Sequence[Run], out: Path, *, processes: int, threads: int = 1) -> int:
    """Run what the file does not have yet, and return the number of failures; each has a line with its error."""
    have = {run.key for run in runs if lines_of([run], read_lines(out))}
    left = sorted((run for run in runs if run.key not in have), key=lambda run: -run.cost)
    out.parent.mkdir(parents=True, exist_ok=True)
    _mend(out)
    failed, begun = 0, time.perf_counter()
    print(f"{len(left)} runs to do, {len(runs) - len(left)} are done", file=sys.stderr, flush=True)
    for number, (run, metrics) in enumerate(_carried_out(work, left, processes, threads), start=1):
        message = metrics.pop("message", None) or metrics.get("error", "done")
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**run.record, **metrics}) + "\n")
        failed += "error" in metrics
        name = " ".join(str(run.record[part]) for part in ("model", "task") if part in run.record)
        where = f"{number}/{len(left)} after {time.perf_counter() - begun:.0f} s"
        print(f"{where}: {name} seed {run.record['seed']}: {message}", file=sys.stderr, flush=True)
    return failed


def _carried_out(work: Work, runs: Sequence[Run], processes: int, threads: int) -> Iterator[tuple[Run, dict[str, Any]]]:
    if processes == 1:
        for run in runs:
            yield run, _watched(work, run, threads)
        return
    # for libraries that use all cores by default
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with ProcessPoolExecutor(min(processes, max(1, len(runs))), mp_context=context) as pool:
        futures: dict[Future[dict[str, Any]], Run] = {pool.submit(_watched, work, run, threads): run for run in runs}
        for future in as_completed(futures):
            error = future.exception()  # the process died; exceptions of a run are caught there
            yield futures[future], future.result() if error is None else {"error": f"{type(error).__name__}: {error}"}


def _watched(work: Work, run: Run, threads: int) -> dict[str, Any]:
    """Return the metrics of a run, or its error message: the other runs continue."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    begin = time.perf_counter()
    try:
        return {**work(run), "seconds": round(time.perf_counter() - begin, 2)}
    except InputError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _mend(file: Path) -> None:
    """Terminate a line that was cut off when its process was killed."""
    lines = read_lines(file)
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    if file.exists() and file.read_text(encoding="utf-8") != whole:
        file.write_text(whole, encoding="utf-8")


def _key(line: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    return json.dumps({name: line.get(name) for name in names}, sort_keys=True)
