"""PNG pictures drawn with matplotlib: all heads of a map on one text, and averages over many texts."""

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import InputError, shorten
from bertsmith.layers.mixers.base import MAP_KINDS
from bertsmith.report.maps import NEAR, TextMap, label
from bertsmith.report.study import MapStudy, main_map

NO_PICTURE = "no picture was written: matplotlib is not installed (pip install 'bertsmith[report]')"
INK, MUTED, LINE = "#141920", "#5a6572", "#e1e6ec"
SERIES = ("#1d5bbf", "#d2601a", "#14806a", "#8246b8")
WEIGHTS, SCORES = ("#f2f5f9", "#5a93da", "#0a2048"), ("#b8460e", "#f2f5f9", "#164f9f")  # as in base.css


def save_attention_picture(tokens: Sequence[str], one: TextMap, path: Path, *, title: str) -> None:
    """Write a PNG with the grid of all heads of a map and the text below it."""
    figure_class, colours = _matplotlib()
    rows = [(layer, maps) for layer, maps in enumerate(one.layers) if len(maps)]
    heads = max(one.heads)
    shades = colours.LinearSegmentedColormap.from_list(one.name, SCORES if one.is_score else WEIGHTS)
    norm = colours.Normalize(-one.scale, one.scale) if one.is_score else colours.PowerNorm(0.5, 0.0, 1.0)
    cell, top, bottom, side = 0.9, 0.95, 0.75, 0.5  # inches
    width, height = max(4.5, heads * cell + 2 * side), len(rows) * cell + top + bottom
    figure = figure_class(figsize=(width, height), dpi=150, facecolor="white")
    left = (width - heads * cell) / 2
    for row, (layer, maps) in enumerate(rows):
        lower = height - top - (row + 1) * cell
        middle = (lower + cell / 2 - 0.04) / height
        figure.text((left - 0.06) / width, middle, str(layer + 1), fontsize=9, color=MUTED, ha="right", va="center")
        for head, weights in enumerate(maps):
            axes = figure.add_axes(
                ((left + head * cell + 0.04) / width, lower / height, (cell - 0.08) / width, (cell - 0.08) / height)
            )
            axes.imshow(weights, cmap=shades, norm=norm, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
    for head in range(heads):
        across = (left + (head + 0.5) * cell) / width
        figure.text(across, 1 - 0.88 / height, str(head + 1), fontsize=9, color=MUTED, ha="center", va="center")
    # dollar signs in tokens are not formulas
    position: dict[str, Any] = {"ha": "center", "va": "center", "parse_math": False}
    scale = f"blue to +{one.scale:.3g}, orange to −{one.scale:.3g}" if one.is_score else "layers down, heads across"
    subtitle = scale if one.name == "attention" else f"{one.label}: {scale}"
    figure.text(0.5, 1 - 0.3 / height, shorten(title, int(width * 9)), fontsize=12, color=INK, **position)
    figure.text(0.5, 1 - 0.58 / height, shorten(subtitle, int(width * 13)), fontsize=9, color=MUTED, **position)
    caption = shorten(" ".join(tokens), int(width * 13))
    figure.text(0.5, 0.35 / height, caption, fontsize=8, color=MUTED, **position)
    _write(figure, path)


def save_study_picture(studies: Mapping[str, MapStudy], path: Path) -> None:
    """Write a PNG of a study: average maps, mass by distance, share by layer, kernels."""
    figure_class, colours = _matplotlib()
    columns = max(2, len(studies))
    has_kernels = any(MAP_KINDS[name].is_convolution for study in studies.values() for name in study.names)
    rows = 3 if has_kernels else 2
    size = 4.6 * columns, 4.3 + 3.3 * (rows - 1)
    figure = figure_class(figsize=size, dpi=110, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    grid = figure.add_gridspec(rows, 2 * columns, height_ratios=[4.3, *[3.3] * (rows - 1)])
    shift = columns - len(studies)  # centres a single model
    shown = {model: (study, main_map(study)) for model, study in studies.items()}
    highest = max(_strongest(study.average(name), MAP_KINDS[name].is_score) for study, name in shown.values())
    for index, (model, (study, name)) in enumerate(shown.items()):
        axes = figure.add_subplot(grid[0, shift + 2 * index : shift + 2 * index + 2])
        has_scores = MAP_KINDS[name].is_score
        shades = colours.LinearSegmentedColormap.from_list("average", SCORES if has_scores else WEIGHTS)
        norm = colours.Normalize(-highest, highest) if has_scores else colours.PowerNorm(0.5, 0.0, highest)
        ends = (0.5, study.length + 0.5, study.length + 0.5, 0.5)
        image = axes.imshow(study.average(name), cmap=shades, norm=norm, interpolation="nearest", extent=ends)
        bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, extend="neither" if has_scores else "max")
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8, colors=MUTED, length=0)
        share = "" if has_scores else f": {study.near(name):.1%} within ±{NEAR}"
        _label_axes(axes, f"{model}{share}", "key", "query")
    half = columns
    below = figure.add_subplot(grid[1, :half]), figure.add_subplot(grid[1, half:])
    for index, (model, (study, name)) in enumerate(shown.items()):
        colour = SERIES[index % len(SERIES)]
        curve = study.mean(name) if MAP_KINDS[name].is_score else study.mass(name)
        below[0].plot(study.distances, curve, color=colour, linewidth=1.6, label=model)
        if not MAP_KINDS[name].is_score:
            layers = [layer for layer, heads in enumerate(study.heads(name)) if heads]
            near = [100 * study.near(name, layer) for layer in layers]
            below[1].plot([layer + 1 for layer in layers], near, color=colour, linewidth=1.6, marker="o", markersize=4)
    first = next(iter(studies.values()))
    below[0].plot(first.distances, first.uniform_mass, color=MUTED, linewidth=1.2, linestyle="--", label="uniform")
    below[1].axhline(100 * first.uniform_near, color=MUTED, linewidth=1.2, linestyle="--")
    below[1].set_ylim(0, 100)
    below[1].xaxis.get_major_locator().set_params(integer=True)
    below[0].legend(frameon=False, fontsize=8, labelcolor=MUTED)
    _label_axes(below[0], "mass by distance", "query − key", "")
    _label_axes(below[1], f"share within ±{NEAR}, percent", "layer", "")
    if has_kernels:
        _kernel_row(figure, grid, studies, shift)
    _write(figure, path)


