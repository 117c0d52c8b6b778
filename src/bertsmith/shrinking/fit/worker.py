"""Worker process that times artefacts: reads a job from stdin, prints the timings as the last line of stdout.

    python -m bertsmith.shrinking.fit.worker < job.json

Several artefacts take turns, a block of calls at a time, so that noise affects all of them alike.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bertsmith.data.batch import packed, padded
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.artefact import open_runner
from bertsmith.engines.base import Runner
from bertsmith.shrinking.fit.measure import MEGABYTE, Job, Latencies, Timing, Workload

BLOCK, UNCOUNTED = 12, 2  # calls per turn, and first calls not timed because another artefact filled the caches
WARM_UP = 10
MIN_CALLS = 20
Input = tuple[Tensor, SequenceLayout, Tensor | None]


def main() -> None:
    job = Job.parse(json.load(sys.stdin), source="job")
    print(f"\n{json.dumps(asdict(measure(job)))}", flush=True)


@torch.no_grad()
def measure(job: Job) -> Timing:
    """Time every artefact on every workload, and measure the peak memory of the process."""
    torch.set_num_threads(job.threads)
    empty = peak_memory()
    runners = [open_runner(Path(folder), threads=job.threads) for folder in job.folders]
    latencies: list[Latencies] = [{} for _ in runners]
    computed = elapsed = 0.0
    for workload in job.workloads:
        calls = [inputs(runner, workload, job) for runner in runners]
        for runner, runner_calls in zip(runners, calls, strict=True):
            for call in (*runner_calls, *runner_calls[:1] * WARM_UP):
                runner.outputs(*call)
        start = time.process_time()
        measured = _time_in_turns(runners, calls, job)
        computed, elapsed = computed + time.process_time() - start, elapsed + sum(map(sum, measured))
        for latency, times in zip(latencies, measured, strict=True):
            p50, p95 = (1e3 * float(value) for value in np.percentile(times, (50, 95)))
            latency[workload.name] = {"p50": p50, "p95": p95, "mean": 1e3 * float(np.mean(times)), "runs": len(times)}
    peak = peak_memory()
    return Timing(latencies, peak, peak - empty, min(1.0, computed / max(elapsed, 1e-9)))


def inputs(runner: Runner, workload: Workload, job: Job) -> list[Input]:
    """Return a batch of random tokens for every length of a workload."""
    generator = np.random.default_rng(0)
    pack = packed if job.layout == "packed" else padded
    config = runner.config.encoder
    batches: list[Input] = []
    for length in workload.lengths:
        rows = list(generator.integers(0, config.vocabulary, (job.batch, length)))
        tokens, layout = pack(rows, 0)
        batches.append((tokens, layout, torch.zeros_like(tokens) if config.embedding.types > 1 else None))
    return batches


def _time_in_turns(runners: Sequence[Runner], calls: Sequence[Sequence[Input]], job: Job) -> list[list[float]]:
    """Time the calls of every runner, in turns; return the seconds of each call."""
    times: list[list[float]] = [[] for _ in runners]
    end = time.perf_counter() + job.seconds * len(runners)
    is_alone = len(runners) == 1
    while len(times[-1]) < job.runs and (len(times[-1]) < MIN_CALLS or time.perf_counter() < end):
        for runner, runner_calls, seconds_of_calls in zip(runners, calls, times, strict=True):
            for index in range(BLOCK):
                call = runner_calls[(len(seconds_of_calls) + index) % len(runner_calls)]
                begin = time.perf_counter()
                runner.outputs(*call)
                seconds = time.perf_counter() - begin
                if is_alone or index >= UNCOUNTED:
                    seconds_of_calls.append(seconds)
    return times


def peak_memory() -> float:
    """Return the peak resident memory of this process in megabytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # not getrusage: it includes the memory of the parent process
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MEGABYTE
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / MEGABYTE


if __name__ == "__main__":
    main()
