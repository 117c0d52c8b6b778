"""Times artefacts in a process of its own: a job on standard input, its figures as the last line of standard output.

    python -m bertsmith.shrinking.fit.worker < job.json

Several artefacts take turns, some calls at a time, so that all of them see the same moments of the machine.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.data.batch import packed, padded
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.artefact import open_runner
from bertsmith.engines.base import Runner
from bertsmith.shrinking.fit.measure import Job, Workload
from bertsmith.shrinking.fit.settings import MEGABYTE

BLOCK, UNCOUNTED = 12, 2  # calls in a row, of which the first ones find foreign weights in the caches
WARM_UP = 10
FEWEST = 20
Input = tuple[Tensor, SequenceLayout, Tensor | None]


def main() -> None:
    job = Job.parse(json.load(sys.stdin), source="job")
    print(f"\n{json.dumps(timed(job))}", flush=True)


@torch.no_grad()
def timed(job: Job) -> dict[str, Any]:
    """The latencies of every artefact by workload, and the most memory the process took."""
    torch.set_num_threads(job.threads)
    empty = peak_memory()
    runners = [open_runner(Path(folder), threads=job.threads) for folder in job.folders]
    latencies: list[dict[str, Any]] = [{} for _ in runners]
    computed = passed = 0.0
    for workload in job.workloads:
        calls = [inputs(runner, workload, job) for runner in runners]
        for runner, own in zip(runners, calls, strict=True):
            for call in (*own, *own[:1] * WARM_UP):
                runner.outputs(*call)
        began = time.process_time()
        measured = _in_turn(runners, calls, job)
        computed, passed = computed + time.process_time() - began, passed + sum(map(sum, measured))
        for found, times in zip(latencies, measured, strict=True):
            p50, p95 = (1e3 * float(value) for value in np.percentile(times, (50, 95)))
            found[workload.name] = {"p50": p50, "p95": p95, "mean": 1e3 * float(np.mean(times)), "runs": len(times)}
    peak = peak_memory()
    memory = {"memory_mb": peak, "memory_of_model_mb": peak - empty}
    return {"latencies": latencies, **memory, "processor_share": min(1.0, computed / max(passed, 1e-9))}


def inputs(runner: Runner, workload: Workload, job: Job) -> list[Input]:
    """A batch for every length of a workload, of pieces drawn from the vocabulary."""
    generator = np.random.default_rng(0)
    lie = packed if job.layout == "packed" else padded
    config = runner.config.encoder
    made: list[Input] = []
    for length in workload.lengths:
        rows = list(generator.integers(0, config.vocabulary, (job.batch, length)))
        tokens, layout = lie(rows, 0)
        made.append((tokens, layout, torch.zeros_like(tokens) if config.embedding.types > 1 else None))
    return made


def _in_turn(runners: Sequence[Runner], calls: Sequence[Sequence[Input]], job: Job) -> list[list[float]]:
    """The seconds of each call of every runner."""
    times: list[list[float]] = [[] for _ in runners]
    end = time.perf_counter() + job.seconds * len(runners)
    is_alone = len(runners) == 1
    while len(times[-1]) < job.runs and (len(times[-1]) < FEWEST or time.perf_counter() < end):
        for runner, own, found in zip(runners, calls, times, strict=True):
            for place in range(BLOCK):
                call = own[(len(found) + place) % len(own)]
                begin = time.perf_counter()
                runner.outputs(*call)
                seconds = time.perf_counter() - begin
                if is_alone or place >= UNCOUNTED:
                    found.append(seconds)
    return times


def peak_memory() -> float:
    """The most resident memory this process had so far, in megabytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # not getrusage: that counts in what the process that started this one had
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MEGABYTE
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / MEGABYTE


if __name__ == "__main__":
    main()
