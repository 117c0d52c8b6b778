"""Heat maps of heads: how much each matters, which widths keep it, and what it looks at in the whole and in a small
network."""

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from statistics import fmean

import numpy as np

from bertsmith.report.elastic import HeadComparison, HeadPair, narrowest_widths, shallowest_depths, widths
from bertsmith.report.maps import HeadFigures
from bertsmith.shrinking.elastic_metadata import ElasticRecord

LEVELS = 8  # shades of a small map; more cannot be told apart at its size

STYLE = """
.heat { overflow-x: auto; }
.heat table { border-collapse: separate; border-spacing: 2px; table-layout: fixed; font-size: 11.5px;
  font-variant-numeric: tabular-nums; width: 100%; min-width: calc(var(--columns) * 21px + 70px);
  max-width: calc(var(--columns) * 46px + 70px); }
.heat th { color: var(--muted); font-weight: 500; padding: 0; }
.heat th:first-child { width: 28px; text-align: right; padding-right: 6px; }
.heat td { height: 28px; padding: 0; border-radius: 4px; text-align: center; }
.heat td.deep { color: var(--surface); }
.heat th.layer { width: 38px; }
.heat td.layer { border-left: 8px solid var(--surface); border-radius: 10px 4px 4px 10px; }
.heat-key { color: var(--muted); font-size: 13.5px; margin-top: 10px; display: flex; flex-wrap: wrap; gap: 4px 16px; }
.heat-key i { display: inline-block; width: 16px; height: 12px; border-radius: 3px; margin-right: 7px;
  vertical-align: -1px; }
.looks .text { font: 13.5px/1.6 var(--mono); color: var(--muted); margin-bottom: 14px; }
.looks .row { display: grid; gap: 12px 26px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 216px), 1fr));
  padding: 12px 0; border-top: 1px solid var(--line); }
.looks h3 { grid-column: 1 / -1; font-size: 14px; font-weight: 600; }
.looks .two { display: grid; grid-template-columns: 1fr 1fr; gap: 6px; max-width: 260px; }
.looks svg { display: block; width: 100%; aspect-ratio: 1; border-radius: 4px; background: var(--heat-low); }
.looks figcaption { color: var(--muted); font-size: 12.5px; line-height: 1.4; margin-top: 5px;
  font-variant-numeric: tabular-nums; }
.looks figcaption b { color: var(--ink); font-weight: 600; }
"""


def shade(share: float) -> str:
    """The colour of a share from 0 to 1 on the page's scale of heat."""
    share = min(max(share, 0.0), 1.0)
    low, high, part = ("low", "middle", 2 * share) if share <= 0.5 else ("middle", "high", 2 * share - 1)
    return f"color-mix(in srgb,var(--heat-{high}) {100 * part:.0f}%,var(--heat-{low}))"


def importance_map(record: ElasticRecord) -> str:
    """Every head's importance: its shade is by the highest of the layer, its number the share of the layer's sum."""

    def cell(layer: int, head: int) -> str:
        scores = [score if math.isfinite(score) else 0.0 for score in record.head_scores[layer]]
        part, share = scores[head] / (sum(scores) or 1.0), scores[head] / (max(scores) or 1.0)
        place = sorted(scores, reverse=True).index(scores[head]) + 1
        told = f"layer {layer + 1}, head {head + 1}: importance {record.head_scores[layer][head]:.4g}, {100 * part:.1f}"
        return _cell(share, f"{100 * part:.0f}", f"{told} % of the layer's, number {place} of {len(scores)}")

    return _heat([len(scores) for scores in record.head_scores], cell)


def survival_map(record: ElasticRecord) -> str:
    """The narrowest width that keeps each head and, last in a row, the smallest depth that keeps its layer."""
    heads, layers = narrowest_widths(record), shallowest_depths(record)
    steps = sorted({width for layer in heads for width in layer}, reverse=True)
    levels, widest = sorted(set(layers), reverse=True), widths(record)[0]

    def cell(layer: int, head: int) -> str:
        width = heads[layer][head]
        told = f"layer {layer + 1}, head {head + 1}: kept down to width {width:g}"
        return _cell(_place(steps, width), _short(width), told)

    def end(layer: int) -> str:
        depth = layers[layer]
        told = f"layer {layer + 1}: kept down to depth {depth:g}"
        return _cell(_place(levels, depth), _short(depth), told, kind="layer")

    key = "".join(
        f'<span><i style="background:{shade(_place(steps, width))}"></i>{_kept(width, widest)}</span>'
        for width in steps
    )
    table = _heat([len(layer) for layer in heads], cell, end if len(levels) > 1 else None)
    return f'{table}<p class="heat-key">{key}</p>'


