"""The explorer: every map of every head of a model on one text, as a page or as a part of another page."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertsmith.report import kernels
from bertsmith.report.explorer import SCRIPT
from bertsmith.report.explorer_style import STYLE as EXPLORER_STYLE
from bertsmith.report.kernels import kernel_panel
from bertsmith.report.maps import (
    NEAR,
    SEPARATORS,
    Maps,
    TextMap,
    head_figures,
    kernels_of,
    score_figures,
    text_maps,
)
from bertsmith.report.page import facts_table, masthead, page, section

STYLE = EXPLORER_STYLE + kernels.STYLE

NOTE = (
    "Rows of the grid are layers, columns are heads, both counted from 1. Choose a small map to enlarge it, or a "
    "layer's number for the average of its heads. In a map the token of a row takes from the tokens of the columns."
)


def attention_fragment(tokens: Sequence[str], maps: Maps) -> tuple[str, str, str]:
    """Body, style and script of the explorer, to be put into a page; style and script do not depend on the data.

    Shape:
        maps: by name, for every layer (heads, length, length); no heads where a layer lacks the map
    """
    shown = text_maps(tokens, maps)
    # Inside a script element only "<" can end it, so that is the one sign to be written otherwise.
    packed = json.dumps(explorer_data(tokens, shown)).replace("<", "\\u003c")
    body = f"""<div class="attention">
<script type="application/json" class="attention-data">{packed}</script>
<noscript><p class="note">The maps are drawn by JavaScript, which is switched off here.</p></noscript>
{explorer_markup(tokens, shown)}
</div>"""
    return body, STYLE, SCRIPT


def explorer_data(tokens: Sequence[str], shown: Sequence[TextMap]) -> dict[str, Any]:
    """What the script draws, as JSON-ready data."""
    return {"tokens": list(tokens), "layers": len(shown[0].layers), "maps": [_packed(one) for one in shown]}


def explorer_markup(tokens: Sequence[str], shown: Sequence[TextMap]) -> str:
    """What the script fills and switches, as HTML: for the inside of an element of the class "attention".

    It holds nothing of the text, neither scripts nor styles, so that a page of any policy can take it in later.
    """
    # A page with one map needs no choice.
    buttons = "".join(f'<button type="button" data-map="{i}">{one.label}</button>' for i, one in enumerate(shown))
    chooser = f'<div class="attention-maps" role="group" aria-label="Map">{buttons}</div>' if len(shown) > 1 else ""
    scales = "".join(_scale(index, one) for index, one in enumerate(shown))
    tables = "".join(_table(index, tokens, one) for index, one in enumerate(shown))
    panels = "".join(
        f'<h3 class="attention-kernels">Average kernel per head</h3>{kernel_panel(kernels_of(one))}'
        for one in shown
        if one.is_convolution
    )
    return f"""{chooser}<div class="attention-panes">
