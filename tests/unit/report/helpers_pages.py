"""A parser for rendered pages, which gives elements and visible text, and the outcome of a search for a budget."""

import re
from html.parser import HTMLParser
from typing import Any

from bertsmith.shrinking.fit.measure import Conditions, ProcessTiming, Workload
from bertsmith.shrinking.fit.result import CandidateResult, FitOutcome
from bertsmith.shrinking.fit.settings import BudgetConfig

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


def candidate(name: str, score: float, latency: float, **changes: Any) -> CandidateResult:
    fields: dict[str, Any] = {"precision": "float32", "memory_mb": 350.0, "is_measured": True, "holds": None}
    fields |= {"is_chosen": False, "timings": None, **changes}
    return CandidateResult(
        name=name,
        words=f"{name}, torch float32",
        network=name,
        subnet={},
        engine="torch",
        vocabulary="whole",
        score=score,
        float32_score=score,
        latency_ms=latency,
        size_mb=12.34,
        on_front=True,
        metrics=None,
        interval=None,
        parameters=1200,
        **fields,
    )


WHOLE = candidate("whole", 90.0, 20.0, holds=False)


def fit_outcome(**changes: Any) -> FitOutcome:
    latency = {"128": {"p50": 6.5, "p95": 7.0, "runs": 200}}
    chosen = candidate(
        "half", 88.0, 7.0, is_chosen=True, holds=True, timings=(ProcessTiming(latency, 351.0, 10.0),) * 5
    )
    estimated = candidate("quarter", 80.0, 3.0, is_measured=False, memory_mb=None, precision="int8")
    fields: dict[str, Any] = {
        "fits": True,
        "metric": "accuracy",
        "chosen": chosen,
        "nearest": None,
        "misses": (),
        "notices": ("int8 is slower",),
        "limit": BudgetConfig(latency_ms=8.0),
        "model": "run/elastic",
        **changes,
    }
    return FitOutcome(
        budget="p95 ≤ 8 ms at 128 tokens",
        reference=WHOLE,
        front=(),
        machine={"processor": "A processor", "cores": 2, "system": "Linux"},
        threads=2,
        conditions=Conditions(workloads=(Workload(name="128", lengths=(128,)),)),
        versions={"torch": "2"},
        examples=872,
        measurements=9,
        limits={},
        prefer="fast",
        data="task",
        split="dev",
        task="classification",
        candidates=(WHOLE, chosen, estimated),
        score=88.0,
        metrics={},
        interval=(86.0, 90.0),
        **fields,
    )
