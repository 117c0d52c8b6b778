"""Compare two runs of one recipe and seed: the difference between their logs.

    bertsmith pretrain disentangled-small --data CORPUS --set run.steps=300 --out runs/once
    bertsmith pretrain disentangled-small --data CORPUS --set run.steps=300 --out runs/again
    python benchmarks/same_curve.py runs/once/log.jsonl runs/again/log.jsonl

Data order, masks and generator samples are functions of the seed: on a CPU the two logs are bitwise equal. On a GPU the
order of additions varies, so they diverge. For comparison, the table has the mean change of each metric from one row of
the log to the next.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from bertsmith.errors import InputError
from bertsmith.training.log import read_log

FIGURES = ("loss", "generator_loss", "generator_accuracy", "replaced_loss", "replaced_accuracy", "masked_tokens_loss")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs=2, type=Path, metavar="LOG", help="log.jsonl of a run")
    options = parser.parse_args()
    try:
        for log in options.logs:
            if not log.is_file():
                raise InputError(f"LOG is {str(log)!r}, which is not a file; give the log.jsonl of a run")
        print(table(*(read_log(log) for log in options.logs)))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def table(once: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]]) -> str:
    """Print the largest difference of every metric over the steps that both logs have."""
    lines = [
        "| | rows | first | last | largest difference | mean difference | mean change from row to row |",
        "|---" * 7 + "|",
    ]
    for kind in ("training", "held_out"):
        first, second = ({row["step"]: row for row in log if row["kind"] == kind} for log in (once, again))
        steps = sorted(first.keys() & second.keys())
        for figure in FIGURES:
            pairs = [(first[step][figure], second[step][figure]) for step in steps if figure in first[step]]
            if pairs:
                lines.append(_line(f"{figure}, {kind.replace('_', ' ')}", pairs))
    if len(lines) == 2:
        raise InputError("the two logs have no step in common")
    return "\n".join(lines)


def _line(name: str, pairs: Sequence[tuple[float, float]]) -> str:
    apart = [abs(one - other) for one, other in pairs]
    changes = [abs(after[0] - before[0]) for before, after in pairwise(pairs)] or [float("nan")]
    cells = [name, str(len(pairs)), f"{pairs[0][0]:.4f}", f"{pairs[-1][0]:.4f}"]
    cells += [f"{max(apart):.2g}", f"{fmean(apart):.2g}", f"{fmean(changes):.2g}"]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
