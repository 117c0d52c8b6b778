"""Charts of the reports as inline SVG, without a plotting library.

Only curves stretch with the window: they are in a nested SVG. Labels and markers are positioned in percent of the
width, so that a label has the same size on a phone and on a wide screen. Styles are in templates/charts.css.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import numpy as np
from markupsafe import Markup

from bertsmith.errors import shorten

COLOURS = 8  # --series-1 to --series-8 in base.css
MAX_CURVE_POINTS = 800  # more are indistinguishable on a screen
MAX_TITLED_POINTS = 60
MAX_VISIBLE_POINTS = 30
MAX_MARKERS = 1500  # more would only make the page larger
SHADES = 8  # of a small heat map
KERNEL_HEIGHT = 40
LABEL_HEIGHT = 17  # pixels
MAX_END_LABEL = 22  # characters for which charts.css has room

Point = tuple[float, float]
LogRow = Mapping[str, Any]
Reference = tuple[str, float]
"""Label and position of a dashed line."""


@dataclass(frozen=True)
class Series:
    """A named curve; a point with a non-finite value leaves a gap."""

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    """Shaded range around the curve: x, lowest and highest y."""


@dataclass(frozen=True)
class Marker:
    """A single point with a hover title; `shape` is an SVG path around (0, 0), or None for a circle."""

    x: float
    y: float
    title: str
    colour: int = 0
    radius: float = 3.5
    shape: str | None = None
    style: str = ""
    """A class of charts.css: "hollow" or "pale"."""
    label: str = ""
    """Draws a ring around the marker and this label beside it."""
    key: int | None = None
    """Number by which the script of a page finds a marker that has a shape."""


@dataclass(frozen=True)
class Panel:
    """A chart with a heading."""

    heading: str
    chart: Markup


@dataclass(frozen=True)
class Plane:
    """Maps values to positions: horizontally in percent of the width, vertically in pixels."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    height: int
    x_range: tuple[float, float] | None = None
    """Ends of the horizontal axis; by default its outer ticks."""

    def x(self, value: float) -> float:
        low, high = self.x_range or (self.x_ticks[0], self.x_ticks[-1])
        return round(100 * (value - low) / (high - low), 3)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(self.height * (high - value) / (high - low), 2)


