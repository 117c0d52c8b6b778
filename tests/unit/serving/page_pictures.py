"""Screenshots of the page, light and dark, on desktop and phone: `python page_pictures.py OUT [FOLDER …]`.

Without model folders, tiny models with random weights are used. docs/images/serve.png is the serve.png of this script
with the folder `elastic` of `bertsmith demo`.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2] / "contracts"))

from page_models import running, served

from bertsmith.serving.model import ServedModel

CHROMIUM = "/usr/bin/chromium"
CHART_TIME = 12_000  # milliseconds of load before the charts are captured
WINDOWS = {"desktop": (1280, 860), "phone": (390, 844)}


def tiny_models() -> list[ServedModel]:
    """Return one model of each kind."""
    return [
        served("classification", name="classes", is_elastic=True, floor=0.8),
        served("tagging", name="names"),
        served("spans", name="answers"),
        served("choice", name="choices"),
        served("regression", name="scores", is_elastic=True),
        served("multi_label", name="subjects"),
        served("embedding of alike texts", name="alike"),
        served(None, "deberta-base", name="deberta"),
        served("classification of pairs", "convbert-small", name="convbert"),
    ]


def settle(page: Page) -> None:
    page.locator(".answer:not([aria-busy]) > *").first.wait_for()
    page.wait_for_timeout(250)


def choose(page: Page, model: ServedModel) -> None:
    page.wait_for_selector("#model option", state="attached")
    if page.locator("#model").is_enabled():
        page.select_option("#model", model.name)
    if page.locator("#try").is_visible():
        settle(page)


def pictures(page: Page, address: str, name: str, model: ServedModel, out: Path) -> None:
    """Capture the first tab of one model: whole, at a smaller size, with attention maps."""
    page.goto(address)
    choose(page, model)
    page.screenshot(path=out / f"{model.name}-{name}.png", full_page=True)
    if page.locator("#size-width").count():
        page.focus("#size-width")
        page.keyboard.press("ArrowLeft")
        page.focus("#size-depth")
        page.keyboard.press("ArrowLeft")
        settle(page)
        expect(page.locator(".metrics")).not_to_contain_text("measuring", timeout=30_000)
        page.screenshot(path=out / f"{model.name}-{name}-small.png", full_page=True)
    if page.locator(".show-maps").is_visible():
        page.click(".show-maps")
        page.wait_for_selector("#maps canvas, .maps-note:not([hidden])")
        settle(page)
        page.screenshot(path=out / f"{model.name}-{name}-maps.png", full_page=True)
        page.click(".show-maps")


def overview(browser: Browser, address: str, path: Path) -> None:
    """Capture most of the first tab in one picture: a prediction, a smaller size, the attention maps."""
    page = browser.new_page(viewport={"width": 1280, "height": 1120}, color_scheme="light")
    page.goto(address)
    settle(page)
    for name in ("width", "depth"):
        page.focus(f"#size-{name}")
        page.keyboard.press("ArrowLeft")
    settle(page)
    expect(page.locator(".metrics")).not_to_contain_text("measuring", timeout=30_000)
    page.click(".show-maps")
    page.wait_for_selector("#maps canvas")
    page.mouse.move(0, 0)
    page.locator("h1").click()  # removes the focus
    settle(page)
    panes = page.locator("#maps .attention-panes").bounding_box()
    assert panes is not None
    height = panes["y"] + panes["height"] + 16
    page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": 1280, "height": height})
    page.close()


def load(address: str, model: ServedModel, is_over: threading.Event) -> None:
    """Send requests until `is_over` is set, so that the charts show some load."""
    texts = ["my parcel was due on monday and there is still no sign of it " * (1 + number % 4) for number in range(64)]
    path = "/predict" if "task" in model.operations else "/embed"
    with httpx.Client(base_url=address) as client:
        while not is_over.is_set():
            client.post(path, json={"inputs": texts, "model": model.name, "truncate": True})
            is_over.wait(0.35)


def main() -> None:
    out, folders = Path(sys.argv[1]), [Path(one) for one in sys.argv[2:]]
    out.mkdir(parents=True, exist_ok=True)
    models = [ServedModel.open(folder, floor=0.9) for folder in folders] or tiny_models()
    with running(models) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        overview(browser, address, out / "serve.png")
        is_over = threading.Event()
        for scheme in ("light", "dark"):
            for window, (width, height) in WINDOWS.items():
                context = browser.new_context(
                    viewport={"width": width, "height": height},
                    color_scheme=scheme,
                    device_scale_factor=1,  # type: ignore[arg-type]
                )
                page = context.new_page()
                page.on("console", lambda message: print(message.type, message.text))
                page.on("pageerror", lambda error: print("error", error))
                for model in models:
                    pictures(page, address, f"{window}-{scheme}", model, out)
                is_over.clear()
                with ThreadPoolExecutor(3) as workers:
                    clients = [workers.submit(load, address, models[0], is_over) for _ in range(3)]
                    page.goto(f"{address}/#live")
                    page.reload()
                    choose(page, models[0])
                    page.wait_for_timeout(CHART_TIME)
                    page.screenshot(path=out / f"live-{window}-{scheme}.png", full_page=True)
                    is_over.set()
                    for client in clients:
                        client.result()
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