def looks(found: HeadComparison) -> str:
    """What the heads of the smallest network look at, beside the same heads of the whole one."""
    rows = []
    for layer, pairs in found.layers:
        drawn = "".join(_pair(layer, pair, found.has_separator) for pair in pairs)
        rows.append(f'<div class="row"><h3>Layer {layer + 1}</h3>{drawn}</div>')
    text = escape(" ".join(found.tokens))
    return f'<div class="panel looks"><p class="text">{text}</p>{"".join(rows)}</div>'


def looks_note(found: HeadComparison) -> str:
    """How to read `looks`, with the means over all heads of both networks."""
    whole, small = ([figures.entropy for figures in own] for own in (found.whole_figures, found.small_figures))
    told = f"Over all heads the mean entropy is {fmean(whole):.2f} nats in the whole network, {fmean(small):.2f} in the"
    told += " smallest"
    if found.has_separator:
        shares = [
            100 * fmean(one.separator for one in figures) for figures in (found.whole_figures, found.small_figures)
        ]
        told += f"; {shares[0]:.0f} % and {shares[1]:.0f} % of the weight lie on separators"
    return (
        f"A head of the whole network (left) and the same head at width {found.subnet.width:g}, depth "
        f"{found.subnet.depth:g} (right), on the beginning of a dev text: the token of a row takes from the tokens of "
        f"the columns; the shade grows with the root of the weight. {told}."
    )


def _heat(heads: Sequence[int], cell: Callable[[int, int], str], end: Callable[[int], str] | None = None) -> str:
    """A table with a row for every layer and a column for every head, maybe with one more cell for the layer."""
    columns = max(heads, default=0)
    names = "".join(f'<th scope="col">{head + 1}</th>' for head in range(columns))
    names += '<th scope="col" class="layer">layer</th>' if end is not None else ""
    rows = []
    for layer, count in enumerate(heads):
        cells = "".join(cell(layer, head) if head < count else "<td></td>" for head in range(columns))
        last = end(layer) if end is not None else ""
        rows.append(f'<tr><th scope="row">{layer + 1}</th>{cells}{last}</tr>')
    return (
        f'<div class="heat" tabindex="0" style="--columns:{columns}"><table><thead><tr>'
        f"<th></th>{names}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(share: float, shown: str, told: str, kind: str = "") -> str:
    classes = " ".join(filter(None, (kind, "deep" if share > 0.55 else "")))
    named = f' class="{classes}"' if classes else ""
    return f'<td{named} style="background:{shade(share)}" title="{escape(told)}">{shown}</td>'


def _place(steps: Sequence[float], value: float) -> float:
    """Where a value stands among falling ones, from 0 for the first to 1 for the last."""
    return steps.index(value) / (len(steps) - 1) if len(steps) > 1 else 0.5


def _short(share: float) -> str:
    """A share with as few signs as a narrow cell needs.

    >>> _short(0.25), _short(1.0), _short(2 / 3)
    ('.25', '1', '.67')
    """
    return f"{share:.2f}".rstrip("0").rstrip(".").removeprefix("0")


def _kept(width: float, widest: float) -> str:
    return f"only at width {width:g}" if width == widest else f"down to {width:g}"


def _pair(layer: int, pair: HeadPair, has_separator: bool) -> str:
    maps = _small_map(pair.whole) + _small_map(pair.small)
    told = f"entropy {pair.whole_figures.entropy:.2f} → {pair.small_figures.entropy:.2f}"
    if has_separator:
        told += f"<br>separator {_percent(pair.whole_figures)} → {_percent(pair.small_figures)}"
    label = f"layer {layer + 1}, head {pair.number + 1}, whole and small network"
    return (
        f'<figure><div class="two" role="img" aria-label="{label}">{maps}</div>'
        f"<figcaption><b>head {pair.number + 1}</b> {told}</figcaption></figure>"
    )


def _percent(figures: HeadFigures) -> str:
    return f"{100 * figures.separator:.0f} %"


def _small_map(weights: np.ndarray) -> str:
    """A map as one path for every shade, neighbours of a row in one piece; the palest is the ground.

    Shape: weights (length, length).
    """
    levels = np.rint(np.sqrt(weights.clip(0, 1)) * LEVELS).astype(int)
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(levels):
        ends = [0, *(np.flatnonzero(np.diff(line)) + 1), len(line)]
        for start, stop in pairwise(ends):
            if level := int(line[start]):
                paths.setdefault(level, []).append(f"M{start} {row}h{stop - start}v1h{start - stop}z")
    drawn = "".join(
        f'<path style="fill:{shade(level / LEVELS)}" d="{"".join(paths[level])}"/>' for level in sorted(paths)
    )
    length = len(levels)
    return f'<svg viewBox="0 0 {length} {length}" shape-rendering="crispEdges" aria-hidden="true">{drawn}</svg>'
