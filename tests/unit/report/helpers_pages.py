"""A parser for rendered pages: elements and visible text."""

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = "</script><script>alert('x')</script><b title=\"&\">"


class Outline(HTMLParser):
    """The elements and visible texts of a page; an unmatched closing tag fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def count(self, tag: str, class_: str | None = None) -> int:
        """Return the number of elements with a tag, and with a class if given."""
        return sum(
            name == tag and (class_ is None or class_ in (attributes.get("class") or "").split())
            for name, attributes in self.elements
        )

    @property
    def titles(self) -> list[str]:
        """Hover titles inside charts."""
        return [text for tag, text in self.texts if tag == "title"]

    @property
    def visible(self) -> str:
        """The visible text; line breaks of the source are spaces."""
        return " ".join("".join(text for tag, text in self.texts if tag not in {"script", "style"}).split("\n"))


def check_page(text: str, *, scripts: int = 0) -> Outline:
    """Parse a page and check that it is balanced, self-contained and has as many scripts as expected."""
    outline = Outline(text)
    assert outline.count("h1") == 1
    assert outline.count("script") == scripts
    assert outline.count("link") == outline.count("img") == 0
    assert not any(key in ("src", "href") for _, attributes in outline.elements for key in attributes)
    assert not any(key.startswith("on") for _, attributes in outline.elements for key in attributes)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|nan%|:nan", text)
    assert "prefers-color-scheme: dark" in text
    return outline
