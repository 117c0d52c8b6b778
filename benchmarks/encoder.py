"""Speed of our encoders and of other installed libraries: same sizes, same tokens, one process.

    python benchmarks/encoder.py --out rows.json                     # on a GPU: every family, length and peer
    python benchmarks/encoder.py --families bert,performer --lengths 8192 --modes layers --forms packed
    python benchmarks/encoder.py --only "deberta-v3 512" --skip flashdeberta,graphs
    python benchmarks/encoder.py --device cpu --size tiny --tokens 256 --lengths 32 --repeats 1 --modes eager

Training is forward and backward under bfloat16 autocast with float32 weights and dropout 0; the loss is the mean square
of the hidden states. Inference uses bfloat16 weights. Times are medians of device time. Rows are printed and written as
they are measured. Packages can also be unpacked into the folder named by the environment variable PEERS_SITE.
"""

import argparse
import json
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from encoder_bars import print_bars
from encoder_candidates import (
    FAMILIES,
    FORMS,
    MODES,
    MORE_FAMILIES,
    SIZES,
    Candidate,
    Work,
    even_work,
    mixed_work,
    ours,
)
from encoder_peers import add_site, peers
from encoder_tables import print_tables
from encoder_timing import KINDS, Row, ceiling, measure

_CROSSED = ("bert", "performer")
"""Families that are also measured at the lengths of --crossing, without other libraries."""


def main() -> None:
    options = _options()
    warnings.filterwarnings("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    add_site()
    options.ceiling = ceiling(options)
    about = {"torch": torch.__version__, "device": _device_name(options.device), "size": options.size}
    about |= {"tokens": options.tokens, "ceiling_tflops": round(options.ceiling / 1e12, 1)}
    print(json.dumps(about), flush=True)
    rows: list[Row] = [row for path in options.read for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    _measure_all(rows, about, options)
    columns = sorted({row["length"] for row in rows}, key=lambda column: (column == "mixed", column.rjust(9)))
    print(f"\n{about['device']}, torch {about['torch']}, {options.size} size, {options.tokens:,} tokens per batch")
    print(f"ceiling: {about['ceiling_tflops']:,} TFLOP/s in a large bfloat16 product")
    print_tables(rows, columns)
    print_bars(rows, [column for column in columns if column != "mixed"])


def _measure_all(rows: list[Row], about: dict[str, Any], options: argparse.Namespace) -> None:
    begin, reported = time.perf_counter(), set()
    for family in options.families:
        for work, with_peers in _works(family, options):
            candidates, missing = _candidates(family, work, options, with_peers)
            for name in missing:
                if name not in reported:
                    print(f"skipped: {name} is not installed", flush=True)
                reported.add(name)
            for candidate in candidates:
                if time.perf_counter() - begin > options.within:
                    print(f"stopped: {options.within:g} s have passed", flush=True)
                    return
                rows.append(measure(candidate, work, options))
                print(json.dumps(rows[-1]), flush=True)
                if options.out:
                    options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1), encoding="utf-8")
                if _is_broken(rows[-1]):
                    print("stopped: CUDA is unusable in this process after this error", flush=True)
                    return


def _works(family: str, options: argparse.Namespace) -> list[tuple[Work, bool]]:
    """Return the batches of a family, each with whether other libraries are measured on it."""
    lengths = dict.fromkeys(options.lengths, True)
    if family in _CROSSED and max(options.lengths, default=0) > max(options.crossing, default=0):
        lengths |= {length: False for length in options.crossing if length not in lengths}
    works = [(even_work(n, options.tokens, options.device), with_peers) for n, with_peers in sorted(lengths.items())]
    if options.mixed:
        works.append((mixed_work(options.mixed, options.tokens, options.device), True))
    return works


def _candidates(
    family: str, work: Work, options: argparse.Namespace, with_peers: bool
) -> tuple[list[Candidate], list[str]]:
    """Return all candidates and the names of missing packages; whole networks are compiled at few lengths only."""
    is_compiled = work.column in options.compile_lengths
    modes = [mode for mode in options.modes if is_compiled or mode in ("eager", "layers")]
    candidates, missing = [], []
    if with_peers and options.peer_modes:
        candidates, missing = peers(
            family, options.size, options.device, is_compiled=is_compiled, modes=options.peer_modes
        )
    candidates += ours(family, options.size, options.device, options.forms, modes)
    return [candidate for candidate in candidates if _is_selected(candidate, work, options)], missing


def _is_selected(candidate: Candidate, work: Work, options: argparse.Namespace) -> bool:
    words = {candidate.family, work.column, *candidate.name.split()}

    def matches(filters: list[str]) -> bool:
        return any(words.issuperset(each.split()) for each in filters)

    return (not options.only or matches(options.only)) and not matches(options.skip)


def _is_broken(row: Row) -> bool:
    errors = " ".join(row.get(f"{kind}_error", "") for kind in KINDS)
    return "CUDA error" in errors and "out of memory" not in errors


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"cpu ({platform.machine()})"


def _options() -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return [item.strip() for item in text.split(",") if item.strip()]

    def numbers(text: str) -> list[int]:
        return [int(item) for item in listed(text)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--families", default=list(FAMILIES), type=listed, help=f"any of {', '.join((*FAMILIES, *MORE_FAMILIES))}")
    add("--size", default="base", choices=SIZES)
    add("--lengths", default=[128, 512, 2048, 8192, 16384], type=numbers)
    add("--crossing", default=[4096], type=numbers, help="further lengths for our BERT and Performer")
    add("--tokens", default=32768, type=int, help="tokens per batch")
    add("--mixed", default=512, type=int, help="maximum of the mixed lengths; 0 to skip them")
    add("--forms", default=list(FORMS), type=listed, help="layouts of our encoders: packed, padded")
    add("--modes", default=["eager", "layers", "compiled"], type=listed, help=f"our modes: {', '.join(MODES)}")
    add("--peer-modes", default=["eager", "compiled"], type=listed, help="modes of other libraries; empty for none")
    add("--compile-lengths", default=["512"], type=listed, help="lengths (or mixed) for modes compiled and graphs")
    add("--kinds", default=list(KINDS), type=listed, help="train, infer")
    add("--repeats", default=30, type=int, help="maximum timed runs per row")
    add("--budget-seconds", default=0.7, type=float, help="seconds of timed runs per row, after at least three runs")
    add("--within", default=float("inf"), type=float, help="seconds after which no further row is measured")
    add("--only", default=[], type=listed, help="measure rows that match all words of an entry: family, name, length")
    add("--skip", default=[], type=listed, help="skip rows that match all words of an entry")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="write the rows as JSON")
    add(
        "--read", default=[], type=lambda text: [Path(item) for item in listed(text)], help="JSON files of earlier runs"
    )
    options = parser.parse_args()
    for name, allowed in (("families", (*FAMILIES, *MORE_FAMILIES)), ("modes", MODES), ("forms", FORMS)):
        unknown = [each for each in getattr(options, name) if each not in allowed]
        if unknown:
            parser.error(f"--{name} has {unknown[0]!r}; allowed: {', '.join(allowed)}")
    return options


if __name__ == "__main__":
    main()
