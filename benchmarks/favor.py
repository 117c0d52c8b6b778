"""Compare FAVOR+ with exact attention: error by number of features, and time by length.

    python benchmarks/favor.py                  # on a GPU if there is one, otherwise a smaller run on the CPU
    python benchmarks/favor.py --device cpu --picture docs/images/performer-error.png

Error: relative L2 error of the output against softmax attention in float64, queries and keys normal with standard
deviation --std, values with standard deviation 1; root mean square over draws. Hyperbolic and trigonometric features
have the same width as the others. Time: medians of attention alone, forward and forward with backward,
bfloat16 on a GPU and float32 on a CPU, against scaled_dot_product_attention. With --turn, the times are measured in a
turn of this process (benchmarks/turns.py).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.attention import attention
from bertsmith.ops.favor import FEATURE_MAPS, RandomFeatures, draw, favor
from turns import Turn, add_options

ESTIMATORS = {
    "softmax": ("softmax", True),
    "independent": ("softmax", False),
    "regularised": ("regularised", True),
    "hyperbolic": ("hyperbolic", True),
    "trigonometric": ("trigonometric", True),
}


def main() -> None:
    options = _options()
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads")
    errors = _errors(options)
    _print_errors(errors, options)
    if options.picture:
        _draw_errors(errors, options)
    if options.lengths:
        _print_times(options)


def _errors(options: argparse.Namespace) -> dict[str, list[float]]:
    """Print the error of every estimator for each number of features."""
    torch.manual_seed(options.seed)
    length, width = options.error_length, options.head_width
    layout = SequenceLayout.full(1, length)
    query, key = (options.std * torch.randn(1, length, 1, width, dtype=torch.float64) for _ in range(2))
    value = torch.randn(1, length, 1, width, dtype=torch.float64)
    exact = attention(query, key, value, layout)
    errors: dict[str, list[float]] = {}
    for name, (feature_map, is_orthogonal) in ESTIMATORS.items():
        rule = FEATURE_MAPS[feature_map]
        for features in options.features:
            squares = []
            for _ in range(options.draws):
                rows = features // len(rule.copies)
                matrix = draw(rows, width, is_orthogonal=is_orthogonal, has_constant_norms=rule.has_constant_norms)
                mixed = favor(query, key, value, RandomFeatures(matrix, feature_map), layout)
                squares.append(((mixed - exact).square().sum() / exact.square().sum()).item())
            errors.setdefault(name, []).append(statistics.mean(squares) ** 0.5)
    return errors


def _print_errors(errors: dict[str, list[float]], options: argparse.Namespace) -> None:
    about = f"head width {options.head_width}, standard deviation {options.std}, {options.error_length} tokens"
    print(f"\nrelative error of the output, {about}, {options.draws} draws")
    print("| features |" + "".join(f" {name} |" for name in errors))
    print("|---|" + "---|" * len(errors))
    for row, features in enumerate(options.features):
        print(f"| {features} |" + "".join(f" {values[row]:.3g} |" for values in errors.values()))


def _draw_errors(errors: dict[str, list[float]], options: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(ESTIMATORS, ["#1b4f72", "#7fb3d5", "#117864", "#b9770e", "#b03a2e"], strict=True))
    for name, values in errors.items():
        axes.loglog(options.features, values, marker="o", markersize=4, color=colours[name], label=name)
    last = errors["softmax"][-1]
    guide = [last * (options.features[-1] / features) ** 0.5 for features in options.features]
    axes.loglog(options.features, guide, color="#888888", linestyle=":", label="1/√features")
    axes.set_xticks(options.features, [str(features) for features in options.features])
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("features")
    axes.set_ylabel("relative error of the output")
    axes.set_title(f"FAVOR+ against softmax: head width {options.head_width}, σ = {options.std}", fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    Path(options.picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=160)


def _print_times(options: argparse.Namespace) -> None:
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    about = f"{options.heads} heads of width {options.head_width}, {options.time_features} features"
    print(f"\nmilliseconds of attention alone, {about}, batch 1, {str(dtype).removeprefix('torch.')}")
    print("| length | direction | SDPA | FAVOR+ | ratio | SDPA training | FAVOR+ training | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    matrix = draw(options.time_features, options.head_width).float().to(options.device)
    for length in options.lengths:
        shape = (1, length, options.heads, options.head_width)
        tensors = [torch.randn(shape, device=options.device, dtype=dtype, requires_grad=True) for _ in range(3)]
        layout = SequenceLayout.full(1, length)
        for is_causal in (False, True):
            full, linear = _candidates(tensors, matrix, layout, is_causal, options)
            cells = []
            for is_training in (False, True):
                calls = [_call(way, tensors, is_training) for way in (full, linear)]
                for call in calls:
                    call()
                with Turn.of(options):
                    slow, fast = (_median_ms(call, options) for call in calls)
                cells += [f"{slow:.1f}", f"{fast:.1f}", f"{slow / fast:.2f}"]
            print(f"| {length} | {'causal' if is_causal else 'both'} | " + " | ".join(cells) + " |", flush=True)


def _candidates(
    tensors: Sequence[Tensor], matrix: Tensor, layout: SequenceLayout, is_causal: bool, options: argparse.Namespace
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    query, key, value = tensors

    def full() -> Tensor:
        rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        return scaled_dot_product_attention(*rows, is_causal=is_causal)

    def linear() -> Tensor:
        return favor(query, key, value, RandomFeatures(matrix), layout, is_causal=is_causal)

    return full, torch.compile(linear) if options.compile else linear


def _call(way: Callable[[], Tensor], tensors: Sequence[Tensor], is_training: bool) -> Callable[[], None]:
    def infer() -> None:
        with torch.no_grad():
            way()

    def train() -> None:
        way().sum().backward()
        for tensor in tensors:
            tensor.grad = None

    return train if is_training else infer


def _median_ms(function: Callable[[], None], options: argparse.Namespace) -> float:
    function()
    times = []
    for _ in range(options.repeats):
        if options.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if options.device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--features", default=[64, 256, 1024, 4096], type=_numbers)
    parser.add_argument("--head-width", default=64, type=int)
    parser.add_argument("--std", default=0.5, type=float, help="standard deviation of queries and keys")
    parser.add_argument("--error-length", default=1024, type=int)
    parser.add_argument("--draws", default=10, type=int)
    parser.add_argument("--seed", default=0, type=int)
    lengths = [1024, 4096, 16384, 65536] if has_gpu else [512, 1024, 2048, 4096, 8192]
    parser.add_argument("--lengths", default=lengths, type=_numbers, help="lengths to time; '' for none")
    parser.add_argument("--heads", default=12 if has_gpu else 2, type=int)
    parser.add_argument("--time-features", default=256, type=int)
    parser.add_argument("--repeats", default=20 if has_gpu else 5, type=int)
    parser.add_argument("--compile", action="store_true", help="FAVOR+ through torch.compile")
    parser.add_argument("--picture", help="write the errors as a PNG")
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
