"""The documentation: relative links and anchors resolve, and every page is in the navigation of the site."""

import re
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
GENERATED = ("reference/commands.md", "reference/presets.md", "reference/python", "reference/settings/")
"""Pages that docs/hooks writes when the site is built."""
LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^(```+).*?^\1", re.MULTILINE | re.DOTALL)


@cache
def headings(path: Path) -> set[str]:
    """Return the anchors of a page, as both GitHub and MkDocs make them from its headings."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    anchors = set(re.findall(r'<a id="([^"]+)"|\{#([\w.-]+)', text))
    slugs = {slug(line) for line in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}
    return slugs | {anchor for pair in anchors for anchor in pair if anchor}


def slug(heading: str) -> str:
    """Return the anchor that MkDocs gives a heading; GitHub's is the same for ASCII headings."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.relative_to(ROOT)} links to {link}, which does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), f"{page.relative_to(ROOT)} links to {link}, which has no such heading"


def test_python_snippets_use_names_that_they_define() -> None:
    """All blocks of a page are one program, which imports bertsmith."""
    pages = {page: "\n".join(SNIPPET.findall(page.read_text(encoding="utf-8"))) for page in DOCUMENTS}
    for page, program in pages.items():
        if not program:
            continue
        check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise"]
        done = subprocess.run(
            [*check, "-"], input=f"import bertsmith\n{program}", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page.relative_to(ROOT)}: {done.stdout}"


def test_every_page_is_in_the_navigation_once() -> None:
    entries = re.findall(r"^ +- .+: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(entries) == len(set(entries))
    written = [entry for entry in entries if not entry.startswith(GENERATED)]
    assert sorted(written) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_every_page_has_one_title() -> None:
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        assert len(re.findall(r"^# ", text, flags=re.MULTILINE)) == 1, page


def test_every_picture_is_used() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    unused = [path.name for path in (DOCS / "images").iterdir() if f"images/{path.name}" not in text]
    assert not unused
