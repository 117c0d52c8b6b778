"""Scripts of the reports in a real browser."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("playwright.sync_api")

from browser_pages import SCROLLS_SIDEWAYS, WatchedPage, needs_chromium, open_browser
from helpers_pages import HOSTILE, candidate, fit_outcome
from playwright.sync_api import Browser, Page, expect

from bertsmith.report.attention import render_attention_page
from bertsmith.report.finetuning import build_task_report, render_finetuning_page
from bertsmith.report.fit import render_fit_page
from bertsmith.report.study import MapStudy
from bertsmith.report.study_page import render_study_page
from bertsmith.tasks.classification import Classification, LabelledText

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as chromium:
        yield chromium


Open = Callable[[str], Page]


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open a report; after the test it must have logged no warnings and loaded nothing else."""
    context = browser.new_context(viewport={"width": 390, "height": 844})
    watched = WatchedPage(context.new_page())
    watched.page.set_default_timeout(10_000)

    def open_page(text: str) -> Page:
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        watched.page.goto(path.as_uri())
        assert not watched.page.evaluate(SCROLLS_SIDEWAYS)
        return watched.page

    yield open_page
    assert watched.messages == []
    assert len(watched.requests) == 1
    context.close()


def test_cells_of_a_confusion_matrix_show_their_examples(opened: Open) -> None:
    labels = ("bad", "good", HOSTILE)
    wrong = {0: "good", 1: "good", 3: "good", 8: "bad"}
    task, examples = Classification(labels=labels), [LabelledText(f"text {n}", None, n // 6) for n in range(18)]
    answers = [
        {"answer": wrong.get(number, labels[one.label]), "score": number / 20} for number, one in enumerate(examples)
    ]
    evaluation = task.evaluate(examples, answers)
    report = build_task_report(task, examples, answers, evaluation, title="t", kind="Fine-tuning", split="dev")
    page = opened(render_finetuning_page(report))
    rows = page.locator(".cell-rows li span")
    expect(rows).to_have_text(["text 3", "text 1", "text 0"])  # the most frequent error, by confidence
    expect(page.locator(".cell-heading")).to_contain_text("truebadpredictedgood")
    page.locator(".matrix button[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    expect(rows).to_have_text(
        ["text 6", "text 7", "text 9", "text 10", "text 11"]
    )  # correct: the least confident first
    page.locator(".matrix td.correct button").last.click()
    expect(page.locator(".cell-heading .prediction b")).to_have_text(HOSTILE)
    expect(page.locator(".classes tbody td:first-child").first).to_have_text("bad")  # the lowest F1
    page.click(".classes th button:has-text('Label')")
    expect(page.locator(".classes th[aria-sort=ascending]")).to_have_text("Label")
    page.click(".classes th button:has-text('Recall')")
    shares = [float(text) for text in page.locator(".classes tbody td:nth-child(4)").all_text_contents()]
    assert shares == sorted(shares, reverse=True)


def test_limits_and_engines_choose_again(opened: Open) -> None:
    names = {"whole": (90.0, 20.0, "torch"), "quick": (89.0, 8.5, "onnxruntime"), "half": (88.0, 7.0, "torch")}
    names |= {"tiny": (80.0, 3.0, "onnxruntime")}
    measured = {"whole": False, "half": True}  # whether they met the budget
    rows = [
        replace(
            candidate(name, score, latency, is_chosen=name == "half", holds=measured.get(name)),
            engine=engine,
            is_measured=name in measured,
        )
        for name, (score, latency, engine) in names.items()
    ]
    found = replace(fit_outcome(chosen=rows[2]), candidates=tuple(rows), reference=rows[0])
    page = opened(render_fit_page(found, "mine"))
    chosen, command = page.locator(".choice .chosen"), page.locator(".command pre")
    base = "bertsmith fit run/elastic --data task"
    expect(chosen).to_contain_text("half, torch float32measured")
    expect(chosen).to_contain_text("7.00 ms2.9 × faster")
    expect(command).to_have_text(f"{base} --latency-ms 8 --out mine-new")
    latency = page.locator("[data-limit=latency] input")
    latency.press("ArrowRight")  # the estimate of a better candidate is now within the limit
    latency.press("ArrowRight")
    latency.press("ArrowRight")
    expect(chosen).to_contain_text("quick, onnxruntime float32estimated")
    expect(page.locator(".candidates tr.chosen")).to_contain_text("quick")
    expect(page.locator("svg[data-key='1'] .ring")).to_have_count(1)
    page.uncheck("[value=onnxruntime]")
    expect(chosen).to_contain_text("half, torch")
    expect(command).to_have_text(re.compile(rf"{base} --latency-ms \S+ --engine torch --out mine-new"))
    latency.press("End")
    expect(chosen).to_contain_text("whole, torch")
    expect(command).to_be_hidden()
    page.locator("[data-limit=floor] input").press("ArrowRight")
    expect(chosen).to_contain_text("half, torch")  # with a minimum score, the fastest
    expect(command).to_have_text(f"{base} --at-least 80 --engine torch --out mine-new")
    latency.press("Home")
    expect(chosen).to_have_text("No candidate meets these limits.")
    page.click("text=Reset to the budget")
    expect(chosen).to_contain_text("half, torch float32measured")
    page.locator(".candidates").evaluate("e => e.scrollLeft = 400")
    assert page.locator(".candidates").evaluate("e => e.scrollLeft") > 0


def test_explorer_shows_the_maps_of_the_file(opened: Open) -> None:
    weights = np.random.default_rng(1).dirichlet(np.ones(4), size=(2, 4))
    maps = {"attention": [weights, weights], "convolution": [weights, weights]}
    page = opened(render_attention_page(["[CLS]", "a", HOSTILE, "[SEP]"], maps, title="t", facts={}))
    expect(page.locator(".attention-grid canvas")).to_have_count(4)
    words = weights[:, 1:3, 1:3] * (1 - np.eye(2))  # between two words, not special tokens
    head, query, key = np.unravel_index(words.argmax(), words.shape)
    expect(page.locator(".choose-head")).to_have_value(str(head))
    expect(page.locator(".attention-readout")).to_contain_text(f"({query + 2}) → ")
    expect(page.locator(".attention-readout")).to_contain_text(f"({key + 2}): ")
    page.click("tr[data-layer='1'][data-head='1'] button >> visible=true")
    expect(page.locator(".choose-layer")).to_have_value("1")
    assert page.locator("td.share").first.evaluate("e => e.style.getPropertyValue('--share')")


def test_study_draws_short_texts(opened: Open) -> None:
    study = MapStudy(4)
    study.add([{"attention": torch.full((1, 2, 4, 4), 0.25)}], torch.ones(1, 4, dtype=torch.bool))
    page = opened(render_study_page({"model": study}, {}))
    page.focus("canvas")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".study-readout")).to_have_text("query 2 → key 1: 0.25")
