"""The page in a real browser: typing, sliders, maps and charts, nothing from elsewhere, nothing inline."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("playwright.sync_api")

from page_models import running, served
from playwright.sync_api import Browser, Page, expect, sync_playwright
from task_cases import TASK_CASES

from bertsmith.report.attention import render_attention_page
from bertsmith.serving.settings import ServeSettings

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.is_file(), reason=f"needs a Chromium at {CHROMIUM}")
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A service of models of several kinds."""
    models = [
        served("classification", name="classes", is_elastic=True, floor=0.5),
        served("tagging", name="names"),
        served("embedding of alike texts", name="alike"),
        served(None, "deberta-base", name="deberta"),
    ]
    with running(models) as found:
        yield found


class Watched:
    """A page whose complaints and requests are kept."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self._said(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)


@pytest.fixture
def watched(browser: Browser, address: str) -> Iterator[Watched]:
    """The page, opened; at the end it must have complained of nothing and asked no one else for anything."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = Watched(context.new_page())
    found.page.set_default_timeout(10_000)
    found.page.goto(address)
    yield found
    context.close()
    assert found.complaints == []
    assert {url for url in found.requests if not url.startswith(f"{address}/")} == set()


def choose(page: Page, model: str) -> None:
    page.select_option("#model", model)
    expect(page.locator(".answer")).not_to_be_empty()


def test_typing_shows_a_prediction_and_the_last_text_wins(watched: Watched) -> None:
    page = watched.page
    expect(page.locator(".bars li")).to_have_count(2)  # of the example that is there at first
    page.fill("textarea", "")
    expect(page.locator(".answer")).to_contain_text("Type something")
    page.locator("textarea").press_sequentially("no iron gate in the harbour", delay=15)
    expect(page.locator(".counted")).to_have_text("8 tokens")
    shares = [float(text.removesuffix(" %")) for text in page.locator(".bars .score").all_text_contents()]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert shares == sorted(shares, reverse=True)
    expect(page.locator(".headline strong")).to_have_text(page.locator(".bars .chosen .name").text_content() or "")
    posted = [url for url in watched.requests if url.endswith("/explore")]
    assert len(posted) < 20  # not one for every letter, though each may be followed by measurements
    page.fill("textarea", HOSTILE)
    expect(page.locator(".counted")).to_contain_text("tokens")


def test_sliders_snap_to_the_recorded_sizes_and_change_the_answer(watched: Watched) -> None:
    page = watched.page
    expect(page.locator(".figures")).to_contain_text("63.5 k")
    whole = page.locator(".bars .score").all_text_contents()
    expect(page.locator("#size-width")).to_have_attribute("max", "2")
    page.focus("#size-width")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#size-width")).to_have_attribute("aria-valuetext", "50 % · 2 of 4 heads")
    expect(page.locator(".figures")).to_contain_text("38.4 k−39 %")
    expect(page.locator(".figures")).to_contain_text("90.0−6.0")  # the recorded score and how far it is from the whole
    expect(page.locator(".figures .compared")).to_contain_text("whole model")
    expect(page.locator(".bars b.full")).to_have_count(2)
    assert page.locator(".bars .score").all_text_contents() != whole
    expect(page.locator(".figures")).to_contain_text(re.compile(r"ms[−+]\d+ %"))  # after enough runs of both
    page.click(".grid-scores button[aria-label^='Width 25 %, depth 50 %']")
    expect(page.locator("#size-depth")).to_have_attribute("aria-valuetext", "50 % · 2 of 4 layers")
    expect(page.locator(".figures")).to_contain_text("19.3 k")


def test_maps_appear_follow_the_text_and_keep_the_head_that_was_looked_at(watched: Watched) -> None:
    page = watched.page
    choose(page, "deberta")
    page.click(".show-maps")
    expect(page.locator("#maps .attention-grid canvas")).to_have_count(16)  # 4 layers of 4 heads
    page.click("#maps .attention-maps button:has-text('content to position')")
    page.click("#maps .attention-grid button[aria-label='Layer 3, head 2']")
    page.fill("textarea", "the [MASK] gate")
    expect(page.locator("#maps .attention-readout")).to_contain_text("the (2)")
    expect(page.locator("#maps .choose-layer")).to_have_value("2")
    expect(page.locator("#maps .attention-maps button[aria-pressed=true]")).to_have_text("content to position")
    expect(page.locator(".attention-table:not([hidden])")).to_be_visible()
    page.fill("textarea", "the [MASK] gate " * 30)
    expect(page.locator(".maps-note")).to_contain_text("maps are shown for up to 64")
    expect(page.locator("#maps")).to_be_hidden()


def test_masks_are_filled_by_a_click(watched: Watched) -> None:
    page = watched.page
    choose(page, "deberta")
    page.fill("textarea", "the smith [MASK] an iron [MASK]")
    expect(page.locator(".mask")).to_have_count(2)
    chip = page.locator(".mask").nth(1).locator("button").first
    word = (chip.get_attribute("aria-label") or "").removeprefix("Fill in ").rpartition(",")[0]
    chip.click()
    expect(page.locator("textarea")).to_have_value(re.compile(rf"the smith \[MASK\] an iron ?{re.escape(word)}"))
    expect(page.locator(".mask")).to_have_count(1)


def test_tags_stand_where_the_words_are_whatever_the_script(watched: Watched) -> None:
    page = watched.page
    choose(page, "names")
    text = f"🔨🔨 Anna {HOSTILE} in 東京."
    page.fill("textarea", text)
    expect(page.locator(".answer .text")).to_contain_text("東京")
    without_tags = "e => { e.querySelectorAll('small').forEach(one => one.remove()); return e.textContent; }"
    assert page.locator(".answer .text").evaluate(without_tags) == text
    assert page.locator(".answer img").count() == 0


