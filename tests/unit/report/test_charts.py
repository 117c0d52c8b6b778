"""Charts: positions of values, gaps, reference lines, legends, hover titles, escaped names."""

import math
import re

import numpy as np
import pytest
from helpers_pages import HOSTILE, Outline

from bertsmith.report.charts import (
    MAX_MARKERS,
    Marker,
    Series,
    heat_map,
    kernel_chart,
    line_chart,
    marker_chart,
    nice_ticks,
    scatter_chart,
    short_number,
    strip_chart,
    thin_points,
)


def positions(outline: Outline) -> list[tuple[float, float]]:
    """Return the horizontal and vertical position of every circle."""
    circles = [drawn for tag, drawn in outline.elements if tag == "circle" and "cx" in drawn]
    return [(float(str(one["cx"]).rstrip("%")), float(str(one["cy"]))) for one in circles]


@pytest.mark.parametrize(
    "points",
    [[(5.0, 2.0)], [(0.0, 0.0)], [(1.0, 3.0), (2.0, 3.0)], [(1.0, 1e-7), (2.0, 2e-7)], [(1.0, 2.0), (1.0, 9.0)]],
    ids=["one point", "one point at zero", "equal values", "tiny values", "one step twice"],
)
def test_every_point_is_inside_the_chart(points: list[tuple[float, float]]) -> None:
    drawn = positions(Outline(line_chart([Series("loss", points)], x_label="step", y_label="nats", height=200)))
    assert len(drawn) == len(points)
    assert all(0 <= x <= 100 and 0 <= y <= 200 for x, y in drawn)


@pytest.mark.parametrize("series", [[], [Series("a", [])], [Series("a", [(1.0, math.nan)])]])
def test_empty_chart_has_a_message(series: list[Series]) -> None:
    outline = Outline(line_chart(series, x_label="step", y_label="nats", reference=("level", 1.0)))
    assert outline.count("svg") == 0
    assert "No values of nats yet" in outline.visible
    assert "No values" in marker_chart([], x_label="x", y_label="y")
    assert "No values" in scatter_chart([(1.0, math.nan)], x_label="x", y_label="y")


def test_larger_values_are_higher_and_gaps_break_the_curve() -> None:
    text = line_chart([Series("a", [(0, 1), (1, math.inf), (2, 2), (3, 3)])], x_label="x", y_label="y")
    match = re.search(r' d="([^"]+)"', text)
    assert match is not None
    assert re.sub(r"[^ML]", "", match.group(1)) == "MML"
    heights = [y for _, y in positions(Outline(text))]
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == 3


def test_line_chart_shows_reference_legend_and_hover_titles() -> None:
    series = [Series("training", [(0, 9), (10, 4)]), Series("<held-out>", [(10, 4.5)])]
    outline = Outline(line_chart(series, x_label="step", y_label="nats", reference=("unigram level", 12.0)))
    (dashed,) = [attributes for tag, attributes in outline.elements if attributes.get("class") == "reference"]
    assert float(str(dashed["y1"])) >= 0  # above every point, but inside the chart
    assert "unigram level" in outline.visible
    assert outline.count("li") == 2
    assert "<held-out>: 4.5 at step 10" in outline.titles


def test_markers_lie_at_their_values() -> None:
    markers = [Marker(5.0, 10.0, HOSTILE), Marker(10.0, 20.0, "b", shape="M0 0H1V1Z", style="hollow", label="chosen")]
    lines = [("red", [(5.0, 10.0), (10.0, 20.0)])]
    outline = Outline(
        marker_chart(
            markers,
            x_label="ms",
            y_label="score",
            lines=lines,
            x_reference=("budget", 8.0),
            y_reference=("floor", 12.0),
        )
    )
    assert positions(outline)[:1] == [(50.0, 300.0)]  # axes from 0 to 10 and from 10 to 20
    (shape,) = [attributes for tag, attributes in outline.elements if tag == "svg" and attributes.get("x")]
    assert (shape["x"], shape["y"]) == ("100.0%", "0.0")
    assert HOSTILE in outline.titles
    assert outline.count("line", "reference") == 2
    assert outline.count("path", "curve") == 1
    for text in ("budget", "floor", "chosen"):
        assert text in outline.visible


def test_scatter_chart_is_limited_in_size() -> None:
    many = [(float(number), float(number)) for number in range(MAX_MARKERS + 500)]
    assert Outline(scatter_chart(many, x_label="x", y_label="y")).count("circle") == MAX_MARKERS


def test_strip_chart_shows_every_run_and_the_mean() -> None:
    outline = Outline(strip_chart([("fast", [70.0, 72.0]), ("slow", [50.0])], x_label="accuracy"))
    assert outline.count("circle", "run") == 3
    assert "fast: 71.00 ± 1.41" in outline.visible
    assert "slow: 50.00" in outline.visible


def test_heat_map_covers_every_weight_once() -> None:
    paths = re.findall(r' d="([^"]+)"', heat_map(np.eye(5)))
    assert paths == ["".join(f"M{position} {position}h1v1h-1z" for position in range(5))]


def test_kernel_chart_lists_its_taps() -> None:
    outline = Outline(kernel_chart([-1, 0, 1], [0.25, -0.5, 0.0], -0.5, 0.5, "layer 1, head 1"))
    assert outline.titles == ["layer 1, head 1: −1: 0.250, 0: -0.500, 1: 0.000"]
    assert outline.count("rect") == 3
    assert outline.count("rect", "below") == 1


def test_thinning_keeps_spikes() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    points[4321] = (4321.0, 50.0)
    thinned = list(thin_points(points, 200))
    assert len(thinned) <= 200
    assert (4321.0, 50.0) in thinned
    assert thinned == sorted(thinned)


@pytest.mark.parametrize(
    ("low", "high", "count", "covers", "ticks"),
    [
        (0, 10, 5, False, [0, 2, 4, 6, 8, 10]),
        (3.98, 9.1, 6, True, [3, 4, 5, 6, 7, 8, 9, 10]),
        (50, 990, 5, False, [200, 400, 600, 800]),
        (-1, 1, 4, True, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, count: int, covers: bool, ticks: list[float]) -> None:
    assert nice_ticks(low, high, count=count, covers=covers) == pytest.approx(ticks)


def test_numbers_are_short() -> None:
    numbers = [0, 0.25, 1500, 20_000, 1_500_000, 2e9, 3e-5, -12_000]
    assert [short_number(number) for number in numbers] == ["0", "0.25", "1,500", "20k", "1.5M", "2B", "3e-5", "-12k"]
    assert short_number(5000, largest=20_000) == "5k"