def column(rows: Iterable[LogRow], key: str, *, keep_gaps: bool = False) -> list[Point]:
    """Return (step, value) of the log rows that have the key; non-finite values only with `keep_gaps`."""
    pairs = [(float(row["step"]), float(row[key])) for row in rows if row.get(key) is not None]
    return pairs if keep_gaps else [pair for pair in pairs if math.isfinite(pair[1])]


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    reference: Reference | None = None,
    height: int = 260,
    y_from_zero: bool = False,
    x_from_zero: bool = False,
    label_at_start: bool = False,
    has_end_labels: bool = False,
) -> Markup:
    """Draw one curve per series and a dashed horizontal line at `reference`.

    Without `x_from_zero` the horizontal axis starts at 0 only if the first point is near 0. With `label_at_start` the
    label of the reference line is on the left, where rising curves do not overlap it. With `has_end_labels` every curve
    ends in its name, and a legend is shown on narrow screens only.
    """
    drawn = [one for one in series if any(_is_finite(point) for point in one.points)]
    if not drawn:
        return _empty(f"No values of {y_label} yet.")
    finite = [point for one in drawn for point in one.points if _is_finite(point)]
    values = (
        [y for _, y in finite]
        + [y for one in drawn for _, *ends in one.band for y in ends]
        + ([reference[1]] if reference else [])
        + ([0.0] if y_from_zero else [])
    )
    x_low, x_high = _widen(min(x for x, _ in finite), max(x for x, _ in finite))
    if 0 < x_low < (x_high if x_from_zero else 0.1 * x_high):
        x_low = 0.0
    y_ticks = nice_ticks(*_widen(min(values), max(values)), count=max(3, height // 50), covers=True)
    plane = Plane(nice_ticks(x_low, x_high, count=5), y_ticks, height, (x_low, x_high))
    elements = [_axes(plane, x_label, y_label)]
    elements += [_band(one.band, plane, series_colour(index)) for index, one in enumerate(drawn) if one.band]
    for index, one in enumerate(drawn):
        points = thin_points(one.points, MAX_CURVE_POINTS)
        is_dense = len(points) > MAX_TITLED_POINTS and len(drawn) > 1
        elements.append(_curve(points, plane, series_colour(index), " dense" if is_dense else ""))
    if reference is not None:
        elements.append(_horizontal_line(reference, plane, label_at_start))
    elements += [_points(one, plane, series_colour(index), x_label) for index, one in enumerate(drawn)]
    ranges = [(one.name, [y for x, y in one.points if _is_finite((x, y))]) for one in drawn]
    summary = "; ".join(f"{name} from {values[0]:.4g} to {values[-1]:.4g}" for name, values in ranges)
    legend = line_legend([one.name for one in drawn])
    style = ""
    if has_end_labels and len(drawn) > 1:
        elements += _end_labels(drawn, plane)
        style = " ended"
    return _figure(elements, height, f"{y_label} by {x_label}: {summary}", legend=legend, style=style)


def marker_chart(
    markers: Sequence[Marker],
    *,
    x_label: str,
    y_label: str,
    lines: Sequence[tuple[str, Sequence[Point]]] = (),
    x_reference: Reference | None = None,
    y_reference: Reference | None = None,
    label_at_start: bool = False,
    legend: Markup | None = None,
    height: int = 300,
) -> Markup:
    """Draw markers, `lines` (colour and points) and dashed reference lines; the horizontal axis starts at 0."""
    if not markers:
        return _empty(f"No values of {y_label} yet.")
    x_values = [marker.x for marker in markers] + ([x_reference[1]] if x_reference else [])
    y_values = [marker.y for marker in markers] + ([y_reference[1]] if y_reference else [])
    plane = Plane(
        nice_ticks(0.0, max(*x_values, 1e-9), count=6, covers=True),
        nice_ticks(*_widen(min(y_values), max(y_values)), count=6, covers=True),
        height,
    )
    elements = [_axes(plane, x_label, y_label)]
    elements += [_curve(points, plane, colour) for colour, points in lines]
    if x_reference is not None:
        elements.append(_vertical_line(x_reference, plane))
    if y_reference is not None:
        elements.append(_horizontal_line(y_reference, plane, label_at_start))
    elements += [_marker(marker, plane) for marker in markers]
    ends = f' data-x-end="{plane.x_ticks[-1]:.10g}" data-y-ends="{plane.y_ticks[0]:.10g} {plane.y_ticks[-1]:.10g}"'
    return _figure(elements, height, f"{y_label} by {x_label}, {len(markers)} points", legend=legend, data=ends)


def scatter_chart(values: Sequence[Point], *, x_label: str, y_label: str, height: int = 420) -> Markup:
    """Draw points on equal axes with a dashed diagonal, where x = y."""
    points = np.asarray([pair for pair in values if _is_finite(pair)], dtype=np.float64).reshape(-1, 2)
    if not len(points):
        return _empty("No values yet.")
    if len(points) > MAX_MARKERS:
        points = points[np.random.default_rng(0).choice(len(points), MAX_MARKERS, replace=False)]
    ticks = nice_ticks(*_widen(float(points.min()), float(points.max())), count=6, covers=True)
    plane = Plane(ticks, ticks, height)
    elements = [_axes(plane, x_label, y_label)]
    elements.append(f'<line class="reference" x1="0" y1="{height}" x2="100%" y2="0"/>')
    elements += [_marker(Marker(x, y, f"{x_label} {x:.4g}, {y_label} {y:.4g}", style="pale"), plane) for x, y in points]
    return _figure(elements, height, f"{y_label} by {x_label}, {len(points)} examples")


@dataclass(frozen=True)
class IntervalBar:
    """An estimate with its confidence interval; `colour` is the index of a series."""

    name: str
    mean: float
    low: float
    high: float
    colour: int = 0


def interval_chart(bars: Sequence[IntervalBar], *, x_label: str) -> Markup:
    """Draw one confidence interval per line, with a dashed line at 0."""
    if not bars:
        return _empty(f"No values of {x_label} yet.")
    step, height = 46, 46 * len(bars)
    ends = [end for bar in bars for end in (bar.low, bar.high, bar.mean)]
    plane = Plane(nice_ticks(*_widen(min(0.0, *ends), max(0.0, *ends)), count=5, covers=True), (0.0, 1.0), height)
    elements = _strip_axis(plane, x_label)
    elements.append(f'<line class="reference" x1="{plane.x(0)}%" x2="{plane.x(0)}%" y1="0" y2="{height}"/>')
    for number, bar in enumerate(bars):
        middle, colour = number * step + step / 2 + 8, series_colour(bar.colour)
        text = f"{bar.name}: {bar.mean:+.3g} ({bar.low:+.3g} to {bar.high:+.3g})"
        elements.append(f'<text class="label" x="0" y="{number * step + 16}">{escape(text)}</text>')
        elements.append(
            f'<line class="interval" style="stroke:{colour}" x1="{plane.x(bar.low)}%" x2="{plane.x(bar.high)}%" '
            f'y1="{middle}" y2="{middle}"/>'
            f'<circle cx="{plane.x(bar.mean)}%" cy="{middle}" r="5" style="fill:{colour}"/>'
        )
    return _figure(elements, height, f"{x_label}: {len(bars)} intervals", style=" strip")


def _strip_axis(plane: Plane, x_label: str) -> list[str]:
    """Return the vertical rules and the labels of a chart that has one line per row."""
    elements = []
    for x in plane.x_ticks:
        elements.append(
            f'<line class="rule" x1="{plane.x(x)}%" x2="{plane.x(x)}%" y1="0" y2="{plane.height}"/>'
            f'<text x="{plane.x(x)}%" y="{plane.height}" dy="19" text-anchor="middle">{short_number(x)}</text>'
        )
    elements.append(f'<text x="100%" y="{plane.height}" dy="38" text-anchor="end">{escape(x_label)}</text>')
    return elements


def strip_chart(rows: Sequence[tuple[str, Sequence[float]]], *, x_label: str, digits: int = 2) -> Markup:
    """Draw a line of points per row (its name and values), with the mean as a bar."""
    values = [value for _, row in rows for value in row]
    step, height = 52, 52 * len(rows)
    plane = Plane(nice_ticks(*_widen(min(values), max(values)), count=5, covers=True), (0.0, 1.0), height)
    elements = _strip_axis(plane, x_label)
    for number, (name, row) in enumerate(rows):
        middle, mean = number * step + step / 2 + 8, fmean(row)
        text = f"{name}: {mean:.{digits}f}" + (f" ± {stdev(row):.{digits}f}" if len(row) > 1 else "")
        elements.append(f'<text class="label" x="0" y="{number * step + 16}">{escape(text)}</text>')
        elements += [
            f'<circle class="run" cx="{plane.x(value)}%" cy="{middle}" r="6"><title>{value:.3f}</title></circle>'
            for value in row
        ]
        x = plane.x(mean)
        elements.append(f'<line class="mean" x1="{x}%" x2="{x}%" y1="{middle - 11}" y2="{middle + 11}"/>')
    return _figure(elements, height, f"{x_label} of {len(values)} runs", style=" strip")


def kernel_chart(distances: Sequence[int], taps: Sequence[float], low: float, high: float, name: str) -> Markup:
    """Draw the taps of a convolution kernel as bars on the scale from `low` to `high`."""
    unit = KERNEL_HEIGHT / ((high - low) or 1.0)
    zero = high * unit
    bars = "".join(
        f'<rect class="{"below" if tap < 0 else "above"}" x="{10 * index + 1}" width="8" '
        f'y="{min(zero, zero - tap * unit):.1f}" height="{abs(tap) * unit:.1f}"/>'
        for index, tap in enumerate(taps)
    )
    line = f'<line class="zero" x1="0" x2="{10 * len(taps)}" y1="{zero:.1f}" y2="{zero:.1f}"/>' if low < 0 else ""
    listed = ", ".join(f"{signed(distance)}: {tap:.3f}" for distance, tap in zip(distances, taps, strict=True))
    return Markup(
        f'<svg viewBox="0 0 {10 * len(taps)} {KERNEL_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)}"><title>{escape(name)}: {listed}</title>{bars}{line}</svg>'
    )


def heat_map(weights: np.ndarray) -> Markup:
    """Draw a small square map of weights from 0 to 1; shade grows with the square root of the weight.

    Shape: weights (length, length).
    """
    levels = np.rint(np.sqrt(weights.clip(0, 1)) * SHADES).astype(int)
    paths: dict[int, list[str]] = {}  # one path per shade; neighbouring cells of a row are one rectangle
    for row, line in enumerate(levels):
        ends = [0, *(np.flatnonzero(np.diff(line)) + 1), len(line)]
        for start, stop in pairwise(ends):
            if level := int(line[start]):
                paths.setdefault(level, []).append(f"M{start} {row}h{stop - start}v1h{start - stop}z")
    drawn = "".join(
        f'<path style="fill:{heat_colour(level / SHADES)}" d="{"".join(paths[level])}"/>' for level in sorted(paths)
    )
    size = len(levels)
    return Markup(f'<svg viewBox="0 0 {size} {size}" shape-rendering="crispEdges" aria-hidden="true">{drawn}</svg>')


def heat_colour(share: float) -> str:
    """Return the CSS colour of a share from 0 to 1 on the heat scale of the page."""
    share = min(max(share, 0.0), 1.0)
    low, high, weight = ("low", "middle", 2 * share) if share <= 0.5 else ("middle", "high", 2 * share - 1)
    return f"color-mix(in srgb,var(--heat-{high}) {100 * weight:.0f}%,var(--heat-{low}))"


def series_colour(index: int) -> str:
    """Return the CSS colour of a series; colours repeat after the eighth."""
    return f"var(--series-{index % COLOURS + 1})"


def shape_legend(entries: Sequence[tuple[str, str, int]]) -> Markup:
    """Return a legend of marker shapes: name, SVG path and colour of each."""
    items = "".join(
        f'<li><svg viewBox="-7 -7 14 14"><path style="fill:{series_colour(index)}" d="{shape}"/></svg>'
        f"{escape(name)}</li>"
        for name, shape, index in entries
    )
    return Markup(f'<ul class="legend">{items}</ul>')


def line_legend(names: Sequence[str]) -> Markup | None:
    """Return a legend of line colours, or None if there is only one line."""
    if len(names) == 1:
        return None
    items = (
        f'<li><i style="border-color:{series_colour(index)}"></i>{escape(name)}</li>'
        for index, name in enumerate(names)
    )
    return Markup(f'<ul class="legend">{"".join(items)}</ul>')


def nice_ticks(low: float, high: float, *, count: int, covers: bool = False) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten within low..high, or around it if `covers`."""
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    # the tolerance treats a bound that equals a tick up to rounding as equal
    first, last = low / step, high / step
    start = math.floor(first + 1e-9) if covers else math.ceil(first - 1e-9)
    stop = math.ceil(last - 1e-9) if covers else math.floor(last + 1e-9)
    return [index * step for index in range(start, stop + 1)]


def short_number(value: float, *, largest: float | None = None) -> str:
    """Format a number as an axis label: 0.25, 1,500, 20k, 1.5M, 2e15; `largest` sets the unit of a whole axis."""
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


def signed(value: int) -> str:
    """Format an integer with a minus sign instead of a hyphen."""
    return f"−{-value}" if value < 0 else str(value)


def thin_points(points: Sequence[Point], limit: int) -> Sequence[Point]:
    """Return at most `limit` points: the lowest and highest of each interval, so that spikes stay visible."""
    if len(points) <= limit:
        return points
    width = math.ceil(len(points) / (limit // 2))
    thinned: list[Point] = []
    for start in range(0, len(points), width):
        finite = [point for point in points[start : start + width] if _is_finite(point)]
        if not finite:
            thinned.append((points[start][0], math.nan))
            continue
        thinned += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
    return thinned


def _is_finite(point: Point) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _widen(low: float, high: float) -> tuple[float, float]:
    """Return a non-empty range: a single value is widened on both sides."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, high + room


def _empty(message: str) -> Markup:
    return Markup(f'<figure class="chart"><p class="chart-empty">{escape(message)}</p></figure>')


def _figure(
    elements: Sequence[str],
    height: int,
    summary: str,
    *,
    legend: Markup | None = None,
    style: str = "",
    data: str = "",
) -> Markup:
    """Return the figure; `data` are attributes for the script of a page."""
    return Markup(
        f'<figure class="chart{style}" style="--height:{height}px"{data}>{legend or ""}'
        f'<svg class="axes" role="img" aria-label="{escape(summary)}">{"".join(elements)}</svg></figure>'
    )


def _axes(plane: Plane, x_label: str, y_label: str) -> str:
    y_largest, x_largest = max(map(abs, plane.y_ticks)), max(map(abs, plane.x_ticks))
    rows = "".join(
        f'<line class="rule" x1="0" x2="100%" y1="{plane.y(y)}" y2="{plane.y(y)}"/>'
        f'<text x="0" dx="-10" y="{plane.y(y)}" dy="4" text-anchor="end">{short_number(y, largest=y_largest)}</text>'
        for y in plane.y_ticks
    )
    columns = "".join(
        f'<text x="{plane.x(x)}%" y="{plane.height}" dy="19" text-anchor="middle">'
        f"{short_number(x, largest=x_largest)}</text>"
        for x in plane.x_ticks
    )
    return (
        f'{rows}{columns}<text x="0" dx="-48" y="-15">{escape(y_label)}</text>'
        f'<text x="100%" y="{plane.height}" dy="38" text-anchor="end">{escape(x_label)}</text>'
    )


def _curve(points: Sequence[Point], plane: Plane, colour: str, style: str = "") -> str:
    path, pen = [], "M"
    for point in points:
        if not _is_finite(point):
            pen = "M"
            continue
        path.append(f"{pen}{10 * plane.x(point[0]):.1f} {plane.y(point[1])}")
        pen = "L"
    return (
        f'<svg width="100%" height="{plane.height}" viewBox="0 0 1000 {plane.height}" preserveAspectRatio="none" '
        f'overflow="visible"><path class="curve{style}" style="stroke:{colour}" d="{"".join(path)}"/></svg>'
    )


def _band(band: Sequence[tuple[float, float, float]], plane: Plane, colour: str) -> str:
    corners = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]
    path = "L".join(f"{10 * plane.x(x):.1f} {plane.y(y)}" for x, y in corners)
    return (
        f'<svg width="100%" height="{plane.height}" viewBox="0 0 1000 {plane.height}" preserveAspectRatio="none">'
        f'<path class="band" style="fill:{colour}" d="M{path}Z"/></svg>'
    )


def _end_labels(drawn: Sequence[Series], plane: Plane) -> list[str]:
    """Return the name of each series at its last point, moved apart where names would overlap."""
    ends = [[point for point in one.points if _is_finite(point)][-1] for one in drawn]
    order = sorted(range(len(ends)), key=lambda index: plane.y(ends[index][1]))
    heights, lowest = {}, -math.inf
    for index in order:
        lowest = max(plane.y(ends[index][1]), lowest + LABEL_HEIGHT)
        heights[index] = lowest
    highest = float(plane.height)
    for index in reversed(order):  # names that were moved below the chart return into it
        heights[index] = highest = min(heights[index], highest)
        highest -= LABEL_HEIGHT
    return [
        f'<text class="label end" style="fill:{series_colour(index)}" x="{plane.x(ends[index][0])}%" dx="9" '
        f'y="{heights[index]:.1f}" dy="4">{escape(shorten(one.name, MAX_END_LABEL))}</text>'
        for index, one in enumerate(drawn)
    ]


def _points(series: Series, plane: Plane, colour: str, x_label: str) -> str:
    """Draw dots with a hover title; they are visible without hovering only if the curve has few points."""
    points = [point for point in series.points if _is_finite(point)]
    quiet = " quiet" if len(points) > MAX_VISIBLE_POINTS else ""
    stride = max(1, math.ceil(len(points) / MAX_TITLED_POINTS))
    return "".join(
        f'<circle class="point{quiet}" style="fill:{colour}" cx="{plane.x(x)}%" cy="{plane.y(y)}" r="3">'
        f"<title>{escape(f'{series.name}: {y:.4g} at {x_label} {x:,.10g}')}</title></circle>"
        for x, y in [*points[:-1:stride], points[-1]]
    )


def _marker(marker: Marker, plane: Plane) -> str:
    x, y, colour = plane.x(marker.x), plane.y(marker.y), series_colour(marker.colour)
    fill = "" if marker.style == "hollow" else f"fill:{colour};"
    look = f'class="marker {marker.style}" style="{fill}stroke:{colour}"'
    title = f"<title>{escape(marker.title)}</title>"
    if marker.shape is None and not marker.label:
        return f'<circle {look} cx="{x}%" cy="{y}" r="{marker.radius:g}">{title}</circle>'
    anchor, shift = ("end", -14) if x > 60 else ("start", 14)
    label = ""
    if marker.label:
        label = (
            f'<circle class="ring" r="10"/><text class="label strong" x="{shift}" y="-12" text-anchor="{anchor}">'
            f"{escape(marker.label)}</text>"
        )
    shape = f'<path {look} d="{marker.shape}"/>' if marker.shape else f'<circle {look} r="{marker.radius:g}"/>'
    key = "" if marker.key is None else f' data-key="{marker.key}"'
    return f'<svg x="{x}%" y="{y}" overflow="visible"{key}>{shape}{label}{title}</svg>'


def _horizontal_line(reference: Reference, plane: Plane, at_start: bool) -> str:
    label, value = reference
    y = plane.y(value)
    shift = 18 if y < 16 else -8  # at the very top the label would leave the chart
    position = 'x="0" dx="6" text-anchor="start"' if at_start else 'x="100%" text-anchor="end"'
    return (
        f'<line class="reference" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        f'<text class="label" {position} y="{y}" dy="{shift}">{escape(label)}</text>'
    )


def _vertical_line(reference: Reference, plane: Plane) -> str:
    label, value = reference
    x = plane.x(value)
    anchor, shift = ("end", -6) if x > 70 else ("start", 6)
    return (
        f'<line class="reference" x1="{x}%" x2="{x}%" y1="0" y2="{plane.height}"/>'
        f'<text class="label" x="{x}%" dx="{shift}" y="{plane.height - 8}" text-anchor="{anchor}">'
        f"{escape(label)}</text>"
    )
