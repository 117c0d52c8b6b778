"""Independent runs of tables, each a call of one command's function, in this process or in workers side by side."""

import contextlib
import gc
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertsmith import __version__
from bertsmith.data.devices import device_type
from bertsmith.data.executor import Executor, open_executor
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
"""`result` (the content of result.json), `seconds`, `device` and versions, or `error`."""
MAX_IDLE_WORKERS = 6
"""Processes kept on a GPU beside the active ones, because they have compiled the network of their jobs."""


@dataclass(frozen=True)
class JobOrder:
    """One run with all paths."""

    key: str
    command: str
    settings: Plain
    folder: Path
    device: str
    affinity: str = ""
    """Orders of equal affinity compile the same network; orders without one compile none and share workers."""


def open_jobs(processes: int, device: str, ray: str | None) -> Executor[JobOrder, Outcome]:
    """Return the executor of runs: `processes` side by side on the device, or per GPU of a Ray cluster."""
    threads = torch.get_num_threads() if processes == 1 else max(1, (os.cpu_count() or 1) // processes)
    is_gpu = device_type(device) == "cuda"
    return open_executor(
        partial(_prepare, threads),
        ray=ray,
        processes=processes,
        cores=threads,
        gpus=1 / processes if is_gpu else 0,
        spare=MAX_IDLE_WORKERS if is_gpu else 0,
    )


def _prepare(threads: int) -> Callable[[JobOrder], Outcome]:
    """Return the function of a worker."""
    torch.set_num_threads(threads)
    return execute


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
            seconds = round(time.perf_counter() - begin, 2)
            versions = {"torch": str(torch.__version__), "bertsmith": __version__}
            return {"result": result, "seconds": seconds, "device": device_name(order.device), **versions}
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


def device_name(device: str) -> str:
    """Return the name of the device of this machine."""
    return torch.cuda.get_device_name() if device_type(device) == "cuda" else f"CPU, {os.cpu_count()} cores"


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
