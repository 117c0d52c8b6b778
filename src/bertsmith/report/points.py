"""Drawings of single values: an interval on its scale, runs beside each other, what was said against what was right."""

from collections.abc import Sequence
from html import escape
from statistics import fmean, stdev

import numpy as np

from bertsmith.report.chart import Plane, axes, nice_ticks, short_number, widened

POINTS = 1500  # more only make the page heavy

STYLE = """
.range { margin-top: clamp(24px, 4vw, 36px); max-width: 720px; }
.range .track { position: relative; height: 12px; border-radius: 6px; background: var(--line); }
.range .band { position: absolute; top: 0; bottom: 0; min-width: 4px; border-radius: 6px; background: var(--series-1);
  opacity: .38; }
.range .dot { position: absolute; top: -3px; width: 6px; height: 18px; margin-left: -3px; border-radius: 3px;
  background: var(--series-1); }
.range .base { position: absolute; top: -5px; bottom: -5px; width: 2px; margin-left: -1px; background: var(--muted); }
.range .ends { display: flex; justify-content: space-between; color: var(--muted); font-size: 12.5px; margin-top: 6px;
  font-variant-numeric: tabular-nums; }
.range .key { color: var(--muted); font-size: 14px; margin-top: 8px; display: flex; flex-wrap: wrap; gap: 2px 22px; }
.range .key i { display: inline-block; vertical-align: -1px; margin-right: 8px; background: var(--series-1);
  border-radius: 3px; height: 12px; width: 5px; }
.range .key i.wide { width: 20px; opacity: .38; }
.range .key i.thin { width: 2px; background: var(--muted); }
.points circle { fill: var(--series-1); fill-opacity: .38; }
.points .same { stroke: var(--muted); stroke-width: 1.4; stroke-dasharray: 5 4; }
.points .run { fill-opacity: .75; }
.points .mean { stroke: var(--ink); stroke-width: 2; }
.points text.name { fill: var(--ink); paint-order: stroke; stroke: var(--surface); stroke-width: 4px; }
.points.strip svg.axes { margin: 4px 20px 44px 12px; width: calc(100% - 32px); }
.points .scatter-wrap { max-width: 560px; }
"""


def interval_bar(score: float, interval: tuple[float, float] | None, baseline: tuple[str, float] | None = None) -> str:
    """A figure in percent on its whole scale, with its interval and what needs no model."""
    low = -100.0 if min(score, *(interval or (score,))) < 0 else 0.0
    if score > 100 or (interval and interval[1] > 100.001):
        return ""  # no share and no correlation: it has no scale

    def place(value: float) -> float:
        return round(100 * (min(max(value, low), 100.0) - low) / (100 - low), 3)

    band = key = ""
    if interval is not None:
        left, right = map(place, interval)
        band = f'<span class="band" style="left:{left}%;width:{round(right - left, 3)}%"></span>'
        key = f'<span><i class="wide"></i>95 % interval {interval[0]:.1f} to {interval[1]:.1f}</span>'
    base = ""
    if baseline is not None:
        base = f'<span class="base" style="left:{place(baseline[1])}%"></span>'
        key += f'<span><i class="thin"></i>{escape(baseline[0])} {baseline[1]:.1f}</span>'
    dot = f'<span class="dot" style="left:{place(score)}%"></span>'
    return (
        f'<div class="range"><div class="track" role="img" aria-label="{score:.1f} on a scale of {low:.0f} to 100">'
        f'{band}{base}{dot}</div><div class="ends"><span>{low:.0f}</span><span>100</span></div>'
        f'<div class="key"><span><i></i>this model {score:.1f}</span>{key}</div></div>'
    )


def scatter(values: Sequence[tuple[float, float]], height: int = 420) -> str:
    """What was said, upwards, against what was right, across; points on the dashed line are exact.

    Shape: values (examples, 2): right, said.
    """
    points = np.asarray([pair for pair in values if np.isfinite(pair).all()], dtype=np.float64).reshape(-1, 2)
    if not len(points):
        return '<figure class="chart"><p class="chart-empty">No values yet.</p></figure>'
    if len(points) > POINTS:
        points = points[np.random.default_rng(0).choice(len(points), POINTS, replace=False)]
    ticks = nice_ticks(*widened(float(points.min()), float(points.max())), wanted=6, covers=True)
    low, high = ticks[0], ticks[-1]
    plane = Plane(low, high, low, high, height)
    dots = "".join(
        f'<circle cx="{plane.across(right)}%" cy="{plane.down(said)}" r="3.5">'
        f"<title>right {right:.4g}, said {said:.4g}</title></circle>"
        for right, said in points
    )
    same = f'<line class="same" x1="0" y1="{height}" x2="100%" y2="0"/>'
    return (
        f'<figure class="chart points" style="--height:{height}px"><div class="scatter-wrap">'
        f'<svg class="axes" role="img" aria-label="said against right, {len(points)} examples">'
        f"{axes(plane, ticks, ticks, 'right', 'said')}{same}{dots}</svg></div></figure>"
    )


def strip(rows: Sequence[tuple[str, Sequence[float]]], *, x_label: str) -> str:
    """The scores of runs, one line of points for each row (its name and the scores), with their mean as a bar."""
    values = [value for _, scores in rows for value in scores]
    low, high = widened(min(values), max(values))
    ticks = nice_ticks(low, high, wanted=5, covers=True)
    step, height = 52, 52 * len(rows)
    plane = Plane(ticks[0], ticks[-1], 0.0, 1.0, height)
    parts = []
    for x in ticks:
        place = plane.across(x)
        parts.append(
            f'<line class="rule" x1="{place}%" x2="{place}%" y1="0" y2="{height}"/>'
            f'<text x="{place}%" y="{height}" dy="19" text-anchor="middle">{short_number(x)}</text>'
        )
    for number, (name, scores) in enumerate(rows):
        middle = number * step + step / 2 + 8
        mean = fmean(scores)
        spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
        parts.append(f'<text class="name" x="0" y="{number * step + 16}">{escape(name)}: {mean:.2f}{spread}</text>')
        parts += [
            f'<circle class="run" cx="{plane.across(score)}%" cy="{middle}" r="6"><title>{score:.3f}</title></circle>'
            for score in scores
        ]
        place = plane.across(mean)
        parts.append(f'<line class="mean" x1="{place}%" x2="{place}%" y1="{middle - 11}" y2="{middle + 11}"/>')
    parts.append(f'<text x="100%" y="{height}" dy="38" text-anchor="end">{escape(x_label)}</text>')
    return (
        f'<figure class="chart points strip" style="--height:{height}px">'
        f'<svg class="axes" role="img" aria-label="{escape(x_label)} of {len(values)} runs">'
        f"{''.join(parts)}</svg></figure>"
    )
