"""Measurement of one row of benchmarks/encoder.py: median time, peak memory and share of peak throughput."""

import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.models.config import EncoderConfig
from bertsmith.models.encoder import Encoder
from encoder_candidates import NO_ATTENTION, Candidate, Work, config_of

Row = dict[str, Any]
KINDS = ("train", "infer")


def measure(candidate: Candidate, work: Work, options: Namespace) -> Row:
    """Return the metrics of one row, or the first line of the error if training or inference fails."""
    row: Row = {"family": candidate.family, "name": candidate.name, "maker": candidate.maker, "mode": candidate.mode}
    row |= {"size": options.size, "length": work.column, "batch": len(work.lengths), "tokens": work.tokens}
    begin = time.perf_counter()
    module: nn.Module | None = None
    call: Callable[..., Any] | None = None
    args, kwargs = candidate.inputs(work)
    with candidate.around():
        for kind in options.kinds:
            try:
                if kind == "train" or module is None or candidate.inference is not None:
                    module = None  # free the first module, so that it does not count in the peak memory
                    module = _module(candidate, work, kind)
                if kind == "infer" and candidate.inference is None:
                    module.eval().to(torch.bfloat16)
                call = _call(module, candidate.mode)
                row |= _metrics(kind, _step(module, call, args, kwargs, kind, options.device), candidate, work, options)
            except Exception as error:  # one failing candidate must not end the benchmark
                row[f"{kind}_error"] = f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]
                module = None
            call = None
            _clear(options.device)
    row["seconds"] = round(time.perf_counter() - begin, 1)
    module = None
    torch._dynamo.reset()
    _clear(options.device)
    return row


def _module(candidate: Candidate, work: Work, kind: str) -> nn.Module:
    if kind == "infer" and candidate.inference is not None:
        return candidate.inference(work)
    return candidate.training(work)


def _call(module: nn.Module, mode: str) -> Callable[..., Any]:
    if mode == "eager":
        return module
    if mode == "layers":
        assert isinstance(module, Encoder), "only our encoders are compiled by layers"
        for block in module.blocks:
            if not hasattr(block.forward, "_torchdynamo_orig_callable"):
                block.forward = torch.compile(block.forward, dynamic=False)
        return module
    return torch.compile(module, mode="reduce-overhead" if mode == "graphs" else "default")


def _step(
    module: nn.Module, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], kind: str, device: str
) -> Callable[[], None]:
    """Return a function that runs one training step or one inference pass."""

    def train() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device, torch.bfloat16):
            loss = _states(call(*args, **kwargs)).float().pow(2).mean()
        loss.backward()
        for parameter in module.parameters():
            parameter.grad = None

    def infer() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            call(*args, **kwargs)

    return train if kind == "train" else infer


def _states(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _metrics(kind: str, step: Callable[[], None], candidate: Candidate, work: Work, options: Namespace) -> Row:
    milliseconds = median_ms(step, options)
    metrics: Row = {f"{kind}_ms": round(milliseconds, 3), f"{kind}_rate": round(work.tokens / milliseconds, 2)}
    if options.device == "cuda":
        metrics[f"{kind}_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if candidate.maker != NO_ATTENTION:
        passes = 3 if kind == "train" else 1  # the backward pass costs two forward passes
        flops = passes * model_flops(candidate.family, options.size, work)
        metrics[f"{kind}_share"] = round(flops / milliseconds * 1e3 / options.ceiling, 4)
    return metrics


def model_flops(family: str, size: str, work: Work) -> int:
    """Return the FLOP of one forward pass over the batch, without padding."""
    encoder = config_of(family, size, work.max_length).encoder
    lengths = {length: work.lengths.count(length) for length in set(work.lengths)}
    return sum(
        count * length * (encoder.flops(length) - _absent_flops(encoder, length)) for length, count in lengths.items()
    )


def _absent_flops(encoder: EncoderConfig, length: int) -> int:
    """Return the FLOP that `EncoderConfig.flops` counts for relative positions beyond the table of 2 · span rows.

    Without this correction, the share of DeBERTa at 16,384 tokens would be 2.5 times too large.
    """
    if encoder.relative is None:
        return 0
    absent = max(0, 2 * length - 2 * encoder.relative.span)
    mixers = [layer.mixer for layer in encoder.layers if isinstance(layer.mixer, DisentangledConfig)]
    return sum(2 * (mixer.content_to_position + mixer.position_to_content) * absent * encoder.width for mixer in mixers)


def ceiling(options: Namespace) -> float:
    """Return the FLOP/s of a large bfloat16 matrix product, as the peak throughput."""
    width = 8192 if options.device == "cuda" else 512
    left, right = (torch.randn(width, width, device=options.device, dtype=torch.bfloat16) for _ in range(2))
    timing = Namespace(device=options.device, repeats=30, budget_seconds=0.5)
    return 2 * width**3 / median_ms(lambda: torch.mm(left, right), timing) * 1e3


def median_ms(function: Callable[[], object], options: Namespace) -> float:
    """Return the median time of several runs in milliseconds, within the time budget of a row."""
    budget = options.budget_seconds
    function()  # compile and autotune
    _synchronise(options.device)
    begin = time.perf_counter()
    for _ in range(2):
        function()
        _synchronise(options.device)
        if time.perf_counter() - begin > budget:
            break
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # exclude the memory of autotuning
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < min(3, options.repeats) or (
        len(times) < options.repeats and time.perf_counter() - begin < budget
    ):
        times.append(_once_ms(function, options.device))
    return statistics.median(times)


def _once_ms(function: Callable[[], object], device: str) -> float:
    if device == "cuda":
        first, last = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda.synchronize()
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