def _strongest(average: np.ndarray, has_scores: bool) -> float:
    """Return the value of the strongest colour: the 98th percentile, because one dominant token would fade the rest."""
    sizes = np.abs(average[average != 0])
    return float(np.quantile(sizes, 1.0 if has_scores else 0.98)) if sizes.size else 1.0


def _kernel_row(figure: Any, grid: Any, studies: Mapping[str, MapStudy], shift: int) -> None:
    """Draw the kernels of every convolution head as thin lines and their average as a thick one."""
    for index, (model, study) in enumerate(studies.items()):
        axes = figure.add_subplot(grid[2, shift + 2 * index : shift + 2 * index + 2])
        names = [name for name in study.names if MAP_KINDS[name].is_convolution]
        if not names:
            axes.set_axis_off()
            continue
        kernels = study.kernels(names[0])
        heads = np.concatenate(kernels.layers)  # (heads of all layers, taps)
        axes.plot(kernels.distances, heads.T, color=SERIES[index % len(SERIES)], linewidth=0.8, alpha=0.35)
        axes.plot(kernels.distances, heads.mean(0), color=INK, linewidth=1.8)
        _label_axes(axes, f"{model}: {label(names[0])} kernels", "query − key", "")


def _label_axes(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=10.5, color=INK, parse_math=False)
    axes.set_xlabel(x_label, fontsize=9, color=MUTED)
    axes.set_ylabel(y_label, fontsize=9, color=MUTED)
    axes.tick_params(labelsize=8, colors=MUTED, length=0)
    axes.spines[:].set_visible(False)
    if not axes.images:
        axes.grid(axis="y", color=LINE, linewidth=0.8)
        axes.set_axisbelow(True)


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def _matplotlib() -> tuple[Any, Any]:
    """Return the figure class and the colours module; raise InputError if matplotlib is missing."""
    try:
        from matplotlib import colors
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise InputError("PNG pictures need matplotlib: pip install 'bertsmith[report]'") from missing
    return Figure, colors


def _write(figure: Any, path: Path) -> None:
    with warnings.catch_warnings():
        # a missing glyph is drawn as a box
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(path, format="png")
