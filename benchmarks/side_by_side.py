"""Independent runs as processes side by side on one GPU, or one after the other; every one that is done is one line of
a file at once, and those that the file already has are not run again.
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

# imported once by the process that the others are copies of: twelve imports of PyTorch at a time take half a minute
_PRELOADED = ["torch", "accelerate", "bertsmith.runs.finetune", "bertsmith.training.finetuning"]


@dataclass(frozen=True)
class Run:
    """One run: what it depends on, and where what it needs lies on this machine."""

    record: Mapping[str, Any]
    """What it is found again by, JSON-ready: it stands in its line of the file as it is."""
    positions: Mapping[str, str] = field(default_factory=dict)
    """Paths, which are of no matter to the figures."""
    cost: float = 0.0
    """About how long it takes, in any unit: the longest begin first, so that none is waited for at the end."""

    @property
    def key(self) -> str:
        return _key(self.record, self.record)


Work = Callable[[Run], dict[str, Any]]
"""The figures of a run, and under "said" what is shown of them; a function of a module, so that other processes find
it."""


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of runs, up to one that was being written when its process was killed."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def lines_of(runs: Sequence[Run], lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines, without failures, that belong to these runs."""
    names = {frozenset(run.record): run.record for run in runs}
    wanted = {run.key for run in runs}
    done = (dict(line) for line in lines if "error" not in line)
    return [line for line in done if any(_key(line, record) in wanted for record in names.values())]


def run_all(work: Work, runs: Sequence[Run], out: Path, *, processes: int, threads: int = 1) -> int:
    """Carries out what the file does not have yet; returns how many failed, each with a line that says why."""
    have = {run.key for run in runs if lines_of([run], read_lines(out))}
    left = sorted((run for run in runs if run.key not in have), key=lambda run: -run.cost)
    out.parent.mkdir(parents=True, exist_ok=True)
    _mend(out)
    failed, begun = 0, time.perf_counter()
    print(f"{len(left)} runs to do, {len(runs) - len(left)} are done", file=sys.stderr, flush=True)
    for number, (run, metrics) in enumerate(_carried_out(work, left, processes, threads), start=1):
        said = metrics.pop("said", None) or metrics.get("error", "done")
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**run.record, **metrics}) + "\n")
        failed += "error" in metrics
        name = " ".join(str(run.record[part]) for part in ("model", "task") if part in run.record)
        where = f"{number}/{len(left)} after {time.perf_counter() - begun:.0f} s"
        print(f"{where}: {name} seed {run.record['seed']}: {said}", file=sys.stderr, flush=True)
    return failed


def _carried_out(work: Work, runs: Sequence[Run], processes: int, threads: int) -> Iterator[tuple[Run, dict[str, Any]]]:
    if processes == 1:
        for run in runs:
            yield run, _watched(work, run, threads)
        return
    # of libraries that count cores by themselves
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with ProcessPoolExecutor(min(processes, max(1, len(runs))), mp_context=context) as pool:
        futures: dict[Future[dict[str, Any]], Run] = {pool.submit(_watched, work, run, threads): run for run in runs}
        for future in as_completed(futures):
            error = future.exception()  # of a process that died: what a run raises is caught there
            yield futures[future], future.result() if error is None else {"error": f"{type(error).__name__}: {error}"}


def _watched(work: Work, run: Run, threads: int) -> dict[str, Any]:
    """The figures of a run, or the sentence it failed with: the others go on."""
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
    """Ends a line that was being written when its process was killed, so that the next is one of its own."""
    lines = read_lines(file)
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    if file.exists() and file.read_text(encoding="utf-8") != whole:
        file.write_text(whole, encoding="utf-8")


def _key(line: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    return json.dumps({name: line.get(name) for name in names}, sort_keys=True)
