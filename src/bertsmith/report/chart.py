"""A line chart as inline SVG, without any plotting library.

Only the curves stretch with the window: they lie in a nested SVG of their own, while texts and dots are placed in
percent of the width, so a label is as large on a phone as on a wide screen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

STYLE = """
.chart { --height: 260px; }
.chart svg.axes { display: block; width: calc(100% - 56px); height: var(--height); margin: 32px 8px 44px 48px;
  overflow: visible; }
.chart text { font: 12.5px var(--sans); fill: var(--muted); font-variant-numeric: tabular-nums; }
.chart .rule { stroke: var(--line); stroke-width: 1; shape-rendering: crispEdges; }
.chart .curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round;
  vector-effect: non-scaling-stroke; }
.chart .curve.dense { stroke-width: 1.4; stroke-opacity: .6; }
.chart .reference { stroke: var(--muted); stroke-width: 1.4; stroke-dasharray: 5 4; }
.chart .reference-label { fill: var(--ink); paint-order: stroke; stroke: var(--surface); stroke-width: 5px;
  stroke-linejoin: round; }
.chart .mark { stroke: transparent; stroke-width: 14; }
.chart .mark.quiet { fill-opacity: 0; }
.chart .mark:hover { fill-opacity: 1; r: 4.5px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 14px; color: var(--muted); list-style: none; }
.legend li { display: flex; align-items: center; gap: 8px; }
.legend i { width: 18px; border-top: 3px solid; border-radius: 2px; }
.chart-empty { color: var(--muted); }
"""

COLOURS = 8  # --series-1 to --series-8 in page.py
POINTS_DRAWN = 800  # more cannot be told apart on a screen
POINTS_NAMED = 60  # a hover title on each


@dataclass(frozen=True)
class Series:
    """A named curve; a point whose value is not finite leaves a gap."""

    name: str
    points: list[tuple[float, float]]


def column(rows: list[dict[str, Any]], key: str, *, keep_gaps: bool = False) -> list[tuple[float, float]]:
    """(step, value) of the rows that have the key; values that are not finite only with `keep_gaps`."""
    pairs = [(float(row["step"]), float(row[key])) for row in rows if row.get(key) is not None]
    return pairs if keep_gaps else [pair for pair in pairs if math.isfinite(pair[1])]


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    reference: tuple[str, float] | None = None,
    height: int = 260,
    from_zero: bool = False,
    starts_at_zero: bool = False,
    reference_at_start: bool = False,
) -> str:
    """A `<figure>` with one curve per series, and a dashed horizontal line for `reference` (its label and value).

    `from_zero` is of the values, `starts_at_zero` of what they go over; without it that axis starts at 0 only where its
    first point is near. With `reference_at_start` the line's label stands where curves that rise to it are far below.
    """
    drawn = [one for one in series if any(_is_finite(point) for point in one.points)]
    if not drawn:
        return f'<figure class="chart"><p class="chart-empty">No values of {escape(y_label)} yet.</p></figure>'
    finite = [point for one in drawn for point in one.points if _is_finite(point)]
    values = [y for _, y in finite]
    if reference is not None:
        values.append(reference[1])
    if from_zero:
        values.append(0.0)
    x_low, x_high = widened(min(x for x, _ in finite), max(x for x, _ in finite))
    if 0 < x_low < (x_high if starts_at_zero else 0.1 * x_high):
        x_low = 0.0  # an axis of steps starts at nothing, not at the first row of the log
    y_ticks = nice_ticks(*widened(min(values), max(values)), wanted=max(3, height // 50), covers=True)
    x_ticks = nice_ticks(x_low, x_high, wanted=5)
    plane = Plane(x_low, x_high, y_ticks[0], y_ticks[-1], height)

    parts = [axes(plane, x_ticks, y_ticks, x_label, y_label)]
    parts += [_curve(one, plane, colour(index), is_alone=len(drawn) == 1) for index, one in enumerate(drawn)]
    if reference is not None:
        parts.append(reference_line(reference, plane, at_start=reference_at_start))
    parts += [_marks(one, plane, colour(index), x_label) for index, one in enumerate(drawn)]
    told = f"{y_label} by {x_label}: " + "; ".join(f"{one.name} {_told(one)}" for one in drawn)
    return (
        f'<figure class="chart" style="--height:{height}px">{legend(drawn)}'
        f'<svg class="axes" role="img" aria-label="{escape(told)}">{"".join(parts)}</svg></figure>'
    )


def nice_ticks(low: float, high: float, *, wanted: int, covers: bool = False) -> list[float]:
    """About `wanted` round numbers, 1, 2 or 5 times a power of ten apart, inside low..high; with `covers` around it."""
    raw = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    # A little slack keeps a bound that is a tick up to rounding from adding or losing one.
    first, last = low / step, high / step
    start = math.floor(first + 1e-9) if covers else math.ceil(first - 1e-9)
    stop = math.ceil(last - 1e-9) if covers else math.floor(last + 1e-9)
    return [index * step for index in range(start, stop + 1)]


def short_number(value: float, *, largest: float | None = None) -> str:
    """A number as a label writes it: 0.25, 1,500, 20k, 1.5M, 2e15; `largest` settles the unit for all of an axis."""
    size = abs(value) if largest is None else largest
    if value == 0:
        return "0"
    if size >= 1e12:
        digits, power = f"{value:.3e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 2e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class Plane:
    """Where values lie: across in percent of the width, down in pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    height: int

    def across(self, x: float) -> float:
        """The place of x in percent of the width."""
        return round(100 * (x - self.x_low) / (self.x_high - self.x_low), 3)

    def down(self, y: float) -> float:
        """The place of y in pixels from the top."""
        return round(self.height * (self.y_high - y) / (self.y_high - self.y_low), 2)


