"""Report page and model card of `fit`."""

import re
from typing import Any

import pytest
from helpers_pages import HOSTILE, Outline, check_page

from bertsmith.report.fit import render_fit_card, render_fit_page
from bertsmith.shrinking.fit.measure import Conditions, ProcessTiming, Workload
from bertsmith.shrinking.fit.result import CandidateResult, FitOutcome, MissResult
from bertsmith.shrinking.fit.settings import BudgetConfig


def candidate(name: str, score: float, latency: float, **changes: Any) -> CandidateResult:
    fields: dict[str, Any] = {"precision": "float32", "memory_mb": 350.0, "is_measured": True, "holds": None}
    fields |= {"is_chosen": False, "timings": None, **changes}
    return CandidateResult(
        name=name,
        words=f"{name}, torch float32",
        network=name,
        subnet={},
        engine="torch",
        vocabulary="whole",
        score=score,
        float32_score=score,
        latency_ms=latency,
        size_mb=12.34,
        on_front=True,
        metrics=None,
        interval=None,
        parameters=1200,
        **fields,
    )


WHOLE = candidate("whole", 90.0, 20.0, holds=False)


def outcome(**changes: Any) -> FitOutcome:
    latency = {"128": {"p50": 6.5, "p95": 7.0, "runs": 200}}
    chosen = candidate(
        "half", 88.0, 7.0, is_chosen=True, holds=True, timings=(ProcessTiming(latency, 351.0, 10.0),) * 5
    )
    estimated = candidate("quarter", 80.0, 3.0, is_measured=False, memory_mb=None, precision="int8")
    fields: dict[str, Any] = {
        "fits": True,
        "metric": "accuracy",
        "chosen": chosen,
        "nearest": None,
        "misses": (),
        "notices": ("int8 is slower",),
        "limit": BudgetConfig(latency_ms=8.0),
        "model": "run/elastic",
        **changes,
    }
    return FitOutcome(
        budget="p95 ≤ 8 ms at 128 tokens",
        reference=WHOLE,
        front=(),
        machine={"processor": "A processor", "cores": 2, "system": "Linux"},
        threads=2,
        conditions=Conditions(workloads=(Workload(name="128", lengths=(128,)),)),
        versions={"torch": "2"},
        examples=872,
        measurements=9,
        limits={},
        data="task",
        split="dev",
        task="classification",
        candidates=(WHOLE, chosen, estimated),
        score=88.0,
        metrics={},
        interval=(86.0, 90.0),
        **fields,
    )


def test_page_shows_the_front_the_budget_and_every_candidate() -> None:
    outline = check_page(render_fit_page(outcome(), "mine"))
    assert outline.count("path", "marker") == 3
    assert outline.count("path", "hollow") == 1
    assert outline.count("circle", "ring") == 1
    assert outline.count("line", "reference") == 1
    assert outline.count("path", "curve") == 1
    assert outline.count("tr") == 4
    for words in ("Accuracy 88.00 at 7.00\u00a0ms (p95)", "budget 8 ms", "~3.00", "int8 is slower", "A processor"):
        assert words in outline.visible


def test_markers_lie_at_their_latency() -> None:
    outline = Outline(render_fit_page(outcome(), "mine"))
    positions = [
        float(str(attributes["x"]).rstrip("%"))
        for tag, attributes in outline.elements
        if tag == "svg" and "x" in attributes
    ]
    assert sorted(positions) == pytest.approx([15.0, 35.0, 100.0])


def test_floor_and_miss_are_shown() -> None:
    misses = (MissResult("score", 95.0, 90.0, "score 90.00 instead of 95 (5.00 too low)"),)
    limit = BudgetConfig(at_least=95.0)
    nothing = outcome(fits=False, chosen=None, nearest=WHOLE, misses=misses, limit=limit)
    visible = check_page(render_fit_page(nothing, "mine")).visible
    assert "No candidate meets the budget. The closest is whole, torch float32: score 90.00 instead of 95" in visible
    assert "at least 95" in visible


def test_hostile_names_are_escaped() -> None:
    outline = check_page(render_fit_page(outcome(model=HOSTILE, metric=HOSTILE, notices=[HOSTILE]), HOSTILE))
    assert outline.count("b") == 1  # the name in the masthead


def test_card_shows_costs_and_usage() -> None:
    card = render_fit_card(outcome(), "mine")
    assert "**p95 ≤ 8 ms at 128 tokens**" in card
    assert "| latency p95, ms | 7.00 | 20.00 |" in card
    assert len(re.findall(r"^\| \d \| 128 tokens \| 6\.50 \| 7\.00 \| 200 \| 351 \|$", card, re.MULTILINE)) == 5
    assert "95 % interval 86.0 to 90.0" in card
    assert 'Predictor.load("mine")' in card
    assert "A processor, 2 cores" in card
