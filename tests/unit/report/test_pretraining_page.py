"""Report page of a pre-training run."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers_pages import HOSTILE, check_page

from bertsmith.report.attention import Explorer
from bertsmith.report.page import format_duration
from bertsmith.report.pretraining import FilledMask, PretrainingReport, headline, render_pretraining_page


def random_maps(layers: int, heads: int, length: int) -> dict[str, np.ndarray]:
    scores = np.random.default_rng(7).normal(size=(layers, heads, length, length))
    weights = np.exp(2 * scores)
    return {"attention": weights / weights.sum(-1, keepdims=True)}


def report(**changes: Any) -> PretrainingReport:
    base = PretrainingReport(
        title="small run",
        facts={"preset": "bert-small"},
        steps=[
            {
                "step": step,
                "loss": 4 + 5 * math.exp(-step / 300),
                "learning_rate": 1e-4,
                "tokens": step * 1000,
                "tokens_per_second": 2000.0,
                "seconds": step / 2,
            }
            for step in range(10, 1001, 10)
        ],
        held_out=[
            {"step": 500, "loss": 5.0, "masked_accuracy": 0.2},
            {"step": 1000, "loss": 4.0, "masked_accuracy": 0.3},
        ],
        unigram_entropy=7.0,
        filled=(FilledMask("The [MASK] is blue.", (("sky", 0.5), ("sea", 0.25))),),
        attention=Explorer.from_arrays(["[CLS]", "a", "[SEP]"], random_maps(2, 2, 3)),
        settings="seed = 1",
        commands=("bertsmith pretrain",),
    )
    return replace(base, **changes)


def test_page_shows_the_run() -> None:
    text = check_page(render_pretraining_page(report()), scripts=2).visible
    for expected in ("1,000 steps over 1 million tokens in 8 min 20 s.", "unigram level 7.00", "30.0 %", "seed = 1"):
        assert expected in text
    for expected in ("bertsmith pretrain", "The sky is blue.", "25.0 %", "Learning rate", "Speed", "Attention maps"):
        assert expected in text


def test_page_of_an_empty_log() -> None:
    empty = PretrainingReport("x", {}, steps=[], held_out=[], unigram_entropy=None)
    text = check_page(render_pretraining_page(empty), scripts=1).visible
    assert "No step has been logged yet." in text
    assert "Attention maps" not in text


def test_hostile_text_is_escaped() -> None:
    tokens = ["[CLS]", HOSTILE, "b", "[SEP]"]
    hostile = report(
        title=HOSTILE,
        facts={HOSTILE: HOSTILE},
        filled=(FilledMask(f"{HOSTILE} [MASK]", ((HOSTILE, 0.5),)),),
        settings=HOSTILE,
        commands=(HOSTILE,),
        notices=(HOSTILE,),
        attention=Explorer.from_arrays(tokens, random_maps(2, 3, 4)),
    )
    outline = check_page(render_pretraining_page(hostile), scripts=2)  # the data and the script of the page
    assert outline.count("b") == 1  # the title of the run
    assert outline.visible.count("alert('x')") >= 8


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Held-out loss fell 3.00 nats below the unigram level: perplexity 54.6 instead of 1,097."),
        (
            {"unigram_entropy": 3.5},
            "Held-out loss is still 0.50 nats above the unigram level: token frequencies alone do better.",
        ),
        ({"unigram_entropy": None}, "Held-out loss fell from 5 to 4."),
        ({"unigram_entropy": None, "held_out": [{"step": 1, "loss": 4.25}]}, "Held-out loss is 4.25."),
        ({"held_out": [], "steps": [{"step": 1, "loss": 6.0}]}, "Training loss fell 1.00 nats below the unigram level"),
        ({"held_out": [{"step": 1, "loss": math.nan}], "steps": []}, "No step has been logged yet."),
        ({"held_out": [{"step": 1, "loss": 5000.0}]}, "Held-out loss is still 4993.00 nats above"),
    ],
)
def test_headline_follows_the_data(changes: dict[str, Any], sentence: str) -> None:
    assert headline(report(**changes)).startswith(sentence)
    assert sentence in check_page(render_pretraining_page(report(**changes)), scripts=2).visible


def test_notices_and_the_kind_of_prediction_are_shown() -> None:
    changed = report(notices=("step 60: <i>low</i>", "resumed"), predicted="next tokens")
    text = check_page(render_pretraining_page(changed), scripts=2).visible
    for expected in ("Notices", "step 60: <i>low</i>", "resumed", "Held-out accuracy, next tokens"):
        assert expected in text
    assert "masked tokens" not in text
    assert "Notices" not in render_pretraining_page(report())


def test_two_masks_are_not_filled() -> None:
    filled = FilledMask("A [MASK] and a [MASK].", (("cat", 0.9),))
    assert "A [MASK] and a [MASK]." in check_page(render_pretraining_page(report(filled=(filled,))), scripts=2).visible


def test_replaced_token_detection_comes_first() -> None:
    steps: list[dict[str, float]] = [
        {"step": step, "loss": 4.0, "replaced_loss": 0.4, "replaced_share": 0.1} for step in (1, 2)
    ]
    for row in steps:
        row |= {"replaced_recall": 0.25, "replaced_precision": 0.5}
    held_out = [{**row, "replaced_recall": 0.375, "replaced_precision": 0.625} for row in steps]
    detecting = report(steps=steps, held_out=held_out)
    assert headline(detecting) == "The encoder detects replaced tokens with 38% recall and 62% precision."
    outline = check_page(render_pretraining_page(detecting), scripts=2)
    for expected in ("Replaced-token detection", "Generator loss", "37.5 %"):
        assert expected in outline.visible
    charts = [str(attributes.get("aria-label")) for tag, attributes in outline.elements if tag == "svg"]
    assert any(label.startswith("share by step: recall from 0.375 to 0.375; precision") for label in charts)
    # the binary entropy of a share of 0.1: -0.1 · ln 0.1 - 0.9 · ln 0.9
    assert any("constant share from 0.3251 to 0.3251" in label for label in charts)
    assert "25% recall" in headline(report(steps=steps, held_out=[]))
    assert "Replaced-token detection" not in render_pretraining_page(report())
    blind = [{**row, "replaced_recall": 0.0, "replaced_precision": 0.0} for row in steps]
    assert headline(report(steps=blind, held_out=[])) == "The encoder detects none of the replaced tokens."


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (42, "42 s"), (185, "3 min 5 s"), (8040, "2 h 14 min"), (7200, "2 h"), (273_600, "3 d 4 h")],
)
def test_duration_has_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
