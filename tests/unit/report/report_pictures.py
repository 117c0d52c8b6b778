"""Pictures of reports for docs/images: `bertsmith demo --out DEMO`, then `python report_pictures.py DEMO OUT`.

Run the demo on a quiet machine, because report.png and fit.png show its latencies.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "contracts"))

from browser_pages import open_browser
from playwright.sync_api import Browser

WIDTH = 1180
PICTURES = {  # report, and the element at whose end the picture stops
    "report": ("report.html", "section:has(.answers)"),
    "finetuning": ("classifier/report.html", "section:has(.confusion)"),
    "fit": ("fitted/report.html", ".fit"),
}


def picture(browser: Browser, report: Path, last: str, out: Path) -> None:
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
    page.goto(report.resolve().as_uri())
    box = page.locator(last).bounding_box()
    assert box is not None
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 36}
    page.screenshot(path=out, full_page=True, clip=clip)  # type: ignore[arg-type]
    page.close()


def main() -> None:
    demo, out = Path(sys.argv[1]), Path(sys.argv[2])
    with open_browser() as browser:
        for name, (report, last) in PICTURES.items():
            picture(browser, demo / report, last, out / f"{name}.png")


if __name__ == "__main__":
    main()