<div class="panel">
<div class="attention-grid" role="group" aria-label="All heads; the arrow keys move between them"></div>
{scales}</div>
<div class="panel"><div class="attention-bar">
<label>Layer <select class="choose-layer"></select></label>
<label>Head <select class="choose-head"></select></label>
<div class="attention-views" role="group" aria-label="View"><button type="button" data-view="map">Map</button>\
<button type="button" data-view="lines">Lines</button></div></div>
<div class="attention-stage"></div><p class="attention-readout" role="status"></p></div>
</div>
{tables}{panels}"""


def attention_page(tokens: Sequence[str], maps: Maps, *, title: str, facts: Mapping[str, str]) -> str:
    """The explorer as a page of its own.

    Shape:
        maps: by name, for every layer (heads, length, length); no heads where a layer lacks the map
    """
    explorer, style, script = attention_fragment(tokens, maps)
    shown = text_maps(tokens, maps)
    lead = f"{_counted(len(shown[0].layers), 'layer')} of {told_heads(shown)} on {_counted(len(tokens), 'token')}."
    body = masthead("Attention", "", title, lead=lead) + section("Every head", explorer, note=NOTE)
    if facts:
        body += section("Facts", facts_table(facts))
    return page(title, body, style=style, script=script)


def told_heads(shown: Sequence[TextMap]) -> str:
    """How many heads a layer has, such as "12 heads" or "6 attention and 6 convolution heads"."""
    told = {}
    for one in shown:
        counts = {count for count in one.heads if count}
        told[one.label] = str(min(counts)) if len(counts) == 1 else f"{min(counts)}–{max(counts)}"
    if len(set(told.values())) == 1 and not any(one.is_convolution for one in shown[1:]):
        count = next(iter(told.values()))
        return f"{count} {'head' if count == '1' else 'heads'}"
    # the terms of a score belong to the heads whose attention they make
    counted = [one for one in shown if one.is_convolution or not one.is_score] or list(shown)
    return " and ".join(f"{told[one.label]} {one.label}" for one in counted) + " heads"


def _packed(one: TextMap) -> dict[str, object]:
    """A map as the script reads it, one byte a weight: a 12 x 12 model on 40 tokens stays near 300 kB.

    A weight is level / 255, a score (level − 128) / 127 of the map's scale.
    """
    stacked = np.concatenate(one.layers)  # (heads of all layers, length, length)
    levels = 128 + np.rint(stacked * (127 / one.scale)) if one.is_score else np.rint(stacked * 255)
    return {
        "label": one.label,
        "isScore": one.is_score,
        "scale": one.scale,
        "heads": one.heads,
        "levels": base64.b64encode(levels.astype(np.uint8).tobytes()).decode("ascii"),
    }


def _scale(index: int, one: TextMap) -> str:
    """The key to the colours of a map; the script shows the one of the chosen map."""
    hidden = " hidden" if index else ""
    if not one.is_score:
        told = "shade grows with the root of the weight"
        return f'<p class="attention-scale" data-map="{index}"{hidden}>0 <i></i> 1 <span>{told}</span></p>'
    told = f"{one.label}: signed scores, one scale for all heads"
    return (
        f'<p class="attention-scale" data-map="{index}"{hidden}>−{one.scale:.3g} <i class="signed"></i> '
        f"+{one.scale:.3g} <span>{told}</span></p>"
    )


def _table(index: int, tokens: Sequence[str], one: TextMap) -> str:
    """The figures of every head of a map; the script shows the table of the chosen map and sorts it."""
    names, rows = _score_rows(one) if one.is_score else _weight_rows(tokens, one)
    header = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in names)
    body = []
    for place, (layer, head, cells) in enumerate(rows):
        first = f'<td data-value="{place}"><button type="button">{layer + 1} · {head + 1}</button></td>'
        body.append(f'<tr data-layer="{layer}" data-head="{head}">{first}{cells}</tr>')
    return (
        f'<div class="panel attention-table" data-map="{index}"{" hidden" if index else ""} tabindex="0" role="region" '
        f'aria-label="Figures of every head"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


Rows = list[tuple[int, int, str]]
"""Layer, head, and the cells after them."""


def _weight_rows(tokens: Sequence[str], one: TextMap) -> tuple[list[str], Rows]:
    has_separator = any(token in SEPARATORS for token in tokens)
    names = ["Layer · head", "Entropy, nats", "Distance", f"Within ±{NEAR}", "On first"]
    names += ["On separator"] if has_separator else []
    rows = []
    for layer, figures_of_layer in enumerate(head_figures(tokens, one.layers)):
        for head, figures in enumerate(figures_of_layer):
            cells = f'<td data-value="{figures.entropy:.4f}">{figures.entropy:.2f}</td>'
            cells += f'<td data-value="{figures.distance:.4f}">{figures.distance:.1f}</td>'
            shares = [figures.near, figures.first] + ([figures.separator] if has_separator else [])
            for share in shares:
                percent = f"{100 * share:.2f}"
                cells += f'<td class="share" data-value="{percent}">{100 * share:.0f} %</td>'
            rows.append((layer, head, cells))
    return names, rows


def _score_rows(one: TextMap) -> tuple[list[str], Rows]:
    names = ["Layer · head", "Mean", "Deviation", "Lowest", "Highest"]
    rows = []
    for layer, figures_of_layer in enumerate(score_figures(one.layers)):
        for head, figures in enumerate(figures_of_layer):
            values = (figures.mean, figures.deviation, figures.lowest, figures.highest)
            rows.append((layer, head, "".join(f'<td data-value="{value:.5g}">{value:.3g}</td>' for value in values)))
    return names, rows


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
