"""Report page of the demo."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers_pages import HOSTILE, Outline, candidate, fit_outcome
from test_elastic_page import record

from bertsmith.report.demo import (
    DemoReport,
    DemoStep,
    FilledSentence,
    Look,
    NearestMessages,
    Neighbour,
    NetworkFacts,
    Prediction,
    headline,
    render_demo_page,
)
from bertsmith.shrinking.fit.result import MissResult

WHOLE = replace(candidate("whole", 84.7, 5.46), size_mb=51.6)
BEST = replace(candidate("half", 84.5, 2.37, is_chosen=True, holds=True), engine="onnxruntime", size_mb=25.3)


def report(folder: Path, **changes: Any) -> DemoReport:
    near = NearestMessages("where is it", [Neighbour(HOSTILE, "late", 0.91)])
    network = NetworkFacts("small", "deberta", 12, 256, 16000, 12_900_000, 3_000_000)
    found = replace(fit_outcome(chosen=BEST), candidates=(WHOLE, BEST), reference=WHOLE, score=BEST.score)
    values: dict[str, Any] = {
        "folder": folder,
        "title": "From the bundled model to one that fits",
        "steps": [DemoStep("finetune", "accuracy 84.7 on dev", 100.0), DemoStep("fit", "half", 62.0)],
        "look": Look(network, [FilledSentence("a [MASK] gate", [("iron", 0.5)])], [near], 69.1),
        "metric": "accuracy",
        "baseline": 85.6,
        "score": 84.7,
        "train_rows": 2199,
        "dev_rows": 528,
        "subjects": 16,
        "elastic": record(),
        "fitted": found,
        "predictions": [Prediction("my lamp", "damaged", 0.98, "damaged"), Prediction(HOSTILE, "late", 0.5, "bill")],
        "commands": ["bertsmith serve demo/fitted"],
    }
    return DemoReport(**{**values, **changes})


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ({}, "2.3\u00a0× faster at half the size, −0.2 points"),
        ({"size_mb": 17.0, "score": 84.71}, "2.3\u00a0× faster at a third of the size, the same score"),
        ({"size_mb": 51.0, "latency_ms": 1.3}, "4.2\u00a0× faster, −0.2 points"),
    ],
)
def test_headline_is_the_speed_up_with_the_share_of_the_size(
    tmp_path: Path, best: dict[str, float], expected: str
) -> None:
    chosen = replace(BEST, **best)
    found = replace(fit_outcome(chosen=chosen), candidates=(WHOLE, chosen), reference=WHOLE)
    assert headline(report(tmp_path, fitted=found)) == expected


def test_every_network_has_one_latency(tmp_path: Path) -> None:
    (tmp_path / "classifier").mkdir()
    (tmp_path / "classifier" / "report.html").touch()
    text = render_demo_page(report(tmp_path))
    outline = Outline(text)
    visible = re.sub(r"\s+", " ", outline.visible)
    assert set(re.findall(r"[\d.]+ ms\b", visible.replace("\u00a0", " "))) == {
        "5.46 ms",
        "2.37 ms",
        "8 ms",
    }  # and the budget
    assert "2.37 msfrom 5.46 ms" in visible
    assert "25.3 MBfrom 51.6 MB" in visible
    assert [attributes["href"] for _, attributes in outline.elements if "href" in attributes] == [
        "classifier/report.html"
    ]
    headings = [text for tag, text in outline.texts if tag == "h2"]
    assert headings.index("Compared with other models") < headings.index("The model before fine-tuning")
    origin = visible.index("The model before fine-tuning")
    assert "2.37" not in visible[origin:]  # no results of the end beside the start
    assert visible.count(HOSTILE) == 2
    assert "wrong: bill" in visible


def test_unmet_budget_is_the_headline(tmp_path: Path) -> None:
    misses = (MissResult("latency", 1.0, 2.37, "latency 2.37 ms instead of 1 ms (137% over)"),)
    missed = replace(fit_outcome(fits=False, chosen=None, nearest=BEST, misses=misses), reference=WHOLE)
    assert headline(report(tmp_path, fitted=missed)).startswith("No candidate meets the budget. The closest is half")
