"""The kernels of single ops against their other forms: milliseconds, and the share of the memory's speed reached.

    python benchmarks/ops.py                    # on a GPU: 32,768 tokens in bfloat16
    python benchmarks/ops.py --ops light_conv --tiles
    TRITON_INTERPRET=1 python benchmarks/ops.py --device cpu --tokens 128 --repeats 1

Times are medians of the device's own time: on a GPU each form is recorded once as a CUDA graph and replayed after the
second cache was overwritten, so that neither launches nor what the last call left behind count. "must move" is what
comes in and goes out, once each; GB/s is that over the time. --tiles times each kernel alone with several tiles.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.ops import conv
from bertsmith.ops.conv.inputs import DepthwiseInputs, LightConvInputs
from bertsmith.ops.dispatch import Forms
from bertsmith.ops.kernels.spans import Spans, by_row
from bertsmith.ops.kernels.tiles import Tile

Call = Callable[[], object]


@dataclass(frozen=True)
class Tuned:
    """A kernel's launch function with all but its tile given, and what to try: arguments by name."""

    launch: Callable[..., object]
    tries: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One op at one shape."""

    op: Callable[..., Tensor]
    """Called with the tensors and `backend`."""
    tensors: list[Tensor]
    forms: Forms[Any]
    inputs: Any
    """What the forms are asked whether they can compute."""
    compared: list[str]
    """The other forms."""
    forward_bytes: int
    training_bytes: int
    kernels: dict[str, Tuned] = field(default_factory=dict)


def main() -> None:
    options = _options()
    about = f"{options.tokens} tokens in sequences of {options.length}, {options.dtype}, {options.heads} heads"
    print(f"torch {torch.__version__}, {_device_name(options)}, {about}, {options.taps} taps, medians in ms")
    if not options.tiles:
        print("\n| op | head width | form | forward | GB/s | ratio | forward + backward | GB/s | ratio |")
        print("|---|---|---|---|---|---|---|---|---|")
    for name in options.ops:
        for head_width in options.head_widths:
            torch.manual_seed(0)
            case = OPS[name](options, head_width)
            if options.tiles:
                _print_tiles(name, head_width, case, options)
            else:
                _print_forms(name, head_width, case, options)


def _print_forms(name: str, head_width: int, case: Case, options: argparse.Namespace) -> None:
    first: list[float] = []
    for label, op in _ways(case, options):
        times = [_milliseconds(call, options) for call in (_inference(op, case), _training(op, case))]
        first = first or times
        cells = []
        for ours, spent, moved in zip(first, times, (case.forward_bytes, case.training_bytes), strict=True):
            cells += [f"{spent:.3f}", f"{moved / spent / 1e6:.0f}", f"{spent / ours:.2f}"]
        print(f"| {name} | {head_width} | {label} | " + " | ".join(cells) + " |", flush=True)
    moved = f"{case.forward_bytes / 1e6:.1f} | | | {case.training_bytes / 1e6:.1f} | | |"
    print(f"| {name} | {head_width} | must move, MB | {moved}", flush=True)


def _ways(case: Case, options: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """The forms by name; those of plain PyTorch as they are and, on a GPU, through the compiler."""
    if case.forms["triton"].unsupported(case.inputs) is None:
        yield "triton", partial(case.op, backend="triton")
    for form in case.compared:
        way = partial(case.op, backend=form)
        if options.device == "cuda":
            torch._dynamo.reset()
            yield f"{form} compiled", torch.compile(way, dynamic=False)
        yield form, way


def _inference(op: Callable[..., Tensor], case: Case) -> Call:
    def infer() -> None:
        with torch.no_grad():
            op(*case.tensors)

    return infer


def _training(op: Callable[..., Tensor], case: Case) -> Call:
    leaves = [tensor.detach().requires_grad_() for tensor in case.tensors]
    upstream = torch.randn_like(op(*leaves).detach())
    return lambda: torch.autograd.grad(op(*leaves), leaves, upstream)


def _print_tiles(name: str, head_width: int, case: Case, options: argparse.Namespace) -> None:
    for kernel, tuned in case.kernels.items():
        found = []
        for arguments in tuned.tries:
            try:
                found.append((_milliseconds(partial(tuned.launch, **arguments), options), arguments))
            except Exception as error:  # a tile may ask for more than the device has
                print(f"{name} {head_width} {kernel}: {_words(arguments)}: {type(error).__name__}")
        found.sort(key=lambda pair: pair[0])
        for place, (spent, arguments) in enumerate(found):
            print(f"{name} {head_width} {kernel}: {spent:.4f} {_words(arguments)}{'' if place else '  <- best'}")


def _words(arguments: dict[str, Any]) -> str:
    cut = arguments["cut"]
    words = f"{cut.rows} rows, {cut.columns} columns, {cut.warps} warps"
    return words + "".join(f", {name} {value}" for name, value in arguments.items() if name != "cut")


def _light_conv(options: argparse.Namespace, head_width: int) -> Case:
    layout, shape = _lying(options)
    # a part of one projection, as a mixer has it
    value = _numbers(options, *shape, 4, options.heads, head_width).unbind(-3)[3]
    scores = _numbers(options, *shape, options.heads, options.taps)
    size = value.element_size()
    values, kernels = value.numel() * size, scores.numel() * size
    return Case(
        op=partial(conv.light_conv, layout=layout),
        tensors=[value, scores],
        forms=conv.FORMS,
        inputs=LightConvInputs(value, scores, layout),
        compared=["taps"],
        forward_bytes=2 * values + kernels,
        training_bytes=5 * values + 3 * kernels,
        kernels=_light_conv_kernels(value, scores, layout) if options.tiles else {},
    )


def _light_conv_kernels(value: Tensor, scores: Tensor, layout: SequenceLayout) -> dict[str, Tuned]:
    from bertsmith.ops.conv.kernels import light

    spans, columns = Spans.of(layout, value.device), _columns(value.shape[-1])
    value, scores = by_row(value, layout), by_row(scores, layout)
    settings = (spans.first, spans.length, None, spans.longest, 0, scores.shape[-1] // 2, 0.0, False)
    mixed, normaliser = light.forward(value, scores, *settings)
    tries = [
        {"cut": Tile(numbers // columns, columns, warps)}
        for numbers, warps in ((512, 1), (1024, 1), (1024, 2), (1024, 4), (2048, 2), (2048, 4), (2048, 8), (4096, 8))
    ]
    return {
        "forward": Tuned(partial(light.forward, value, scores, *settings), tries),
        "backward": Tuned(partial(light.backward, mixed, value, scores, normaliser, *settings), tries),
    }


def _depthwise(options: argparse.Namespace, head_width: int) -> Case:
    layout, shape = _lying(options)
    width = 2 * options.heads * head_width  # as ConvBERT has it: half the heads convolve
    hidden, kernel = _numbers(options, *shape, width), _numbers(options, width, options.taps)
    moved = hidden.numel() * hidden.element_size()
    return Case(
        op=partial(conv.depthwise, layout=layout),
        tensors=[hidden, kernel],
        forms=conv.DEPTHWISE_FORMS,
        inputs=DepthwiseInputs(hidden, kernel, layout),
        compared=["taps"],
        forward_bytes=2 * moved,
        training_bytes=5 * moved,
        kernels=_depthwise_kernels(hidden, kernel, layout) if options.tiles else {},
    )


def _depthwise_kernels(hidden: Tensor, kernel: Tensor, layout: SequenceLayout) -> dict[str, Tuned]:
    from bertsmith.ops.conv.kernels import depthwise

    spans, hidden = Spans.of(layout, hidden.device), by_row(hidden, layout)
    places, taps = (spans.first, spans.length, spans.longest), kernel.shape[1]
    tries = [
        {"cut": Tile(rows, columns, warps)}
        for rows, columns, warps in (
            (16, 64, 2),
            (16, 64, 4),
            (32, 64, 4),
            (64, 64, 8),
            (16, 128, 4),
            (32, 128, 8),
            (8, 256, 4),
            (16, 256, 8),
        )
    ]
    sums = [
        {"cut": Tile(rows, columns, warps), "most_shares": shares}
        for rows, columns, warps in ((1, 256, 4), (2, 256, 4), (2, 256, 8), (4, 128, 4))
        for shares in (61, 127, 251)
    ]
    return {
        "forward": Tuned(partial(depthwise.convolve, hidden, kernel, *places, 0, taps // 2, hidden.dtype), tries),
        "kernel's gradient": Tuned(partial(depthwise.kernel_gradient, hidden, hidden, taps, *places, taps // 2), sums),
    }


OPS: dict[str, Callable[[argparse.Namespace, int], Case]] = {"light_conv": _light_conv, "depthwise": _depthwise}
"""The cases by the op's name, made from the options and a head width."""


