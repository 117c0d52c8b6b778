"""Pages taken apart: their elements and what a reader sees."""

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = "</script><script>alert('x')</script><b title=\"&\">"


class Outline(HTMLParser):
    """The elements and visible texts of a page; a closing tag that does not fit raises."""

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
        """The elements of a tag, all or those of a class."""
        return sum(
            name == tag and (class_ is None or class_ in (found.get("class") or "").split())
            for name, found in self.elements
        )

    @property
    def visible(self) -> str:
        return "".join(text for tag, text in self.texts if tag not in {"script", "style"})
