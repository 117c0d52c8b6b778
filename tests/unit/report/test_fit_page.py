"""The page and the model card of a search for a budget."""

import re
from typing import Any

import pytest
from helpers_pages import HOSTILE, Outline, check_page

from bertsmith.report.fit import render_fit_card, render_fit_page


def row(name: str, score: float, latency: float, **more: Any) -> dict[str, Any]:
    """A candidate as candidates.jsonl has it."""
    plain = {
        "name": name,
        "words": f"{name}, torch float32",
        "network": name,
        "engine": "torch",
        "precision": "float32",
    }
    plain |= {"vocabulary": "whole", "parameters": 1200, "score": score, "latency_ms": latency, "size_mb": 12.34}
    plain |= {"memory_mb": 350.0, "is_measured": True, "on_front": False, "holds": None, "is_chosen": False}
    return {**plain, **more}


def figures(**more: Any) -> dict[str, Any]:
    latency = {"128": {"p50": 6.5, "p95": 7.0, "runs": 200}}
    chosen = row("half", 88.0, 7.0, is_chosen=True, on_front=True, holds=True)
    chosen |= {"timings": [{"latency": latency, "memory_mb": 351.0}] * 5}
    whole = row("whole", 90.0, 20.0, on_front=True, holds=False)
    guess = row("quarter", 80.0, 3.0, is_measured=False, on_front=True, memory_mb=None, precision="int8")
    plain = {
        "fits": True,
        "budget": "p95 ≤ 8 ms at 128 tokens",
        "metric": "accuracy",
        "chosen": chosen,
        "nearest": None,
    }
    plain |= {"misses": [], "reference": whole, "notices": ["int8 is slower"], "threads": 2, "examples": 872}
    plain |= {"machine": {"processor": "A processor", "cores": 2, "system": "Linux"}, "versions": {"torch": "2"}}
    plain |= {
        "conditions": {"batch": 1, "workloads": [{"name": "128"}]},
        "limits": {"percentile": 95, "latency_ms": 8.0},
    }
    plain |= {"model": "run/elastic", "data": "task", "part": "dev", "task": "classification", "measurements": 9}
    plain |= {"score": 88.0, "interval": [86.0, 90.0], "candidates": [whole, chosen, guess]}
    return {**plain, **more}


def test_page_shows_the_front_the_budget_and_every_candidate() -> None:
    outline = check_page(render_fit_page(figures(), "mine"))
    assert outline.count("path", "marker") == 3
    assert outline.count("path", "hollow") == 1
    assert outline.count("circle", "ring") == 1
    assert outline.count("line", "reference") == 1
    assert outline.count("path", "curve") == 1
    assert outline.count("tr") == 4
    for words in ("Accuracy 88.00 at 7.00\u00a0ms (p95)", "budget 8 ms", "~3.00", "int8 is slower", "A processor"):
        assert words in outline.visible


def test_markers_lie_at_their_latency() -> None:
    outline = Outline(render_fit_page(figures(), "mine"))
    places = [float(str(found["x"]).rstrip("%")) for tag, found in outline.elements if tag == "svg" and "x" in found]
    assert sorted(places) == pytest.approx([15.0, 35.0, 100.0])


def test_floor_and_miss_are_shown() -> None:
    limits = {"percentile": 95, "at_least": 95.0}
    misses = [{"words": "score 90.00 instead of 95 (5.00 too low)"}]
    nothing = figures(fits=False, chosen=None, nearest=figures()["reference"], misses=misses, limits=limits)
    visible = check_page(render_fit_page(nothing, "mine")).visible
    assert "No candidate meets the budget. The nearest is whole, torch float32: score 90.00 instead of 95" in visible
    assert "at least 95" in visible


def test_hostile_names_are_escaped() -> None:
    outline = check_page(render_fit_page(figures(model=HOSTILE, metric=HOSTILE, notices=[HOSTILE]), HOSTILE))
    assert outline.count("b") == 1  # the name in the masthead


def test_card_shows_costs_and_usage() -> None:
    card = render_fit_card(figures(), "mine")
    assert "**p95 ≤ 8 ms at 128 tokens**" in card
    assert "| latency p95, ms | 7.00 | 20.00 |" in card
    assert len(re.findall(r"^\| \d \| 128 tokens \| 6\.50 \| 7\.00 \| 200 \| 351 \|$", card, re.MULTILINE)) == 5
    assert "95 % interval 86.0 to 90.0" in card
    assert 'Predictor.load("mine")' in card
    assert "A processor, 2 cores" in card
