"""Templates and style sheets; `make lint` runs djlint over the HTML and oxlint over the scripts."""

import re
from pathlib import Path

import pytest

import bertsmith
from bertsmith.report.page import _environment, read_asset

SOURCE = Path(bertsmith.__file__).parent
TEMPLATES = SOURCE / "report" / "templates"
STYLES = sorted(path.name for path in TEMPLATES.glob("*.css"))


def without_comments(style: str) -> str:
    return re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.html")), ids=lambda path: path.name)
def test_template_compiles_and_escapes(path: Path) -> None:
    _environment().get_template(path.name)
    assert "{% autoescape" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", STYLES)
def test_style_sheet_is_well_formed(name: str) -> None:
    depth = 0
    for block in re.split(r"(?<=[{}])", without_comments(read_asset(name))):
        depth += block.endswith("{") - block.endswith("}")
        assert 0 <= depth <= 2, block  # rules may be inside @media
        if block.endswith("}") and block.strip() != "}":
            declarations = [one for one in block.rstrip("}").split(";") if one.strip()]
            assert all(re.match(r"\s*[a-z0-9-]+:\s*\S", one) for one in declarations), block
    assert depth == 0
    assert "{{" not in read_asset(name)
    assert not re.search(r"@import|url\(", read_asset(name))


def test_colours_and_lengths_of_style_sheets_are_defined() -> None:
    everything = "".join(path.read_text(encoding="utf-8") for path in TEMPLATES.iterdir())
    everything += (SOURCE / "report" / "charts.py").read_text(encoding="utf-8")
    defined = set(re.findall(r"(--[a-z0-9-]+)\s*:", everything)) | {"--row", "--share"}  # set by explorer.js
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", "".join(map(read_asset, STYLES))))
    assert used <= defined


def test_every_class_of_the_style_sheets_is_used() -> None:
    sources = [path for path in TEMPLATES.iterdir() if path.suffix in (".html", ".js")]
    sources += [SOURCE / "report" / name for name in ("charts.py", "finetuning.py", "fit.py", "elastic.py", "trees.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    words = set(re.findall(r"[a-z][a-z0-9-]*", text))
    selectors = re.sub(r"\{[^{}]*\}", "{}", without_comments("".join(map(read_asset, STYLES))))
    assert set(re.findall(r"\.([a-z][a-z0-9-]*)", selectors)) <= words
