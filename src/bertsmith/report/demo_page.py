"""report.html of the demo: the way from raw text to a model that fits, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bertsmith.report import chart, fit_page, pretraining
from bertsmith.report.page import masthead, page, section

STYLE = """
.way { list-style: none; display: grid; gap: 10px; }
.way li { display: grid; grid-template-columns: 7em 1fr auto; gap: 4px 18px; align-items: baseline;
  padding: 10px 0; border-bottom: 1px solid var(--line); }
.way b { font-weight: 640; }
.way .seconds { color: var(--muted); font-variant-numeric: tabular-nums; white-space: nowrap; }
.way a { color: var(--accent); }
.said div { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 24px; padding: 9px 0;
  border-bottom: 1px solid var(--line); }
.said dt { color: var(--muted); }
.said dd { font-weight: 600; }
@media (max-width: 560px) { .way li { grid-template-columns: 1fr auto; } .way .gained { grid-column: 1 / -1; } }
"""
PARTS = {  # of the way: what is done, and the folder it leaves
    "pretrain": ("A vocabulary is learned and a small BERT reads the messages of a support desk", "encoder"),
    "finetune": ("It learns from labelled messages what they are about", "classifier"),
    "shrink": ("Its heads and neurons are sorted, and every size of it learns from the whole", "elastic"),
    "fit": ("Sizes, engines and precisions are measured here; the best within the budget is taken", "fitted"),
    "export": ("The chosen size as a graph for ONNX Runtime, compared with the model", "onnx"),
}


@dataclass(frozen=True)
class Step:
    """A part of the way."""

    name: str
    gained: str
    """What it gave, with a figure."""
    seconds: float


def demo_page(
    folder: Path,
    steps: Sequence[Step],
    fitted: Mapping[str, Any],
    *,
    filled: Sequence[tuple[str, Sequence[str]]],
    answers: Sequence[tuple[str, str]],
    commands: Sequence[str],
) -> str:
    """The demo as one self-contained HTML document; it links to the reports of its parts."""
    percentile = fitted["limits"].get("percentile", 95)
    total = sum(step.seconds for step in steps)
    body = masthead(
        "From raw text to a model that fits",
        folder.name,
        fit_page.headline(fitted),
        lead=f"Budget: {fitted['budget']}. All of it made on this machine in {total:.0f} seconds.",
    )
    note = (
        "Filled marks were measured in fresh processes, hollow ones are estimated; the line joins what nothing beats."
    )
    body += section("Score and latency", fit_page.front_picture(fitted, percentile), note=note)
    body += section("The way", f'<ol class="way">{"".join(_row(folder, step) for step in steps)}</ol>')
    body += section("What the fitted model answers", _said(answers))
    body += section("What the encoder puts in place of a mask", _said([(text, ", ".join(own)) for text, own in filled]))
    body += section("What to try next", pretraining.command_list(commands))
    style = chart.STYLE + fit_page.STYLE + pretraining.STYLE + STYLE
    return page(f"{folder.name}: from raw text to a model that fits", body, style=style, script=pretraining.SCRIPT)


def _said(pairs: Sequence[tuple[str, str]]) -> str:
    """Texts, each with what was said of it."""
    rows = "".join(f"<div><dt>{escape(text)}</dt><dd>{escape(said)}</dd></div>" for text, said in pairs)
    return f'<dl class="said">{rows}</dl>'


def _row(folder: Path, step: Step) -> str:
    done, home = PARTS[step.name]
    report = folder / home / "report.html"
    link = f' · <a href="{home}/report.html">report</a>' if report.is_file() else ""
    return (
        f"<li><b>{escape(step.name)}</b><span>{escape(done)}{link}</span>"
        f'<span class="seconds">{step.seconds:.0f} s</span>'
        f'<span class="gained" style="grid-column: 2 / -1">{escape(step.gained)}</span></li>'
    )
