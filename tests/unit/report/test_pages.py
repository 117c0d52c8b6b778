"""The report pages: well-formed, escaped, self-contained, and true to the numbers they were given."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from helpers_pages import HOSTILE, Outline

from bertsmith.report.attention import attention_fragment, attention_page
from bertsmith.report.chart import Series, line_chart, nice_ticks, short_number, thinned
from bertsmith.report.page import facts_table, page, section
from bertsmith.report.pretraining import FilledMask, PretrainingReport, duration, headline, pretraining_page


def random_maps(layers: int, heads: int, length: int) -> dict[str, np.ndarray]:
    scores = np.random.default_rng(7).normal(size=(layers, heads, length, length))
    weights = np.exp(2 * scores)
    return {"attention": weights / weights.sum(-1, keepdims=True)}


def report(**changes: object) -> PretrainingReport:
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
        attention=attention_fragment(["[CLS]", "a", "[SEP]"], random_maps(2, 2, 3))[0],
        settings="seed = 1",
        commands=("bertsmith pretrain",),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def all_pages() -> dict[str, str]:
    tokens = ["[CLS]", HOSTILE, "b", "[SEP]"]
    return {
        "attention": attention_page(tokens, random_maps(2, 3, 4), title=HOSTILE, facts={HOSTILE: HOSTILE}),
        "pretraining": pretraining_page(
            report(
                title=HOSTILE,
                facts={HOSTILE: HOSTILE},
                filled=(FilledMask(f"{HOSTILE} [MASK]", ((HOSTILE, 0.5),)),),
                settings=HOSTILE,
                commands=(HOSTILE,),
                attention=attention_fragment(tokens, random_maps(2, 3, 4))[0],
            )
        ),
        "nothing logged": pretraining_page(
            report(
                facts={},
                steps=[],
                held_out=[],
                unigram_entropy=None,
                filled=(),
                attention=None,
                settings="",
                commands=(),
            )
        ),
    }


@pytest.mark.parametrize("name", ["attention", "pretraining", "nothing logged"])
def test_page_is_balanced_and_loads_nothing(name: str) -> None:
    text = all_pages()[name]
    outline = Outline(text)
    assert outline.count("h1") == 1
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
    addresses = [
        value for _, attributes in outline.elements for key, value in attributes.items() if key in ("src", "href")
    ]
    assert addresses == []


def test_hostile_text_is_shown_and_never_run() -> None:
    pages = all_pages()
    for name, scripts in (("attention", 2), ("pretraining", 2)):
        outline = Outline(pages[name])
        assert outline.count("script") == scripts, name  # the data and the page's own
        assert outline.count("b") == (name == "pretraining"), name  # the run's name is set in bold by the page itself
        assert "alert('x')" in outline.visible, name
    shell = page("<i>", section("<i>", facts_table({"<i>": "<i>"}), note="<i>"))
    assert Outline(shell).count("i") == 0


def test_page_carries_style_and_script_as_given() -> None:
    text = page("title", "<p>body</p>", style="p > b {}", script="1 < 2;")
    assert "p > b {}" in text
    assert "<script>1 < 2;</script>" in text
    assert "<script>" not in page("title", "")


def test_page_of_a_base_model_is_small() -> None:
    text = attention_page(["token"] * 40, random_maps(12, 12, 40), title="base", facts={})
    assert len(text.encode()) < 1_500_000
    assert Outline(text).count("tr") == 1 + 12 * 12


@pytest.mark.parametrize(
    "points",
    [[(5.0, 2.0)], [(0.0, 0.0)], [(1.0, 3.0), (2.0, 3.0)], [(1.0, 1e-7), (2.0, 2e-7)], [(1.0, 2.0), (1.0, 9.0)]],
    ids=["one point", "one point at nought", "equal values", "tiny values", "one step twice"],
)
def test_chart_places_every_point_inside(points: list[tuple[float, float]]) -> None:
    outline = Outline(line_chart([Series("loss", points)], x_label="step", y_label="nats", height=200))
    circles = [attributes for tag, attributes in outline.elements if tag == "circle"]
    assert len(circles) == len(points)
    for circle in circles:
        assert 0 <= float(str(circle["cx"]).rstrip("%")) <= 100
        assert 0 <= float(str(circle["cy"])) <= 200


@pytest.mark.parametrize("series", [[], [Series("a", [])], [Series("a", [(1.0, math.nan)])]])
def test_chart_of_nothing_says_so(series: list[Series]) -> None:
    outline = Outline(line_chart(series, x_label="step", y_label="nats", reference=("level", 1.0)))
    assert outline.count("svg") == 0
    assert "No values of nats yet" in outline.visible


def test_chart_is_higher_for_larger_values_and_breaks_at_gaps() -> None:
    text = line_chart([Series("a", [(0, 1), (1, math.inf), (2, 2), (3, 3)])], x_label="x", y_label="y")
    match = re.search(r' d="([^"]+)"', text)
    assert match is not None
    assert re.sub(r"[^ML]", "", match.group(1)) == "MML"
    heights = [float(place) for place in re.findall(r'cy="([\d.]+)"', text)]
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == 3


def test_chart_shows_reference_legend_and_hover_titles() -> None:
    series = [Series("training", [(0, 9), (10, 4)]), Series("<held-out>", [(10, 4.5)])]
    outline = Outline(line_chart(series, x_label="step", y_label="nats", reference=("unigram level", 12.0)))
    (dashed,) = [attributes for tag, attributes in outline.elements if attributes.get("class") == "reference"]
    assert float(str(dashed["y1"])) >= 0  # above every point, and still inside the chart
    assert "unigram level 12.00" in outline.visible
    assert outline.count("li") == 2
    assert "<held-out>: 4.5 at step 10" in [text for tag, text in outline.texts if tag == "title"]


def test_thinning_keeps_the_spike() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    points[4321] = (4321.0, 50.0)
    kept = thinned(points, 200)
    assert len(kept) <= 200
    assert (4321.0, 50.0) in kept
    assert kept == sorted(kept)


@pytest.mark.parametrize(
    ("low", "high", "wanted", "covers", "ticks"),
    [
        (0, 10, 5, False, [0, 2, 4, 6, 8, 10]),
        (3.98, 9.1, 6, True, [3, 4, 5, 6, 7, 8, 9, 10]),
        (50, 990, 5, False, [200, 400, 600, 800]),
        (-1, 1, 4, True, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, wanted: int, covers: bool, ticks: list[float]) -> None:
    assert nice_ticks(low, high, wanted=wanted, covers=covers) == pytest.approx(ticks)


def test_numbers_are_written_short() -> None:
    numbers = [0, 0.25, 1500, 20_000, 1_500_000, 2e9, 3e-5, -12_000]
    assert [short_number(number) for number in numbers] == ["0", "0.25", "1,500", "20k", "1.5M", "2B", "3e-5", "-12k"]
    assert short_number(5000, largest=20_000) == "5k"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Held-out loss fell 3.00 nats below the unigram level: perplexity 54.6 instead of 1,097."),
        (
            {"unigram_entropy": 3.5},
            "Held-out loss is still 0.50 nats above the unigram level: word frequencies alone do better.",
        ),
        ({"unigram_entropy": None}, "Held-out loss fell from 5 to 4."),
        ({"unigram_entropy": None, "held_out": [{"step": 1, "loss": 4.25}]}, "Held-out loss is 4.25."),
        ({"held_out": [], "steps": [{"step": 1, "loss": 6.0}]}, "Training loss fell 1.00 nats below the unigram level"),
        ({"held_out": [{"step": 1, "loss": math.nan}], "steps": []}, "No step has been logged yet."),
        ({"held_out": [{"step": 1, "loss": 5000.0}]}, "Held-out loss is still 4993.00 nats above"),
    ],
)
def test_headline_follows_the_data(changes: dict[str, object], sentence: str) -> None:
    made = report(**changes)
    assert headline(made).startswith(sentence)
    assert sentence in Outline(pretraining_page(made)).visible


def test_pretraining_page_tells_everything() -> None:
    outline = Outline(pretraining_page(report()))
    text = outline.visible
    for expected in ("1,000 steps over 1 million tokens in 8 min 20 s.", "unigram level 7.00", "30.0 %", "seed = 1"):
        assert expected in text
    for expected in ("bertsmith pretrain", "The sky is blue.", "25.0 %", "Learning rate", "Speed", "Where it looks"):
        assert expected in text
    assert "Where it looks" not in Outline(pretraining_page(report(attention=None))).visible


def test_pretraining_page_tells_what_the_run_said_and_guessed() -> None:
    text = Outline(pretraining_page(report(notices=("step 60: <i>low</i>", "left it"), guessed="next tokens"))).visible
    for expected in ("What the run said", "step 60: <i>low</i>", "left it", "Held-out accuracy, next tokens"):
        assert expected in text
    assert "masked tokens" not in text
    assert "What the run said" not in pretraining_page(report())


def test_two_masks_stay_masks() -> None:
    filled = FilledMask("A [MASK] and a [MASK].", (("cat", 0.9),))
    assert "A [MASK] and a [MASK]." in Outline(pretraining_page(report(filled=(filled,)))).visible


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.2, "0 s"), (42, "42 s"), (185, "3 min 5 s"), (8040, "2 h 14 min"), (7200, "2 h"), (273_600, "3 d 4 h")],
)
def test_duration_in_two_units(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_replaced_token_detection_is_told_first() -> None:
    steps = [{"step": step, "loss": 4.0, "replaced_loss": 0.4, "replaced_share": 0.1} for step in (1, 2)]
    for row in steps:
        row |= {"replaced_recall": 0.25, "replaced_precision": 0.5}
    held_out = [{**row, "replaced_recall": 0.375, "replaced_precision": 0.625} for row in steps]
    told = report(steps=steps, held_out=held_out)
    assert headline(told) == "The encoder finds 38% of the replaced tokens, and 62% of its finds are right."
    outline = Outline(pretraining_page(told))
    shown = outline.visible
    assert "Tokens told apart" in shown
    assert "The generator's loss" in shown
    assert "37.5 %" in shown
    charts = [str(attributes.get("aria-label")) for tag, attributes in outline.elements if tag == "svg"]
    assert any(label.startswith("share by step: recall from 0.375 to 0.375; precision") for label in charts)
    # the loss of knowing that a tenth is replaced: -0.1 · ln 0.1 - 0.9 · ln 0.9
    assert any("share alone from 0.3251 to 0.3251" in label for label in charts)
    assert headline(report(steps=steps, held_out=[])).startswith("The encoder finds 25%")
    assert "Tokens told apart" not in pretraining_page(report())
    blind = [{**row, "replaced_recall": 0.0, "replaced_precision": 0.0} for row in steps]
    assert headline(report(steps=blind, held_out=[])) == "The encoder finds none of the replaced tokens."
