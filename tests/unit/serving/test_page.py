"""The page in a real browser: typing, sliders, maps and charts, without requests to other hosts."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Literal

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("playwright.sync_api")

from browser_pages import WatchedPage, needs_chromium, open_browser
from page_models import elastic_record, network, running, served
from playwright.sync_api import Browser, Page, expect
from task_cases import TASK_CASES

import bertsmith
from bertsmith.bundled import model_folder
from bertsmith.engines.artefact import write_artefact
from bertsmith.engines.base import Artefact
from bertsmith.files import write_json
from bertsmith.serving.http.explore import describe_model
from bertsmith.serving.model import ServedModel
from bertsmith.serving.settings import ServeSettings
from bertsmith.shrinking.elastic_metadata import ELASTIC_FILE
from bertsmith.tasks.predictor import TaskRecord, write_task_record

pytestmark = needs_chromium
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A service of models of several kinds."""
    models = [
        served("classification", name="classes", is_elastic=True, floor=0.5),
        served("tagging", name="names"),
        served("embedding of alike texts", name="alike"),
        served(None, "deberta-base", name="deberta"),
    ]
    with running(models) as url:
        yield url


@pytest.fixture
def watched(browser: Browser, address: str) -> Iterator[WatchedPage]:
    """The opened page; after the test it must have logged no warnings and sent no requests to other hosts."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    watched = WatchedPage(context.new_page())
    watched.page.set_default_timeout(10_000)
    watched.page.goto(address)
    yield watched
    context.close()
    assert watched.messages == []
    assert {url for url in watched.requests if not url.startswith(f"{address}/")} == set()


def choose(page: Page, model: str) -> None:
    page.select_option("#model", model)
    expect(page.locator(".answer")).not_to_be_empty()


def test_typing_shows_a_prediction_and_the_last_text_wins(watched: WatchedPage) -> None:
    page = watched.page
    expect(page.locator(".bars li")).to_have_count(2)  # of the initial example
    page.fill("textarea", "")
    expect(page.locator(".answer")).to_contain_text("Type something")
    page.locator("textarea").press_sequentially("no iron gate in the harbour", delay=15)
    expect(page.locator(".token-count")).to_have_text("8 tokens")
    shares = [float(text.removesuffix(" %")) for text in page.locator(".bars .score").all_text_contents()]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert shares == sorted(shares, reverse=True)
    expect(page.locator(".headline strong")).to_have_text(page.locator(".bars .chosen .name").text_content() or "")
    requests = [url for url in watched.requests if url.endswith("/explore")]
    assert len(requests) < 20  # fewer than one per letter, although measurements follow
    page.fill("textarea", HOSTILE)
    expect(page.locator(".token-count")).to_contain_text("tokens")


KINDS = [
    "classification of pairs", "tagging", "parsing", "regression", "multi_label", "choice", "spans",
    "embedding of alike texts",
]  # fmt: skip


@pytest.fixture(scope="module")
def opened_folders(tmp_path_factory: pytest.TempPathFactory) -> list[ServedModel]:
    """Models that `serve` opens from folders: bundled, exported in every format, and an elastic one."""
    root = tmp_path_factory.mktemp("folders")
    plain = served("classification", name="plain")
    assert plain.model is not None
    assert plain.task is not None
    record = TaskRecord(task=plain.task)
    for name in ("classifier", "elastic"):
        bertsmith.save(plain.model, root / name)
        write_task_record(record, root / name)
    write_json(root / "elastic" / ELASTIC_FILE, elastic_record(plain.model).plain())
    for engine in ("torch", "onnxruntime"):  # as `fit` writes them
        folder = root / f"fitted-{engine}"
        folder.mkdir()
        write_artefact(plain.model, folder, Artefact.parse({"engine": engine, "precision": "int8"}))
        write_task_record(record, folder)
    bertsmith.export(root / "classifier", root / "hf", to="hf")
    bertsmith.export(root / "classifier", root / "onnx", to="onnx")
    bertsmith.export(network("bert-tiny"), root / "onnx-encoder", to="onnx")
    folders = [model_folder("small"), *sorted(root.iterdir())]
    return [ServedModel.open(folder, device="cpu") for folder in folders]


def test_every_kind_of_model_answers_on_the_page(browser: Browser, opened_folders: list[ServedModel]) -> None:
    """Every operation of every kind of model, at the whole and at the smallest size of the page."""
    models = [
        *opened_folders,
        *(served(kind, name=kind) for kind in KINDS),
        served(None, "deberta-base", name="pre-trained"),
        served("tagging", name="elastic tagger", is_elastic=True),
    ]
    assert {model.name for model in models} >= {"small", "classifier", "elastic", "hf", "onnx", "fitted-torch"}
    context = browser.new_context()
    with running(models) as url:
        page = context.new_page()
        watched = WatchedPage(page)
        page.goto(url)
        for model in models:
            choose(page, model.name)
            buttons = page.locator(".operations button").all()
            assert len(buttons) == len(describe_model(model).works)
            for button in buttons:
                if button.is_visible():
                    button.click()
                check_answer(page)
                if page.locator("#size-width").count():
                    for name in ("width", "depth"):
                        page.locator(f"#size-{name}").press("Home")
                    check_answer(page)
                    expect(page.locator(".metrics .compared")).to_contain_text(re.compile("the same|differs"))
        assert watched.messages == []
        context.close()


def check_answer(page: Page) -> None:
    expect(page.locator(".answer > *").first).to_be_visible()
    expect(page.locator(".answer[aria-busy]")).to_have_count(0)
    expect(page.locator("#problem")).to_be_hidden()


def test_snippets_repeat_the_request_of_the_page(watched: WatchedPage) -> None:
    page = watched.page
    page.fill("textarea", 'it\'s an "iron" gate')
    page.click(".snippet summary")
    expect(page.locator(".snippet code")).to_contain_text("it'\\''s")
    command = shlex.split(page.locator(".snippet code").inner_text().replace("\\\n", ""))
    assert command[1].endswith("/predict")
    body = json.loads(command[command.index("-d") + 1])
    assert body == {"model": "classes", "inputs": {"text": 'it\'s an "iron" gate'}}
    assert httpx.post(command[1], json=body).status_code == 200
    page.click(".snippet [data-language=python]")
    expect(page.locator(".snippet code")).to_contain_text("requests.post(")
    page.focus("#size-width")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".snippet code")).to_contain_text('"width":0.5')
    expect(page.locator(".metrics")).to_contain_text("× faster")  # as recorded, before it is measured


def test_sliders_snap_to_the_recorded_sizes_and_change_the_answer(watched: WatchedPage) -> None:
    page = watched.page
    expect(page.locator(".metrics")).to_contain_text("63.5 k")
    whole = page.locator(".bars .score").all_text_contents()
    expect(page.locator("#size-width")).to_have_attribute("max", "2")
    page.focus("#size-width")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#size-width")).to_have_attribute("aria-valuetext", "50 % · 2 of 4 heads")
    expect(page.locator(".metrics")).to_contain_text("38.4 k−39 %")
    expect(page.locator(".metrics")).to_contain_text(
        "90.0−6.0"
    )  # the recorded score and its difference to the whole model
    expect(page.locator(".metrics .compared")).to_contain_text("whole model")
    expect(page.locator(".bars b.full")).to_have_count(2)
    assert page.locator(".bars .score").all_text_contents() != whole
    expect(page.locator(".metrics")).to_contain_text(
        re.compile(r"ms([\d.]+ × (faster|slower)|as fast)")
    )  # after enough runs
    page.click(".grid-scores button[aria-label^='Width 25 %, depth 50 %']")
    expect(page.locator("#size-depth")).to_have_attribute("aria-valuetext", "50 % · 2 of 4 layers")
    expect(page.locator(".metrics")).to_contain_text("19.3 k")


def test_maps_follow_the_text_and_keep_the_selected_head(watched: WatchedPage) -> None:
    page = watched.page
    choose(page, "deberta")
    page.click(".show-maps")
    expect(page.locator("#maps .attention-grid canvas")).to_have_count(16)  # 4 layers of 4 heads
    page.click("#maps .attention-maps button:has-text('content to position')")
    page.click("#maps .attention-grid button[aria-label='Layer 3, head 2']")
    page.fill("textarea", "the [MASK] gate")
    expect(page.locator("#maps .attention-readout")).to_have_text(
        re.compile(r"^(the \(2\)|gate \(4\)) → (the \(2\)|gate \(4\)): ")  # the only cells between two words
    )
    expect(page.locator("#maps .choose-layer")).to_have_value("2")
    expect(page.locator("#maps .attention-maps button[aria-pressed=true]")).to_have_text("content to position")
    expect(page.locator(".attention-table:not([hidden])")).to_be_visible()
    page.fill("textarea", "the [MASK] gate " * 30)
    expect(page.locator(".maps-note")).to_contain_text("maps are shown for up to 64")
    expect(page.locator("#maps")).to_be_hidden()


def test_click_on_a_candidate_fills_the_mask(watched: WatchedPage) -> None:
    page = watched.page
    choose(page, "deberta")
    page.fill("textarea", "the smith [MASK] an iron [MASK]")
    expect(page.locator(".mask")).to_have_count(2)
    chip = page.locator(".mask").nth(1).locator("button").first
    word = (chip.get_attribute("aria-label") or "").removeprefix("Fill in ").rpartition(",")[0]
    chip.click()
    expect(page.locator("textarea")).to_have_value(re.compile(rf"the smith \[MASK\] an iron ?{re.escape(word)}"))
    expect(page.locator(".mask")).to_have_count(1)


def test_tags_mark_their_words_in_any_script(watched: WatchedPage) -> None:
    page = watched.page
    choose(page, "names")
    text = f"🔨🔨 Anna {HOSTILE} in 東京."
    page.fill("textarea", text)
    expect(page.locator(".answer .text")).to_contain_text("東京")
    text_without_tags = "e => { e.querySelectorAll('small').forEach(one => one.remove()); return e.textContent; }"
    assert page.locator(".answer .text").evaluate(text_without_tags) == text
    assert page.locator(".answer img").count() == 0


def test_texts_are_compared_by_cosine(watched: WatchedPage) -> None:
    page = watched.page
    choose(page, "alike")
    page.fill("textarea", "the smith\nthe river\n\nthe smith")
    expect(page.locator(".matrix td")).to_have_count(9)
    expect(page.locator(".nearest .name").first).to_have_text("the smith")
    expect(page.locator(".nearest .score").first).to_have_text("1.00")
    page.fill("textarea", "\n".join(["a"] * 25))
    expect(page.locator("#problem")).to_contain_text("inputs has 25 texts; at most 24 are accepted here")
    watched.messages.clear()  # browsers log every error response
    page.fill("textarea", "one\ntwo\nthree")
    expect(page.locator("#problem")).to_be_hidden()
    page.click(".show-maps")
    page.select_option(".which-sequence select", "2")
    expect(page.locator("#maps .attention-map")).to_be_visible()
    page.fill("textarea", "one\ntwo")  # the selected sequence no longer exists
    expect(page.locator(".which-sequence option")).to_have_text(["one", "two"])
    expect(page.locator(".which-sequence select")).to_have_value("1")


@pytest.mark.slow  # waits for animations
def test_live_tab_polls_only_while_it_is_open(watched: WatchedPage) -> None:
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
    polls = sum(url.endswith("/live") for url in watched.requests)
    page.wait_for_timeout(1300)
    assert sum(url.endswith("/live") for url in watched.requests) == polls


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("case", "family"),
    [(case, "bert-tiny") for case in TASK_CASES]
    + [("classification of pairs", "convbert-small"), ("tagging", "deberta-base"), (None, "electra-small")],
)
def test_page_works_for_every_kind_of_model_and_size(
    browser: Browser, case: str | None, family: str, scheme: Literal["light", "dark"]
) -> None:
    with running([served(case, family, name="model", is_elastic=case == "regression")]) as address:
        context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)
        watched = WatchedPage(context.new_page())
        page = watched.page
        page.goto(address)
        expect(page.locator(".answer > *").first).to_be_visible()
        page.click(".show-maps")
        expect(page.locator("#maps canvas").first).to_be_visible()
        for name in ("width", "depth"):
            page.focus(f"#size-{name}")
            page.keyboard.press("Home")  # the smallest
        expect(page.locator(".metrics .compared")).to_contain_text(re.compile("the same|differs"))
        expect(page.locator("#maps .choose-layer option")).to_have_count(2 if case == "regression" else 1)
        for button in page.locator(".operations button").all():
            button.click() if button.is_visible() else None
            expect(page.locator(".answer > *").first).to_be_visible()
        assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert page.locator("#problem").is_hidden()
        context.close()
        assert watched.messages == []


@pytest.mark.parametrize("model", ["classes", "alike"])
def test_page_does_not_scroll_horizontally_on_a_phone(browser: Browser, address: str, model: str) -> None:
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


def test_key_is_requested_and_stored_in_the_tab(browser: Browser) -> None:
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
