"""What is measured under which conditions, in a fresh process each time."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Protocol

from bertsmith import __version__
from bertsmith.errors import InputError
from bertsmith.settings import Record

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Workload(Record):
    """Sequences of these lengths in turn."""

    name: str
    lengths: tuple[int, ...]


class Conditions(Record):
    """How calls are made."""

    workloads: tuple[Workload, ...]
    batch: int = 1
    threads: int = 1
    layout: Literal["packed", "padded"] = "packed"


class Job(Conditions):
    """What one process measures."""

    folders: tuple[str, ...]
    runs: int
    seconds: float


@dataclass(frozen=True)
class Timing:
    """What one process found."""

    latencies: list[dict[str, dict[str, float]]]
    """Of every artefact, by workload: p50, p95 and mean in milliseconds, and runs."""
    memory_mb: float
    memory_of_model_mb: float
    """Above that of the process before it opened anything."""
    processor_share: float = 1.0
    """Of the time that passed, that in which the process computed at all; less where others were given the cores."""


class Measurer(Protocol):
    """What times artefacts."""

    def __call__(self, folders: Sequence[Path], conditions: Conditions, runs: int, seconds: float) -> Timing: ...


def in_fresh_process(folders: Sequence[Path], conditions: Conditions, runs: int, seconds: float) -> Timing:
    """The timing of some artefacts by a process that does nothing else."""
    job = Job(
        folders=tuple(str(folder.resolve()) for folder in folders), runs=runs, seconds=seconds, **dict(conditions)
    )
    environment = {**os.environ, **dict.fromkeys(_THREADS, str(conditions.threads))}
    words = [sys.executable, "-m", "bertsmith.shrinking.fit.worker"]
    done = subprocess.run(
        words, input=json.dumps(job.plain()), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise InputError(f"measuring {folders[0].name!r} failed: {said}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return Timing(**found)


def usable_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name."""
    file = Path("/proc/cpuinfo")
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _family() -> str:
    """Numbers that tell processors of one name apart, which virtual machines hide behind a common one."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return ""
    lines = (line.partition(":") for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    wanted = ("cpu family", "model", "stepping")
    found = {name.strip(): value.strip() for name, _, value in lines if name.strip() in wanted}
    return ".".join(found.get(name, "") for name in wanted)


def fingerprint() -> dict[str, str | int]:
    """What must be equal for a measurement to hold: processor, cores, system."""
    return {
        "processor": processor(),
        "family": _family(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(engine: str) -> dict[str, str]:
    """The versions of what answers with an engine."""
    packages = ["torch", *(["onnxruntime"] if engine == "onnxruntime" else [])]
    found = {"bertsmith": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
