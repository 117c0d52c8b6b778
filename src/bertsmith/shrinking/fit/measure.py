"""Time artefacts in fresh processes; describe this machine and its software."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, Protocol

from bertsmith import __version__
from bertsmith.errors import InputError
from bertsmith.settings import Record

MEGABYTE = 1_000_000  # bytes
BUSY = 0.9
"""Processor share below which other programs disturbed a measurement."""
MAX_ATTEMPTS = 3
"""Attempts to measure without disturbance."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


Latencies = dict[str, dict[str, float]]
"""By workload: p50, p95 and mean in milliseconds, and the number of runs."""


class Workload(Record):
    """Sequence lengths, timed in turn."""

    name: str
    lengths: tuple[int, ...]


class Conditions(Record):
    """Workloads, batch size, threads and layout of the timed calls."""

    workloads: tuple[Workload, ...]
    batch: int = 1
    threads: int = 1
    layout: Literal["packed", "padded"] = "packed"


class Job(Conditions):
    """Artefacts and conditions that one process times."""

    folders: tuple[str, ...]
    runs: int
    seconds: float


@dataclass(frozen=True)
class Timing:
    """Timings of several artefacts by one process."""

    latencies: list[Latencies]
    """One entry per artefact."""
    memory_mb: float
    memory_of_model_mb: float
    """Increase of the memory of the process since before it opened an artefact."""
    processor_share: float = 1.0
    """CPU time per elapsed time; below 1 if other programs used the cores."""


@dataclass(frozen=True)
class ProcessTiming:
    """Timing of one artefact by one process."""

    latency: Latencies
    memory_mb: float
    memory_of_model_mb: float
    processor_share: float = 1.0


@dataclass(frozen=True)
class ArtefactScore:
    """Score of an artefact on dev."""

    metric: str
    score: float
    metrics: dict[str, float]
    interval: Sequence[float] | None
    """95 % confidence interval of the score, if the metric has one."""

    @property
    def value(self) -> dict[str, object]:
        """The score as a measurement to store."""
        interval = {} if self.interval is None else {"interval": list(self.interval)}
        return {"metric": self.metric, "score": self.score, "metrics": self.metrics, **interval}


class Measurer(Protocol):
    """A function that times artefacts."""

    def __call__(self, folders: Sequence[Path], conditions: Conditions, runs: int, seconds: float) -> Timing: ...


def least_disturbed(
    measurer: Measurer, folders: Sequence[Path], conditions: Conditions, runs: int, seconds: float
) -> Timing:
    """Time artefacts, again if other programs used the processor; return the least disturbed timing."""
    timings: list[Timing] = []
    while len(timings) < MAX_ATTEMPTS and all(timing.processor_share < BUSY for timing in timings):
        timings.append(measurer(folders, conditions, runs, seconds))
    return max(timings, key=lambda timing: timing.processor_share)


def in_fresh_process(folders: Sequence[Path], conditions: Conditions, runs: int, seconds: float) -> Timing:
    """Time artefacts in a new process."""
    job = Job(
        folders=tuple(str(folder.resolve()) for folder in folders), runs=runs, seconds=seconds, **dict(conditions)
    )
    environment = {**os.environ, **dict.fromkeys(_THREADS, str(conditions.threads))}
    command = [sys.executable, "-m", "bertsmith.shrinking.fit.worker"]
    completed = subprocess.run(
        command, input=json.dumps(job.plain()), env=environment, capture_output=True, text=True, check=False
    )
    if completed.returncode != 0:
        reason = (completed.stderr.strip() or f"exit code {completed.returncode}").splitlines()[-1]
        raise InputError(f"measuring {folders[0].name!r} failed: {reason}")
    return Timing(**json.loads(completed.stdout.strip().splitlines()[-1]))


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor."""
    file = Path("/proc/cpuinfo")
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _family() -> str:
    """Return family, model and stepping, because virtual machines give different processors the same name."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return ""
    lines = (line.partition(":") for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    keys = ("cpu family", "model", "stepping")
    values = {name.strip(): value.strip() for name, _, value in lines if name.strip() in keys}
    return ".".join(values.get(key, "") for key in keys)


def fingerprint() -> dict[str, str | int]:
    """Return processor, cores and system: the machine that a measurement is valid for."""
    return {
        "processor": processor(),
        "family": _family(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(engine: str) -> dict[str, str]:
    """Return the versions of the packages that an engine uses."""
    packages = ["torch", *(["onnxruntime"] if engine == "onnxruntime" else [])]
    installed = {"bertsmith": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed
