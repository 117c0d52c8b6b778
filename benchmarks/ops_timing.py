"""How benchmarks/ops.py measures one call: the device's time, the host's time, the device's time by kernel."""

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
    """Forward and backward, which gives the gradient of every tensor; None for those the op does not read."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    upstream = torch.randn_like(op(*leaves).detach())
    return lambda: torch.autograd.grad(op(*leaves), leaves, upstream, allow_unused=True)


def milliseconds(call: Call, options: Namespace) -> float:
    """The median of the device's own time; on a CPU that of the clock."""
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
    """What the host takes for one call, without waiting for the device: the median of a few runs of calls.

    A run is short, because a host whose queue of launches is full waits for the device. On a CPU the host does all.
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
    """(kernel, launches, device milliseconds) of one call, the mean of several, longest first."""
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
        if event.self_device_time_total > 0  # the host's own calls have none
    ]
    return sorted(found, key=lambda row: -row[2])


def _clocked(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