def test_texts_are_compared(watched: Watched) -> None:
    page = watched.page
    choose(page, "alike")
    page.fill("textarea", "the smith\nthe river\n\nthe smith")
    expect(page.locator(".matrix td")).to_have_count(9)
    expect(page.locator(".nearest .name").first).to_have_text("the smith")
    expect(page.locator(".nearest .score").first).to_have_text("1.00")
    page.fill("textarea", "\n".join(["a"] * 25))
    expect(page.locator("#problem")).to_contain_text("inputs has 25 texts; at most 24 are accepted here")
    watched.complaints.clear()  # a browser tells of every answer that is an error
    page.fill("textarea", "one\ntwo\nthree")
    expect(page.locator("#problem")).to_be_hidden()
    page.click(".show-maps")
    page.select_option(".which-sequence select", "2")
    expect(page.locator("#maps .attention-map")).to_be_visible()
    page.fill("textarea", "one\ntwo")  # the sequence that was looked at is gone
    expect(page.locator(".which-sequence option")).to_have_text(["one", "two"])
    expect(page.locator(".which-sequence select")).to_have_value("1")


@pytest.mark.slow  # waits for animations
def test_the_second_tab_moves_and_rests_when_it_is_left(watched: Watched) -> None:
    page = watched.page
    expect(page.locator(".answer")).not_to_be_empty()
    page.click("#tab-live")
    expect(page.locator(".chart")).to_have_count(6)
    line = page.locator(".chart .line-1").first
    expect(line).to_have_attribute("d", re.compile("L"))
    before = line.get_attribute("d")
    expect(line).not_to_have_attribute("d", before or "")
    expect(page.locator(".all tbody tr")).to_have_count(4)
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tab-try")).to_be_focused()
    page.wait_for_timeout(200)
    asked = sum(url.endswith("/live") for url in watched.requests)
    page.wait_for_timeout(1300)
    assert sum(url.endswith("/live") for url in watched.requests) == asked


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("case", "family"),
    [(case, "bert-tiny") for case in TASK_CASES]
    + [("classification of pairs", "convbert-small"), ("tagging", "deberta-base"), (None, "electra-small")],
)
def test_every_kind_of_model_is_shown_at_every_size(
    browser: Browser, case: str | None, family: str, scheme: Literal["light", "dark"]
) -> None:
    with running([served(case, family, name="own", is_elastic=case == "regression")]) as address:
        context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)
        found = Watched(context.new_page())
        page = found.page
        page.goto(address)
        expect(page.locator(".answer > *").first).to_be_visible()
        page.click(".show-maps")
        expect(page.locator("#maps canvas").first).to_be_visible()
        for name in ("width", "depth"):
            page.focus(f"#size-{name}")
            page.keyboard.press("Home")  # the smallest
        expect(page.locator(".figures .compared")).to_contain_text(re.compile("the same|differs"))
        expect(page.locator("#maps .choose-layer option")).to_have_count(2 if case == "regression" else 1)
        for work in page.locator(".works button").all():
            work.click() if work.is_visible() else None
            expect(page.locator(".answer > *").first).to_be_visible()
        assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert page.locator("#problem").is_hidden()
        context.close()
        assert found.complaints == []


@pytest.mark.parametrize("model", ["classes", "alike"])
def test_a_phone_scrolls_downwards_only(browser: Browser, address: str, model: str) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme="dark", has_touch=True)
    page = context.new_page()
    page.goto(address)
    choose(page, model)
    page.click(".show-maps")
    expect(page.locator("#maps canvas").first).to_be_visible()
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not page.evaluate(wide)
    page.click("#tab-live")
    expect(page.locator(".chart .value b").first).to_have_text(re.compile(r"\d"))
    assert not page.evaluate(wide)
    context.close()


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser) -> None:
    with running([served("regression", name="scores")], ServeSettings(key="secret")) as address:
        page = browser.new_page()
        page.goto(address)
        expect(page.locator("#key-value")).to_be_focused()
        expect(page.locator("#try")).to_be_hidden()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#problem")).to_contain_text("requires its key")
        page.fill("#key-value", "secret")
        page.keyboard.press("Enter")
        expect(page.locator(".scale")).to_be_visible()
        page.reload()
        expect(page.locator(".scale")).to_be_visible()
        page.click("#forget")
        expect(page.locator("#key-value")).to_be_visible()
        page.close()


def test_the_explorer_of_a_report_draws_as_before(browser: Browser, tmp_path: Path) -> None:
    """The script is shared: maps that stand in the file from the start, kernels among them."""
    weights = np.random.default_rng(1).dirichlet(np.ones(4), size=(2, 4))
    path = tmp_path / "attention.html"
    maps = {"attention": [weights, weights], "convolution": [weights, weights]}
    text = render_attention_page(["[CLS]", "a", HOSTILE, "[SEP]"], maps, title="t", facts={})
    path.write_text(text, encoding="utf-8")
    found = Watched(browser.new_page())
    found.page.goto(path.as_uri())
    expect(found.page.locator(".attention-grid canvas")).to_have_count(4)
    found.page.click("tr[data-layer='1'][data-head='1'] button >> visible=true")
    expect(found.page.locator(".choose-layer")).to_have_value("1")
    assert found.page.locator("td.share").first.evaluate("e => e.style.getPropertyValue('--share')")
    found.page.close()
    assert found.complaints == []
