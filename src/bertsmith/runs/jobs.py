"""Run independent jobs: in this process, or in several processes side by side on one device.

An executor takes a `JobOrder` and later returns its outcome; it knows neither tables nor dependencies.
"""

import contextlib
import gc
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from bertsmith.data.devices import device_type
from bertsmith.errors import InputError
from bertsmith.files import read_json
from bertsmith.recipes import resolve_base
from bertsmith.reproduction.measurements import MEASUREMENTS
from bertsmith.runs.convert import convert_model
from bertsmith.runs.corpus import corpus
from bertsmith.runs.evaluate import evaluate
from bertsmith.runs.finetune import finetune
from bertsmith.runs.inspect import inspect
from bertsmith.runs.output import RESULT, claim, write_result
from bertsmith.runs.pretrain import run_pretraining
from bertsmith.runs.shrink import shrink
from bertsmith.runs.tokenizer import tokenizer
from bertsmith.settings import Plain
from bertsmith.toml import to_toml
from bertsmith.training.pretraining import PretrainSettings

Outcome = dict[str, Any]
"""`result` (the content of result.json) and `seconds`, or `error`."""
MAX_IDLE_WORKERS = 6
"""Processes kept on a GPU beside the active ones, because they have compiled the network of their jobs."""
_PRELOADED = ["torch", "accelerate", "bertsmith.runs.jobs"]


@dataclass(frozen=True)
class JobOrder:
    """One run with all paths."""

    key: str
    command: str
    settings: Plain
    folder: Path
    device: str
    affinity: str = ""
    """Orders of equal affinity compile the same network; orders without one compile none and share processes."""


class Executor(Protocol):
    """Runs orders. To add one, such as a cluster, implement these three methods."""

    slots: int
    """Number of orders that may run at the same time."""

    def submit(self, order: JobOrder) -> None:
        """Start an order; at most `slots` may be unfinished."""

    def wait(self) -> tuple[str, Outcome]:
        """Wait for the next order to end; return its key and outcome."""

    def close(self) -> None:
        """End all processes."""


def make_executor(processes: int, device: str) -> Executor:
    """Return the executor for a number of processes on one device."""
    return ThisProcess() if processes == 1 else LocalProcesses(processes, device)


class ThisProcess:
    """Runs one order at a time, in this process."""

    slots = 1

    def __init__(self) -> None:
        self._outcomes: list[tuple[str, Outcome]] = []

    def submit(self, order: JobOrder) -> None:
        self._outcomes.append((order.key, execute(order)))

    def wait(self) -> tuple[str, Outcome]:
        return self._outcomes.pop(0)

    def close(self) -> None:
        pass


class LocalProcesses:
    """Runs orders side by side in worker processes; a worker that dies loses only its own order."""

    def __init__(self, processes: int, device: str) -> None:
        self.slots = processes
        is_gpu = device_type(device) == "cuda"
        self._max_workers = processes + (MAX_IDLE_WORKERS if is_gpu else 0)
        self._threads = max(1, (os.cpu_count() or 1) // processes)
        # for libraries that use all cores by default; the fork server passes them on
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
            os.environ[name] = str(self._threads)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)  # importing PyTorch takes seconds per process
        self._workers: list[_Worker] = []

    def submit(self, order: JobOrder) -> None:
        for worker in [worker for worker in self._workers if worker.order is None and not worker.process.is_alive()]:
            self._end(worker)
        idle = [worker for worker in self._workers if worker.order is None]
        chosen = next((worker for worker in idle if worker.affinity == order.affinity), None)
        if chosen is None and len(self._workers) >= self._max_workers:
            self._end(idle[0])  # idle for longest
        if chosen is None:
            chosen = self._start()
        self._workers.remove(chosen)
        self._workers.append(chosen)
        chosen.order, chosen.affinity = order, order.affinity
        chosen.connection.send(order)

    def wait(self) -> tuple[str, Outcome]:
        ready = wait([worker.connection for worker in self._workers if worker.order is not None])
        worker = next(worker for worker in self._workers if worker.connection in ready)
        assert worker.order is not None
        key, worker.order = worker.order.key, None
        try:
            outcome: Outcome = worker.connection.recv()
        except (EOFError, OSError):  # OSError: the connection is reset
            worker.process.join()
            outcome = {"error": f"its process ended with exit code {worker.process.exitcode}"}
            self._end(worker)
        return key, outcome

    def close(self) -> None:
        for worker in list(self._workers):
            self._end(worker)

    def _start(self) -> "_Worker":
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._threads), daemon=False)
        process.start()
        there.close()
        worker = _Worker(process, here)
        self._workers.append(worker)
        return worker

    def _end(self, worker: "_Worker") -> None:
        self._workers.remove(worker)
        worker.connection.close()
        if worker.order is not None:
            worker.process.terminate()
        worker.process.join()