def _lying(options: argparse.Namespace) -> tuple[SequenceLayout, tuple[int, ...]]:
    """Sequences of equal length, and the shape of what lies so."""
    batch = options.tokens // options.length
    if not options.packed:
        return SequenceLayout.full(batch, options.length), (batch, options.length)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=options.device) * options.length
    return SequenceLayout.packed(starts, options.length), (batch * options.length,)


def _numbers(options: argparse.Namespace, *shape: int) -> Tensor:
    return torch.randn(*shape, device=options.device, dtype=getattr(torch, options.dtype))


def _columns(width: int) -> int:
    """The next power of two."""
    return 1 << (width - 1).bit_length()


def _milliseconds(call: Call, options: argparse.Namespace) -> float:
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


def _clocked(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _device_name(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if options.device == "cuda" else options.device


def _names(text: str) -> list[str]:
    return text.split(",")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--ops", default=list(OPS), type=_names, help=f"some of {','.join(OPS)}")
    parser.add_argument("--tokens", default=32768 if has_gpu else 1024, type=int)
    parser.add_argument("--length", default=512, type=int, help="of a sequence")
    parser.add_argument("--packed", action="store_true", help="sequences one after the other instead of rows")
    parser.add_argument("--heads", default=6, type=int)
    widths = [32, 48, 64, 128] if has_gpu else [32]
    parser.add_argument("--head-widths", default=widths, type=lambda text: [int(n) for n in _names(text)])
    parser.add_argument("--taps", default=9, type=int)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="bfloat16 on a GPU, else float32")
    parser.add_argument("--repeats", default=100 if has_gpu else 5, type=int)
    parser.add_argument("--tiles", action="store_true", help="time each kernel with several tiles instead")
    options = parser.parse_args()
    if unknown := set(options.ops) - set(OPS):
        parser.error(f"--ops: {', '.join(sorted(unknown))}; allowed: {', '.join(OPS)}")
    options.length = min(options.length, options.tokens)
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


if __name__ == "__main__":
    main()
