"""Time the kernels of single ops against their other implementations, with the share of the memory bandwidth.

    python benchmarks/ops.py                    # on a GPU: 32,768 tokens in bfloat16
    python benchmarks/ops.py --ops disentangled,favor,favor_causal --lengths 512,2048,8192
    python benchmarks/ops.py --ops short --packed --lengths 128 --tokens 65536
    python benchmarks/ops.py --ops light_conv,favor --tiles
    python benchmarks/ops.py --ops disentangled --profile
    python benchmarks/ops.py --ops vocabulary_loss,vocabulary_loss_and_samples --tokens 65536
    TRITON_INTERPRET=1 python benchmarks/ops.py --device cpu --tokens 64 --lengths 32 --repeats 1

Times are medians of device time. On a GPU each implementation is recorded once as a CUDA graph and replayed after the
L2 cache was overwritten, so that neither launches nor cached data count. "must move" is the number of bytes read and
written at least once; GB/s is this number over the time. "host ms" is the time in which the host launches a forward and
a backward pass of the kernels; on a CPU, computes them. --tiles times the kernel of each convolution with several tile
sizes; for attention it times the whole op, forward and backward, with the tile of one kernel changed, and reports
gradients that differ from those of the current tile. --profile lists device time by kernel.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops_attending import disentangled, favor, short
from ops_cases import Case, Tuned, biased_activation, depthwise, light_conv
from ops_timing import by_kernel, host_milliseconds, inference, milliseconds, training
from ops_vocabulary import vocabulary_loss
from turns import Turn, add_options

DIFFERENCE = 0.01
"""Maximum difference between the gradients of two tiles, relative to their norm, that counts as rounding."""


@dataclass(frozen=True)
class Op:
    """An op to time: `case` builds it from the options, a length, heads and head width; with its default shapes."""

    case: Callable[[argparse.Namespace, int, int, int], Case]
    heads: int
    head_widths: Sequence[int]


OPS = {
    "light_conv": Op(light_conv, 6, (32, 48, 64, 128)),
    "depthwise": Op(depthwise, 6, (32, 48, 64, 128)),
    "activation": Op(biased_activation, 12, (64,)),
    "short": Op(short, 12, (64,)),
    "disentangled": Op(disentangled, 12, (64,)),
    "favor": Op(favor, 12, (64,)),
    "favor_causal": Op(partial(favor, is_causal=True), 12, (64,)),
    "vocabulary_loss": Op(vocabulary_loss, 1, (64, 128, 768)),
    "vocabulary_loss_and_samples": Op(partial(vocabulary_loss, samples=True), 1, (64, 128, 768)),
}
"""Ops by name, with the shapes timed on a GPU."""
CPU_HEADS, CPU_HEAD_WIDTHS = 2, (32,)


def main() -> None:
    options = _options()
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    about = f"{options.tokens} tokens, {options.dtype}, {options.kernel_size} taps, {options.features} features"
    print(f"torch {torch.__version__}, {device}, {about}, medians in ms")
    show = _print_tiles if options.tiles else _print_profile if options.profile else _print_forms
    if show is _print_forms:
        columns = ["op", "length", "heads", "form", "forward", "GB/s", "ratio"]
        columns += ["forward + backward", "GB/s", "ratio", "host ms"]
        print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    is_gpu = options.device == "cuda"
    for name in options.ops:
        op = OPS[name]
        heads = options.heads or (op.heads if is_gpu else CPU_HEADS)
        for length in options.lengths:
            for head_width in options.head_widths or (op.head_widths if is_gpu else CPU_HEAD_WIDTHS):
                torch.manual_seed(0)
                case = op.case(options, length, heads, head_width)
                show((name, str(length), f"{heads} × {head_width}"), case, options)


def _print_forms(title: Sequence[str], case: Case, options: argparse.Namespace) -> None:
    reason = case.backends[case.kernel].unsupported(case.inputs)
    if reason is not None:
        _print_row(*title, f"{case.kernel}: none, {reason}", *[""] * 7)
    first: list[float] = []
    for label, op in _ways(case, options):
        try:
            calls = inference(op, case.tensors), training(op, case.tensors)
            for call in calls:
                call()
            with Turn.of(options):
                times = [milliseconds(call, options) for call in calls]
                host = f"{host_milliseconds(calls[1], options):.3f}" if label == case.kernel else ""
        except Exception as error:  # an implementation may need more memory than the device has
            _print_row(*title, f"{label}: {_line(error)}", *[""] * 7)
            continue
        first = first or times
        cells = []
        for ours, spent, moved in zip(first, times, (case.forward_bytes, case.training_bytes), strict=True):
            cells += [f"{spent:.3f}", f"{moved / spent / 1e6:.0f}", f"{spent / ours:.2f}"]
        _print_row(*title, label, *cells, host)
    moved = [f"{size / 1e6:.1f}" for size in (case.forward_bytes, case.training_bytes)]
    _print_row(*title, "must move, MB", moved[0], "", "", moved[1], "", "", "")


def _print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _ways(case: Case, options: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Return the implementations by name; those in plain PyTorch eager and, on a GPU, also compiled."""
    if case.backends[case.kernel].unsupported(case.inputs) is None:
        yield case.kernel, partial(case.op, backend=case.kernel)
    if options.only_kernel:
        return
    for form in case.compared:
        way = partial(case.op, backend=form)
        if options.device == "cuda" and case.is_compiled:
            torch._dynamo.reset()
            yield f"{form} compiled", torch.compile(way, dynamic=False)
        yield form, way
    yield from case.lines.items()


