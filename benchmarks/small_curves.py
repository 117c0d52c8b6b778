"""Plot a pre-training run with replaced tokens: losses and accuracies against tokens and against time.

    python benchmarks/small_curves.py RUN/log.jsonl --out docs/images/small-curves.png

Lines are training metrics, smoothed over the pale logged values; dots are held-out metrics. Time is training time,
without evaluations and checkpoints. Needs matplotlib: bertsmith[report].
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import InputError
from bertsmith.report.pictures import INK, LINE, MUTED, SERIES
from bertsmith.training.log import read_log


@dataclass(frozen=True)
class Panel:
    """One row of the picture."""

    title: str
    lines: Mapping[str, str]
    """Legend of each line, by its column of the log."""
    scale: float = 1.0
    unit: str = ""


PANELS = (
    Panel("Loss of the generator", {"generator_loss": "generator"}, unit="nats per masked token"),
    Panel("Loss of the encoder", {"replaced_loss": "encoder"}, unit="nats per token"),
    Panel("MLM accuracy of the generator", {"generator_accuracy": "generator"}, 100.0, "per cent"),
    Panel(
        "Replaced-token detection of the encoder",
        {"replaced_accuracy": "accuracy", "replaced_recall": "recall"},
        100.0,
        "per cent",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="log.jsonl of a run with the objective replaced_tokens")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--title", default="", help="above the picture")
    options = parser.parse_args()
    try:
        draw(read_log(options.log), options.out, title=options.title, name=str(options.log))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(options.out)
    return 0


def draw(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str = "", name: str = "the log") -> None:
    """Plot the rows of a log and write the picture to `path`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise InputError("PNG pictures need matplotlib: pip install 'bertsmith[report]'") from missing
    training, held_out = ([row for row in rows if row.get("kind") == kind] for kind in ("training", "held_out"))
    if not training:
        raise InputError(f"{name} has no training rows; give the log.jsonl of a run")
    if "replaced_loss" not in training[0]:
        raise InputError(f"{name} has no column 'replaced_loss'; give the log of a run with replaced_tokens")
    steps = np.array([row["step"] for row in training])
    figure = Figure(figsize=(10, 2.6 * len(PANELS)), dpi=110, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    grid = figure.subplots(len(PANELS), 2, sharey="row", sharex="col")
    for column, (label, positions) in enumerate(_scales(training).items()):
        evaluated = np.interp([row["step"] for row in held_out], steps, positions)
        for row, panel in enumerate(PANELS):
            axes = grid[row, column]
            for colour, (line, legend) in zip(SERIES[2 * (row % 2) :], panel.lines.items(), strict=False):
                values = panel.scale * np.array([found[line] for found in training])
                axes.plot(positions, values, color=colour, linewidth=0.8, alpha=0.25)
                axes.plot(positions, _smooth(values), color=colour, linewidth=1.6, label=legend)
                dots = [panel.scale * found[line] for found in held_out]
                axes.plot(evaluated, dots, color=colour, linestyle="none", marker="o", markersize=4)
            _dress(axes, panel, label if row == len(PANELS) - 1 else "", is_first=column == 0)
    if title:
        figure.suptitle(title, fontsize=12, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _scales(training: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return the coordinates of the rows on both axes, by axis label, in readable units."""
    tokens, seconds = (np.array([float(row[name]) for row in training]) for name in ("tokens", "seconds"))
    size, word = next((pair for pair in ((1e9, "billion "), (1e6, "million ")) if tokens[-1] >= pair[0]), (1.0, ""))
    span, unit = next(
        (pair for pair in ((3600.0, "hours"), (60.0, "minutes")) if seconds[-1] >= 2 * pair[0]), (1.0, "seconds")
    )
    return {f"{word}tokens": tokens / size, unit: seconds / span}


def _smooth(values: np.ndarray) -> np.ndarray:
    """Moving average over about a fiftieth of the run, truncated at the ends."""
    reach = max(1, len(values) // 100)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    begin = np.clip(np.arange(len(values)) - reach, 0, None)
    end = np.clip(np.arange(len(values)) + reach + 1, None, len(values))
    mean: np.ndarray = (sums[end] - sums[begin]) / (end - begin)
    return mean


def _dress(axes: Any, panel: Panel, label: str, *, is_first: bool) -> None:
    if is_first:
        axes.set_title(panel.title, fontsize=10.5, color=INK, loc="left")
        axes.set_ylabel(panel.unit, fontsize=9, color=MUTED)
    if is_first and len(panel.lines) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=MUTED)
    axes.set_xlabel(label, fontsize=9, color=MUTED)
    axes.tick_params(labelsize=8, colors=MUTED, length=0)
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)


if __name__ == "__main__":
    sys.exit(main())
