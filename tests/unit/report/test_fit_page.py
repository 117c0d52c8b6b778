"""Report page and model card of `fit`."""

import re
from dataclasses import replace

import pytest
from helpers_pages import HOSTILE, WHOLE, Outline, candidate, check_page, fit_outcome

from bertsmith.report.fit import front_chart, render_fit_card, render_fit_page
from bertsmith.shrinking.fit.result import MissResult
from bertsmith.shrinking.fit.settings import BudgetConfig


def test_page_shows_the_front_the_budget_and_every_candidate() -> None:
    outline = check_page(render_fit_page(fit_outcome(), "mine"), scripts=2)
    assert outline.count("path", "marker") == 3
    assert outline.count("path", "hollow") == 1
    assert outline.count("circle", "ring") == 1
    assert outline.count("line", "reference") == 1
    assert outline.count("path", "curve") == 1
    assert outline.count("tr") == 4
    for words in ("Accuracy 88.00 at 7.00\u00a0ms (p95)", "budget 8 ms", "~3.00", "int8 is slower", "A processor"):
        assert words in outline.visible


def test_markers_lie_at_their_latency() -> None:
    outline = Outline(render_fit_page(fit_outcome(), "mine"))
    positions = [
        float(str(attributes["x"]).rstrip("%"))
        for tag, attributes in outline.elements
        if tag == "svg" and "x" in attributes
    ]
    assert sorted(positions) == pytest.approx([15.0, 35.0, 100.0])


def test_engines_have_their_colours_in_any_order() -> None:
    names = ("onnxruntime", "torch", "compiled")
    rows = tuple(replace(candidate(name, 90.0 - number, 3.0), engine=name) for number, name in enumerate(names))
    found = replace(fit_outcome(chosen=rows[0]), candidates=rows, reference=rows[1])
    for ordered in (rows, rows[::-1]):
        legend = re.search(r'<ul class="legend">.*?</ul>', str(front_chart(replace(found, candidates=ordered)).chart))
        assert legend is not None
        assert re.findall(r"series-(\d).*?</svg>(\w+)", legend[0]) == [
            ("1", "torch"),
            ("2", "onnxruntime"),
            ("3", "compiled"),
        ]


def test_floor_and_miss_are_shown() -> None:
    misses = (MissResult("score", 95.0, 90.0, "score 90.00 instead of 95 (5.00 too low)"),)
    limit = BudgetConfig(at_least=95.0)
    nothing = fit_outcome(fits=False, chosen=None, nearest=WHOLE, misses=misses, limit=limit)
    visible = check_page(render_fit_page(nothing, "mine"), scripts=2).visible
    assert "No candidate meets the budget. The closest is whole, torch float32: score 90.00 instead of 95" in visible
    assert "at least 95" in visible


def test_hostile_names_are_escaped() -> None:
    outline = check_page(
        render_fit_page(fit_outcome(model=HOSTILE, metric=HOSTILE, notices=[HOSTILE]), HOSTILE), scripts=2
    )
    assert outline.count("b") == 1  # the name in the masthead


def test_card_shows_costs_and_usage() -> None:
    card = render_fit_card(fit_outcome(), "mine")
    assert "**p95 ≤ 8 ms at 128 tokens**" in card
    assert "| latency p95, ms | 7.00 | 20.00 |" in card
    assert len(re.findall(r"^\| \d \| 128 tokens \| 6\.50 \| 7\.00 \| 200 \| 351 \|$", card, re.MULTILINE)) == 5
    assert "95 % interval 86.0 to 90.0" in card
    assert 'Predictor.load("mine")' in card
    assert "A processor, 2 cores" in card
