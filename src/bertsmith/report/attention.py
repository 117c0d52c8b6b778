"""The attention explorer: every head of a model on one text, as a page, as a part of another page, or as a picture."""

import base64
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import InputError
from bertsmith.report.explorer import SCRIPT, STYLE
from bertsmith.report.page import facts_table, masthead, page, section

NEAR = 4  # positions on each side that count as the neighbourhood of a token
SEPARATORS = frozenset({"[SEP]", "</s>", "<sep>", "<|endoftext|>"})

NOTE = (
    "Rows of the grid are layers, columns are heads, both counted from 1. Choose a small map to enlarge it, or a "
    "layer's number for the average of its heads. In a map the token of a row attends to the tokens of the columns."
)


@dataclass(frozen=True)
class HeadFigures:
    """What one head does on one text, as means over its queries."""

    entropy: float  # nats; 0 for a head that looks at one token
    distance: float  # positions between a token and where it looks
    near: float  # share of the weight within NEAR positions
    first: float  # share on the first token
    separator: float  # share on separator tokens


def head_figures(tokens: Sequence[str], maps: np.ndarray) -> list[list[HeadFigures]]:
    """The figures of each head, as [layer][head].

    Shape:
        maps: (layers, heads, length, length), each row of a map a distribution over the keys
    """
    positions = np.arange(len(tokens))
    apart = np.abs(positions[:, None] - positions)  # (length, length)
    is_separator = np.array([token in SEPARATORS for token in tokens])
    safe = np.where(maps > 0, maps, 1.0)  # 0 log 0 counts as 0
    entropy = -(maps * np.log(safe)).sum(-1).mean(-1)  # (layers, heads)
    distance = (maps * apart).sum(-1).mean(-1)
    near = (maps * (apart <= NEAR)).sum(-1).mean(-1)
    first = maps[..., 0].mean(-1)
    separator = maps[..., is_separator].sum(-1).mean(-1)
    stacked = np.stack([entropy, distance, near, first, separator], axis=-1)
    return [[HeadFigures(*(float(value) for value in head)) for head in layer] for layer in stacked]


def attention_fragment(tokens: Sequence[str], maps: np.ndarray) -> tuple[str, str, str]:
    """Body, style and script of the explorer, to be put into a page; style and script do not depend on the data.

    Shape:
        maps: (layers, heads, length, length), each row of a map a distribution over the keys
    """
    maps = _checked(tokens, maps)
    layers, heads = maps.shape[:2]
    levels = np.rint(maps * 255).astype(np.uint8)  # one byte a weight: a 12 x 12 model on 40 tokens stays near 300 kB
    data = {
        "tokens": list(tokens),
        "layers": layers,
        "heads": heads,
        "maps": base64.b64encode(levels.tobytes()).decode("ascii"),
    }
    # Inside a script element only "<" can end it, so that is the one sign to be written otherwise.
    packed = json.dumps(data).replace("<", "\\u003c")
    layer_options = "".join(f'<option value="{index}">{index + 1}</option>' for index in range(layers))
    head_options = "".join(f'<option value="{index}">{index + 1}</option>' for index in range(heads))
    body = f"""<div class="attention">
<script type="application/json" class="attention-data">{packed}</script>
<noscript><p class="note">The maps are drawn by JavaScript, which is switched off here.</p></noscript>
<div class="attention-panes">
<div class="panel">
<div class="attention-grid" role="group" aria-label="All heads; the arrow keys move between them"></div>
<p class="attention-scale">0 <i></i> 1 <span>shade grows with the root of the weight</span></p></div>
<div class="panel"><div class="attention-bar">
<label>Layer <select class="choose-layer">{layer_options}</select></label>
<label>Head <select class="choose-head"><option value="-1">average</option>{head_options}</select></label>
<div class="attention-views" role="group" aria-label="View"><button type="button" data-view="map">Map</button>\
<button type="button" data-view="lines">Lines</button></div></div>
<div class="attention-stage"></div><p class="attention-readout" role="status"></p></div>
</div>
{_figures_table(tokens, maps)}
</div>"""
    return body, STYLE, SCRIPT


def attention_page(tokens: Sequence[str], maps: np.ndarray, *, title: str, facts: Mapping[str, str]) -> str:
    """The explorer as a page of its own.

    Shape:
        maps: (layers, heads, length, length), each row of a map a distribution over the keys
    """
    explorer, style, script = attention_fragment(tokens, maps)
    layers, heads = maps.shape[:2]
    lead = f"{_counted(layers, 'layer')} of {_counted(heads, 'head')} on {_counted(len(tokens), 'token')}."
    body = masthead("Attention", "", title, lead=lead) + section("Every head", explorer, note=NOTE)
    if facts:
        body += section("Facts", facts_table(facts))
    return page(title, body, style=style, script=script)