def _print_profile(title: Sequence[str], case: Case, options: argparse.Namespace) -> None:
    reason = case.backends[case.kernel].unsupported(case.inputs)
    if reason is not None:
        print(f"\n{' '.join(title)}: none, {reason}")
        return
    rows = by_kernel(training(partial(case.op, backend=case.kernel), case.tensors))
    print(f"\n{' '.join(title)}, forward + backward: {sum(spent for *_, spent in rows):.3f} ms on the device")
    for kernel, launches, spent in rows:
        print(f"{spent:9.4f} ms {launches:5.1f} × {kernel[:100]}", flush=True)


def _print_tiles(title: Sequence[str], case: Case, options: argparse.Namespace) -> None:
    reason = case.backends[case.kernel].unsupported(case.inputs)
    if reason is not None:
        print(f"{' '.join(title)}: none, {reason}")
        return
    for kernel, tuned in case.kernels().items():
        about = f"{' '.join(title)} {kernel}"
        found = []
        for arguments in tuned.tries:
            try:
                remark = _remark(tuned, arguments)
                found.append((milliseconds(partial(tuned.launch, **arguments), options), arguments, remark))
            except Exception as error:  # a tile may need more shared memory than the device has
                print(f"{about}: {_words(arguments)}: {_line(error)}")
        found.sort(key=lambda row: row[0])
        for position, (spent, arguments, remark) in enumerate(found):
            print(f"{about}: {spent:.4f} {_words(arguments)}{remark}{'' if position else '  <- best'}", flush=True)


def _remark(tuned: Tuned, arguments: dict[str, Any]) -> str:
    """Mark the current tile, and tiles with different gradients."""
    if tuned.now is None:
        return ""
    if arguments == tuned.now:
        return "  <- in use"
    pairs = zip(tuned.launch(**arguments), tuned.launch(**tuned.now), strict=True)
    apart = [((found.double() - now.double()).norm() / now.double().norm()).item() for found, now in pairs]
    # negated, so that NaN counts as a difference
    if all(distance <= DIFFERENCE for distance in apart):
        return ""
    return f"  WRONG: gradients are {', '.join(f'{distance:.2g}' for distance in apart)} apart"


def _words(arguments: dict[str, Any]) -> str:
    tiling = arguments.get("tiling")
    words = [f"{name} {value}" for name, value in arguments.items() if name != "tiling"]
    if tiling is not None:
        words = [
            f"{tiling.rows} rows, {tiling.columns} columns, {tiling.warps} warps, {tiling.stages} stages",
            *words,
        ]
    return ", ".join(words)


def _line(error: Exception) -> str:
    """Return the error as one line of a table."""
    text = (str(error).splitlines() or [""])[0].replace("|", "/")
    return f"{type(error).__name__}: {text[:100]}"


def _names(text: str) -> list[str]:
    return text.split(",")


def _whole_numbers(text: str) -> list[int]:
    return [int(part) for part in _names(text)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--ops", default=list(OPS), type=_names, help=f"some of {','.join(OPS)}")
    parser.add_argument("--tokens", default=32768 if has_gpu else 1024, type=int)
    parser.add_argument("--lengths", default=[512], type=_whole_numbers, help="sequence lengths, one table row each")
    parser.add_argument("--packed", action="store_true", help="packed sequences instead of padded rows")
    parser.add_argument("--heads", type=int, help=f"each op's own; on a CPU {CPU_HEADS}")
    parser.add_argument("--head-widths", type=_whole_numbers, help="each op's own; on a CPU 32")
    parser.add_argument("--taps", dest="kernel_size", default=9, type=int, help="of the convolutions")
    parser.add_argument("--features", default=256, type=int, help="of FAVOR+")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="bfloat16 on a GPU, else float32")
    parser.add_argument("--repeats", default=100 if has_gpu else 5, type=int)
    parser.add_argument("--only-kernel", action="store_true", help="without the other implementations")
    add_options(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--tiles", action="store_true", help="time the kernels with several tile sizes instead")
    instead.add_argument("--profile", action="store_true", help="list device time by kernel instead")
    options = parser.parse_args()
    if unknown := set(options.ops) - set(OPS):
        parser.error(f"--ops: {', '.join(sorted(unknown))}; allowed: {', '.join(OPS)}")
    if options.profile and options.device != "cuda":
        parser.error(f"--profile: the device is {options.device}; allowed: cuda")
    options.lengths = list(dict.fromkeys(min(length, options.tokens) for length in options.lengths))
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


if __name__ == "__main__":
    main()
