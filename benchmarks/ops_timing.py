"""Measurements of benchmarks/ops.py: device time, host time, and device time by kernel."""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Call = Callable[[], object]


def inference(op: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Call:
    def infer() -> None:
        with torch.no_grad():
            op(*tensors)

    return infer


def training(op: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Callable[[], tuple[Tensor | None, ...]]:
    """Return a forward and backward pass that returns the gradient of every tensor; None for unused ones."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    upstream = torch.randn_like(op(*leaves).detach())
    return lambda: torch.autograd.grad(op(*leaves), leaves, upstream, allow_unused=True)


def milliseconds(call: Call, options: Namespace) -> float:
    """Return the median device time; on a CPU, wall-clock time."""
    if options.device != "cuda":
        call()
        return statistics.median(_clocked(call) for _ in range(options.repeats))
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(options.repeats)]
    for begin, end in marks:
        cache.zero_()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def host_milliseconds(call: Call, options: Namespace) -> float:
    """Return the host time of one call without synchronising: the median over a few short series of calls.

    A series is short, because a host with a full launch queue waits for the device. On a CPU the host computes all.
    """
    calls, is_gpu = min(5, options.repeats), options.device == "cuda"

    def run() -> None:
        for _ in range(calls):
            call()

    run()
    spent = []
    for _ in range(min(20, options.repeats)):
        if is_gpu:
            torch.cuda.synchronize()
        spent.append(_clocked(run) / calls)
    return statistics.median(spent)


def by_kernel(call: Call, calls: int = 10) -> list[tuple[str, float, float]]:
    """Return (kernel, launches, device milliseconds) of one call, averaged over several, longest first."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = [
        (event.key, event.count / calls, event.self_device_time_total / calls / 1e3)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0  # host calls have no device time
    ]
    return sorted(found, key=lambda row: -row[2])


def _clocked(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
