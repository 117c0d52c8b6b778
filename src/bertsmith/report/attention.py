"""The attention explorer: the maps of all heads of a model on one text, as a page or inside another page."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from bertsmith.report.charts import kernel_chart, signed
from bertsmith.report.maps import (
    NEAR,
    SEPARATORS,
    Kernels,
    Maps,
    TextMap,
    average_kernels,
    head_statistics,
    score_statistics,
    text_maps,
)
from bertsmith.report.page import format_count, render


@dataclass(frozen=True)
class Cell:
    """A value in a sortable table: the number to sort by and the text to show."""

    value: str
    text: str
    is_share: bool = False


@dataclass(frozen=True)
class HeadTable:
    """Statistics of every head of a map; rows are layer, head and cells."""

    headings: Sequence[str]
    rows: Sequence[tuple[int, int, Sequence[Cell]]]


@dataclass(frozen=True)
class KernelTable:
    """Small charts of the average kernel of every convolution head, on a common scale."""

    low: float
    high: float
    ends: tuple[str, str]
    """Distances of the first and the last tap."""
    rows: Sequence[tuple[int, Sequence[Markup]]]
    """Layer number and the charts of its heads."""

    @property
    def columns(self) -> int:
        return max(len(charts) for _, charts in self.rows)


@dataclass(frozen=True)
class Explorer:
    """The maps of one text; templates/explorer.js draws them."""

    tokens: Sequence[str]
    maps: Sequence[TextMap]

    @classmethod
    def from_arrays(cls, tokens: Sequence[str], maps: Maps) -> "Explorer":
        """Check the maps of a text and build the explorer.

        Shape:
            maps: by name, for every layer (heads, length, length); no heads if a layer lacks the map
        """
        return cls(tokens, text_maps(tokens, maps))

    @property
    def data(self) -> dict[str, object]:
        """The JSON data that the script draws."""
        return {"tokens": list(self.tokens), "layers": self.layers, "maps": [_pack(one) for one in self.maps]}

    @property
    def markup(self) -> Markup:
        """The HTML that the script fills; it contains neither the text nor scripts nor styles."""
        return Markup(render("explorer.html", explorer=self))

    @property
    def layers(self) -> int:
        return len(self.maps[0].layers)

    @property
    def tables(self) -> list[HeadTable]:
        """One table for each map."""
        return [_score_table(one) if one.is_score else _weight_table(self.tokens, one) for one in self.maps]

    @property
    def kernels(self) -> list[KernelTable]:
        """One table for each convolution map."""
        return [kernel_table(average_kernels(one)) for one in self.maps if one.is_convolution]


def render_attention_page(tokens: Sequence[str], maps: Maps, *, title: str, facts: Mapping[str, str]) -> str:
    """Return the explorer as one self-contained HTML document.

    Shape:
        maps: by name, for every layer (heads, length, length); no heads if a layer lacks the map
    """
    explorer = Explorer.from_arrays(tokens, maps)
    layers, length = format_count(explorer.layers, "layer"), format_count(len(tokens), "token")
    lead = f"{layers} of {describe_heads(explorer.maps)} on {length}."
    return render("attention.html", explorer=explorer, title=title, lead=lead, facts=facts)


def describe_heads(maps: Sequence[TextMap]) -> str:
    """Return the number of heads of a layer, such as "12 heads" or "6 attention and 6 convolution heads"."""
    counts = {}
    for one in maps:
        numbers = {count for count in one.heads if count}
        counts[one.label] = str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)}–{max(numbers)}"
    if len(set(counts.values())) == 1 and not any(one.is_convolution for one in maps[1:]):
        count = next(iter(counts.values()))
        return f"{count} {'head' if count == '1' else 'heads'}"
    # terms of the attention score belong to the attention heads
    shown = [one for one in maps if one.is_convolution or not one.is_score] or list(maps)
    return " and ".join(f"{counts[one.label]} {one.label}" for one in shown) + " heads"


def kernel_table(kernels: Kernels) -> KernelTable:
    """Draw the average kernel of every head."""
    layers = [(index, layer) for index, layer in enumerate(kernels.layers) if len(layer)]
    high = max(max(float(layer.max()) for _, layer in layers), 0.0)
    low = min(min(float(layer.min()) for _, layer in layers), 0.0)
    low = low if low < -1e-9 else 0.0
    rows = [
        (
            index + 1,
            [
                kernel_chart(kernels.distances, kernel.tolist(), low, high, f"layer {index + 1}, head {head}")
                for head, kernel in enumerate(layer, 1)
            ],
        )
        for index, layer in layers
    ]
    return KernelTable(low, high, (signed(kernels.distances[0]), signed(kernels.distances[-1])), rows)


def _pack(one: TextMap) -> dict[str, object]:
    """Pack a map for the script, one byte per weight: 12 layers of 12 heads on 40 tokens take about 300 kB.

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


def _weight_table(tokens: Sequence[str], one: TextMap) -> HeadTable:
    has_separator = any(token in SEPARATORS for token in tokens)
    headings = ["Entropy, nats", "Distance", f"Within ±{NEAR}", "On first"]
    headings += ["On separator"] if has_separator else []
    rows = []
    for layer, heads in enumerate(head_statistics(tokens, one.layers)):
        for head, statistics in enumerate(heads):
            cells = [Cell(f"{statistics.entropy:.4f}", f"{statistics.entropy:.2f}")]
            cells += [Cell(f"{statistics.distance:.4f}", f"{statistics.distance:.1f}")]
            shares = [statistics.near, statistics.first] + ([statistics.separator] if has_separator else [])
            cells += [Cell(f"{100 * share:.2f}", f"{100 * share:.0f} %", is_share=True) for share in shares]
            rows.append((layer, head, cells))
    return HeadTable(headings, rows)


def _score_table(one: TextMap) -> HeadTable:
    rows = []
    for layer, heads in enumerate(score_statistics(one.layers)):
        for head, statistics in enumerate(heads):
            values = (statistics.mean, statistics.std, statistics.lowest, statistics.highest)
            rows.append((layer, head, [Cell(f"{value:.5g}", f"{value:.3g}") for value in values]))
    return HeadTable(["Mean", "Standard deviation", "Minimum", "Maximum"], rows)
