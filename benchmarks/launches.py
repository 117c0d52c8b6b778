"""Measure the launch settings of the FAVOR+ kernels on a GPU, and print the lines to paste into their tables.

    python benchmarks/launches.py                              # 64 sequences of 512 tokens, 12 heads of 64
    python benchmarks/launches.py --batch 1 --length 32768 --head-width 128 --kernels causal._scan,causal._read

A package table has one tile per dtype and head width, so nothing is searched when a model starts. Times are medians of
device time in milliseconds. A tile that does not fit into the GPU's memories is listed with its error.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.favor import draw
from bertsmith.ops.favor.fused import padded
from bertsmith.ops.favor.kernels import causal, causal_backward, memory, memory_backward, reading
from bertsmith.ops.favor.kernels.features import Curve
from bertsmith.ops.kernel_support import SequenceRows, Tile
from ops_timing import milliseconds

Kernel = Callable[[Tile | None], object]
CHUNK = 64
"""Positions of a causal chunk in half precision."""


def main() -> None:
    options = _options()
    kernels = {name: kernel for name, kernel in _kernels(options).items() if name in (options.kernels or [name])}
    for name, kernel in kernels.items():
        print(f"\n{name}, now {milliseconds(partial(kernel, None), options):.3f} ms")
        times: dict[Tile, float] = {}
        for tile in _candidates(name):
            try:
                times[tile] = milliseconds(partial(kernel, tile), options)
            except OutOfResources as error:
                print(f"  {tile}: {error}")
        for tile, time in sorted(times.items(), key=lambda entry: entry[1])[: options.best]:
            print(f"  ({options.dtype.itemsize}, {options.head_width}): {tile}  # {time:.3f} ms", flush=True)


def _candidates(name: str) -> list[Tile]:
    """Return the tiles to measure; a scan or sum keeps its block of features, other kernels loop over blocks."""
    is_sum = name.endswith(("_scan", "_gather"))
    columns, rows = ((64, 128, 256) if is_sum else (32, 64, 128)), (64,) if "causal" in name else (64, 128)
    return [Tile(*sizes) for sizes in itertools.product(rows, columns, (4, 8), (1, 2, 3))]


def _kernels(options: argparse.Namespace) -> dict[str, Kernel]:
    """Return every kernel as a function of its tile, on the outputs of the kernels before it."""
    batch, length, heads, width = options.batch, options.length, options.heads, options.head_width
    query, key, value, upstream = (
        torch.randn(batch * length, heads, width, device="cuda", dtype=options.dtype) for _ in range(4)
    )
    matrix = (draw(options.features, width) * width**-0.25).to("cuda", options.dtype)
    rows = SequenceRows.of(SequenceLayout.full(batch, length), query.device)
    curve, count = Curve(True, -0.5, 1e-6), padded(options.features)

    states, sums = causal.chunk_states(key, value, matrix, rows, curve, count, CHUNK)
    output = causal.read(query, key, value, matrix, rows, states, sums, curve, CHUNK)
    queries = query, key, value, upstream, matrix, rows, states, output
    _, total = causal_backward.query_gradient(*queries, curve, CHUNK)
    after = query, upstream, matrix, rows, states, output, total, curve, CHUNK
    later = causal_backward.sums_after(*after)

    means = memory.build_memory(key, value, matrix, rows, curve, count)
    result = reading.read(query, matrix, rows, means, curve)
    _, along = reading.query_gradient(query, upstream, matrix, rows, means, result, curve)
    gathered = query, upstream, matrix, rows, rows.length, means, result, along, curve
    by_query = memory_backward.sum_queries(*gathered)
    return {
        "causal._scan": lambda tile: causal.chunk_states(key, value, matrix, rows, curve, count, CHUNK, tile),
        # the number of blocks of `sums` is the scan's
        "causal._read": lambda tile: causal.read(query, key, value, matrix, rows, states, sums, curve, CHUNK, tile),
        "causal_backward._query_gradient": lambda tile: causal_backward.query_gradient(*queries, curve, CHUNK, tile),
        "causal_backward._scan": lambda tile: causal_backward.sums_after(*after, tile),
        "causal_backward._key_gradient": lambda tile: causal_backward.key_gradient(
            *queries, later, total, curve, CHUNK, tile
        ),
        "memory._gather": lambda tile: memory.build_memory(key, value, matrix, rows, curve, count, tile),
        "reading._read": lambda tile: reading.read(query, matrix, rows, means, curve, tile),
        "reading._query_gradient": lambda tile: reading.query_gradient(
            query, upstream, matrix, rows, means, result, curve, tile
        ),
        "memory_backward._gather": lambda tile: memory_backward.sum_queries(*gathered, tile),
        "memory_backward._key_gradient": lambda tile: memory_backward.key_gradient(
            key, value, matrix, rows, means.shift, by_query, curve, tile
        ),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default=64, type=int)
    parser.add_argument("--length", default=512, type=int)
    parser.add_argument("--heads", default=12, type=int)
    parser.add_argument("--head-width", default=64, type=int)
    parser.add_argument("--features", default=256, type=int)
    parser.add_argument(
        "--dtype", default=torch.bfloat16, type=lambda name: getattr(torch, name), help="half precision"
    )
    parser.add_argument("--kernels", type=lambda text: text.split(","), help="names, comma-separated; default: all")
    parser.add_argument("--best", default=3, type=int, help="tiles to print per kernel")
    parser.add_argument("--repeats", default=20, type=int)
    parser.set_defaults(device="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