def colour(index: int) -> str:
    """The colour of a series by its number; it comes again where there are more than colours."""
    return f"var(--series-{index % COLOURS + 1})"


def _is_finite(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def widened(low: float, high: float) -> tuple[float, float]:
    """A range that is never empty: one point, or equal values, get room on both sides."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, high + room


def axes(plane: Plane, x_ticks: list[float], y_ticks: list[float], x_label: str, y_label: str) -> str:
    """The lines and numbers around a drawing, with what its two directions are."""
    y_largest, x_largest = max(map(abs, y_ticks)), max(map(abs, x_ticks))
    rows = "".join(
        f'<line class="rule" x1="0" x2="100%" y1="{plane.down(y)}" y2="{plane.down(y)}"/>'
        f'<text x="0" dx="-10" y="{plane.down(y)}" dy="4" text-anchor="end">{short_number(y, largest=y_largest)}</text>'
        for y in y_ticks
    )
    columns = "".join(
        f'<text x="{plane.across(x)}%" y="{plane.height}" dy="19" text-anchor="middle">'
        f"{short_number(x, largest=x_largest)}</text>"
        for x in x_ticks
    )
    return (
        f"{rows}{columns}"
        f'<text x="0" dx="-48" y="-15">{escape(y_label)}</text>'
        f'<text x="100%" y="{plane.height}" dy="38" text-anchor="end">{escape(x_label)}</text>'
    )


def _curve(series: Series, plane: Plane, colour: str, *, is_alone: bool) -> str:
    points = thinned(series.points, POINTS_DRAWN)
    path, pen = [], "M"
    for point in points:
        if not _is_finite(point):
            pen = "M"
            continue
        path.append(f"{pen}{10 * plane.across(point[0]):.1f} {plane.down(point[1])}")
        pen = "L"
    dense = " dense" if len(points) > POINTS_NAMED and not is_alone else ""
    return (
        f'<svg width="100%" height="{plane.height}" viewBox="0 0 1000 {plane.height}" preserveAspectRatio="none" '
        f'overflow="visible"><path class="curve{dense}" style="stroke:{colour}" d="{"".join(path)}"/></svg>'
    )


def _marks(series: Series, plane: Plane, colour: str, x_label: str) -> str:
    """Dots that carry the value as a hover title; seen at once only where the curve has few points."""
    points = [point for point in series.points if _is_finite(point)]
    quiet = " quiet" if len(points) > 30 else ""
    stride = max(1, math.ceil(len(points) / POINTS_NAMED))
    named = [*points[:-1:stride], points[-1]]  # the last value is the one people ask for
    return "".join(
        f'<circle class="mark{quiet}" style="fill:{colour}" cx="{plane.across(x)}%" cy="{plane.down(y)}" r="3">'
        f"<title>{escape(f'{series.name}: {y:.4g} at {x_label} {x:,.10g}')}</title></circle>"
        for x, y in named
    )


def thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: of each stretch its lowest and highest, so that a spike stays seen."""
    if len(points) <= most:
        return points
    width = math.ceil(len(points) / (most // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), width):
        finite = [point for point in points[start : start + width] if _is_finite(point)]
        if not finite:
            kept.append((points[start][0], math.nan))
            continue
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def reference_line(reference: tuple[str, float], plane: Plane, *, at_start: bool = False) -> str:
    """A dashed horizontal line with its label and value."""
    label, value = reference
    y = plane.down(value)
    below = 18 if y < 16 else -8  # at the very top the label would leave the plane
    place = 'x="0" dx="6" text-anchor="start"' if at_start else 'x="100%" text-anchor="end"'
    return (
        f'<line class="reference" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        f'<text class="reference-label" {place} y="{y}" dy="{below}">'
        f"{escape(label)} {value:.2f}</text>"
    )


def legend(series: Sequence[Series]) -> str:
    """A key to the colours where there are several; the reference line carries its own label."""
    if len(series) == 1:
        return ""
    entries = [
        f'<li><i style="border-color:{colour(index)}"></i>{escape(one.name)}</li>' for index, one in enumerate(series)
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _told(series: Series) -> str:
    finite = [y for x, y in series.points if _is_finite((x, y))]
    return f"from {finite[0]:.4g} to {finite[-1]:.4g}"