@dataclass
class _Worker:
    process: BaseProcess
    connection: "Connection[Any, Any]"
    order: JobOrder | None = None
    """The order in progress."""
    affinity: str = ""


def _serve(connection: "Connection[Any, Any]", threads: int) -> None:
    """Execute orders until the other end of the pipe is closed."""
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            connection.send(execute(connection.recv()))


def execute(order: JobOrder) -> Outcome:
    """Run one order; its output goes to a log file beside its folder. Errors are returned, not raised."""
    order.folder.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    with (
        Path(f"{order.folder}.log").open("w", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of many runs, none would be read
        try:
            result = RUNNERS[order.command](order)
            return {"result": result, "seconds": round(time.perf_counter() - begin, 2)}
        except InputError as error:
            return {"error": str(error)}
        except Exception as error:
            log.write(f"{type(error).__name__}: {error}\n")
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def _run_pretrain(order: JobOrder) -> Plain:
    settings = PretrainSettings.parse(resolve_base(_for_device(order)), source=order.key)
    run_pretraining(settings, order.folder, device=order.device, force=True, prints=False)
    return _finished(order)


def _run_with_recipe(command: Callable[..., object]) -> Callable[[JobOrder], Plain]:
    def run(order: JobOrder) -> Plain:
        recipe = Path(f"{order.folder}.toml")
        recipe.write_text(to_toml(_for_device(order)), encoding="utf-8")
        command(recipe=recipe, out=order.folder, device=order.device, force=True)
        return _finished(order)

    return run


def _run_with_arguments(command: Callable[..., object], has_device: bool) -> Callable[[JobOrder], Plain]:
    def run(order: JobOrder) -> Plain:
        device = {"device": order.device} if has_device else {}
        command(**order.settings, out=order.folder, force=True, **device)
        return _finished(order)

    return run


def _run_measurement(order: JobOrder) -> Plain:
    settings = dict(order.settings)
    result = dict(MEASUREMENTS[settings.pop("what")](**settings, device=order.device))
    claim(order.folder, True)
    write_result(order.folder, result)
    return result


RUNNERS: dict[str, Callable[[JobOrder], Plain]] = {
    "tokenizer": _run_with_arguments(tokenizer, has_device=False),
    "corpus": _run_with_arguments(corpus, has_device=False),
    "pretrain": _run_pretrain,
    "finetune": _run_with_recipe(finetune),
    "shrink": _run_with_recipe(shrink),
    "convert": _run_with_arguments(convert_model, has_device=True),
    "evaluate": _run_with_arguments(evaluate, has_device=True),
    "inspect": _run_with_arguments(inspect, has_device=False),
    "measure": _run_measurement,
}
"""Function of every command of a table."""


def _for_device(order: JobOrder) -> Plain:
    """Return the settings without compilation on a CPU, where it would take longer than the run."""
    run = order.settings.get("run", {})
    if device_type(order.device) == "cuda" or "compile" not in run:
        return order.settings
    return {**order.settings, "run": {**run, "compile": "off"}}


def _finished(order: JobOrder) -> Plain:
    """Return the result of a run; raise KeyboardInterrupt if a signal ended it."""
    result: Plain = read_json(order.folder / RESULT) if (order.folder / RESULT).is_file() else {}
    if not result.get("is_finished", bool(result)):
        raise KeyboardInterrupt
    return result