def attention_picture(tokens: Sequence[str], maps: np.ndarray, path: Path, *, title: str) -> None:
    """Nothing; a PNG with the grid of all heads, and the text below it, is at `path` afterwards.

    Shape:
        maps: (layers, heads, length, length), each row of a map a distribution over the keys
    """
    try:
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise InputError("PNG pictures need matplotlib: pip install 'bertsmith[report]'") from missing
    maps = _checked(tokens, maps)
    layers, heads = maps.shape[:2]
    shades = LinearSegmentedColormap.from_list("attention", ["#f2f5f9", "#5a93da", "#0a2048"])
    cell, top, bottom, side = 0.9, 0.95, 0.75, 0.5  # inches
    width, height = max(4.5, heads * cell + 2 * side), layers * cell + top + bottom
    ink, muted = "#141920", "#5a6572"
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    left = (width - heads * cell) / 2
    for layer in range(layers):
        for head in range(heads):
            lower = height - top - (layer + 1) * cell
            axes = figure.add_axes(
                ((left + head * cell + 0.04) / width, lower / height, (cell - 0.08) / width, (cell - 0.08) / height)
            )
            axes.imshow(maps[layer, head], cmap=shades, norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if layer == 0:
                axes.set_title(str(head + 1), fontsize=9, color=muted, pad=4)
            if head == 0:
                axes.set_ylabel(str(layer + 1), fontsize=9, color=muted, rotation=0, ha="right", va="center")
    # Tokens may hold dollar signs, which are not meant as formulas.
    place: dict[str, Any] = {"ha": "center", "parse_math": False}
    heading = _shortened(title, letters=int(width * 9))
    figure.text(0.5, 1 - 0.3 / height, heading, fontsize=12, color=ink, va="center", **place)
    figure.text(0.5, 1 - 0.55 / height, "layers down, heads across", fontsize=9, color=muted, va="center", **place)
    caption = _shortened(" ".join(tokens), letters=int(width * 13))
    figure.text(0.5, 0.35 / height, caption, fontsize=8, color=muted, va="center", **place)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from"
        )  # a box in the caption is not worth a failure
        figure.savefig(path, format="png")


def _checked(tokens: Sequence[str], maps: np.ndarray) -> np.ndarray:
    maps = np.asarray(maps, dtype=np.float32)
    length = len(tokens)
    if maps.ndim != 4 or maps.shape[2:] != (length, length) or 0 in maps.shape:
        raise ValueError(f"maps of shape {maps.shape} are not (layers, heads, {length}, {length}) for {length} tokens")
    # Written so that a NaN fails too; the slack is the rounding of half precision.
    if not (maps.min() >= -0.01 and maps.max() <= 1.01):
        raise ValueError(f"attention weights lie between 0 and 1, not {maps.min():.3g} and {maps.max():.3g}")
    return maps.clip(0.0, 1.0)


def _figures_table(tokens: Sequence[str], maps: np.ndarray) -> str:
    has_separator = any(token in SEPARATORS for token in tokens)
    names = ["Layer · head", "Entropy, nats", "Distance", f"Within ±{NEAR}", "On first"]
    names += ["On separator"] if has_separator else []
    header = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in names)
    rows = []
    for layer, figures_of_layer in enumerate(head_figures(tokens, maps)):
        for head, figures in enumerate(figures_of_layer):
            place = layer * maps.shape[1] + head
            cells = f'<td data-value="{place}"><button type="button">{layer + 1} · {head + 1}</button></td>'
            cells += f'<td data-value="{figures.entropy:.4f}">{figures.entropy:.2f}</td>'
            cells += f'<td data-value="{figures.distance:.4f}">{figures.distance:.1f}</td>'
            shares = [figures.near, figures.first] + ([figures.separator] if has_separator else [])
            for share in shares:
                percent = f"{100 * share:.2f}"
                cells += f'<td class="share" data-value="{percent}" style="--share:{percent}">{100 * share:.0f} %</td>'
            rows.append(f'<tr data-layer="{layer}" data-head="{head}">{cells}</tr>')
    return (
        '<div class="panel attention-table" tabindex="0" role="region" aria-label="Figures of every head"><table>'
        f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _shortened(text: str, *, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
