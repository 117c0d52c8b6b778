"""report.html of the demo: what it started from, what came of it step by step, and how to go on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bertsmith.report import chart, elastic_page, fit_page, pretraining
from bertsmith.report.elastic import largest, member_at
from bertsmith.report.page import facts_table, masthead, page, section
from bertsmith.shrinking.elastic_metadata import ElasticRecord

STYLE = """
.way { list-style: none; display: grid; }
.way li { display: grid; grid-template-columns: 7em 1fr auto; gap: 2px 18px; align-items: baseline; padding: 12px 0; }
.way li + li { border-top: 1px solid var(--line); }
.way b { font-weight: 640; }
.way .seconds { color: var(--muted); font-variant-numeric: tabular-nums; white-space: nowrap; }
.way .gained { color: var(--muted); grid-column: 2 / -1; }
.way a { color: var(--accent); }
.start .figures { margin-top: 0; padding-top: 0; border-top: 0; }
.start .facts { margin-top: 20px; }
.said div { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 24px; padding: 9px 0; }
.said div + div { border-top: 1px solid var(--line); }
.said dt { color: var(--muted); }
.said dd { font-weight: 600; }
.near { display: grid; gap: 20px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.near h3 { font-size: 16px; font-weight: 600; line-height: 1.4; margin-bottom: 10px; }
.near ol { list-style: none; display: grid; gap: 8px; font-size: 14.5px; }
.near li { display: grid; grid-template-columns: 2.6em 1fr; gap: 0 10px; }
.near .similarity { color: var(--muted); font-variant-numeric: tabular-nums; }
.near small { grid-column: 2; color: var(--muted); font-size: 13px; }
.before > * + * { margin-top: 20px; }
@media (max-width: 560px) { .way li { grid-template-columns: 1fr auto; } .way li > span:nth-child(2),
  .way .gained { grid-column: 1 / -1; grid-row: auto; } .way .seconds { grid-row: 1; grid-column: 2; } }
"""
PARTS = {  # of the way: what is done, and the folder it leaves
    "pretrain": ("A vocabulary is learned and a small BERT reads the messages of a support desk", "encoder"),
    "look": ("Untrained, it fills masks and finds messages that mean the same", None),
    "finetune": ("It learns from labelled messages what they are about", "classifier"),
    "shrink": ("Its heads and neurons are sorted, and every size of it learns from the whole", "elastic"),
    "fit": ("Sizes, engines and precisions are measured here; the best within the budget is taken", "fitted"),
    "export": ("The chosen size as a graph for ONNX Runtime, compared with the model and timed", "onnx"),
}
HALF = 0.5


@dataclass(frozen=True)
class Step:
    """A part of the way."""

    name: str
    gained: str
    """What it gave, with a figure."""
    seconds: float


@dataclass(frozen=True)
class DemoReport:
    """Everything the page tells; figures are those of the steps, as result.json has them."""

    folder: Path
    title: str
    steps: Sequence[Step]
    look: Mapping[str, Any]
    finetuned: Mapping[str, Any]
    elastic: ElasticRecord
    fitted: Mapping[str, Any]
    exported: Mapping[str, Any]
    answers: Sequence[tuple[str, str]]
    """Messages, and what the fitted model says of them."""
    commands: Sequence[str]


def demo_page(report: DemoReport) -> str:
    """The demo as one self-contained HTML document; it links to the reports of its parts."""
    fitted, name = report.fitted, report.folder.resolve().name
    total = sum(step.seconds for step in report.steps)
    body = masthead(
        report.title,
        name,
        fit_page.headline(fitted),
        lead=f"Budget: {fitted['budget']}. All of it made on this machine in {pretraining.duration(total)}.",
    )
    body += section("Where it started", _start(report), note=_start_note(report))
    pareto = (
        "Filled marks were measured in fresh processes, hollow ones are estimated; the line joins what nothing beats."
    )
    front = fit_page.front_picture(fitted, fitted["limits"].get("percentile", 95))
    body += section("Score and latency", front, note=pareto)
    grid, note = elastic_page.size_grid(report.elastic), elastic_page.grid_note(report.elastic)
    body += section("Every size in one set of weights", grid, note=note)
    rows = "".join(_row(report.folder, step) for step in report.steps)
    body += section("The way", f'<div class="panel"><ol class="way">{rows}</ol></div>')
    body += section("What the fitted model answers", f'<div class="panel">{_said(report.answers)}</div>')
    body += section("What was exported", facts_table(_artefact(report)))
    body += section("What it could do before any training here", _before(report), note=_before_note(report))
    body += section("What to try next", pretraining.command_list(report.commands))
    style = chart.STYLE + fit_page.STYLE + pretraining.STYLE + elastic_page.STYLE + STYLE
    return page(f"{name}: {report.title.lower()}", body, style=style, script=pretraining.SCRIPT)


def _start(report: DemoReport) -> str:
    """The scores on the way as large figures, and the network in facts."""
    model, record = report.look["model"], report.elastic
    shown = {"Nearest message, untrained": report.look["alike"], "Fine-tuned": report.finetuned["score"]}
    whole, half = largest(record), member_at(record, HALF, HALF)
    shown["Elastic, whole"] = whole.score
    if half is not None:
        shown["Elastic, half the width and depth"] = half.score
    if report.fitted["fits"]:
        shown["Fitted to the budget"] = report.fitted["score"]
    cells = "".join(f"<div><dt>{escape(what)}</dt><dd>{score:.1f}</dd></div>" for what, score in shown.items())
    facts = {
        "Model": model["name"],
        "Network": f"{model['family']}, {model['layers']} × {model['width']}",
        "Parameters": f"{model['parameters'] / 1e6:.1f} M",
        "Vocabulary": f"{model['vocabulary']:,} pieces",
    }
    if "generator_parameters" in model:
        facts["Generator, fills masks"] = f"{model['generator_parameters'] / 1e6:.1f} M more"
    return f'<div class="panel start"><dl class="figures">{cells}</dl>{facts_table(facts)}</div>'


def _start_note(report: DemoReport) -> str:
    train, dev = (report.finetuned["data"][part]["rows"] for part in ("train", "dev"))
    return (
        f"{report.finetuned['metric'].capitalize()} in per cent on {dev:,} messages of a support desk, "
        f"{len(report.finetuned['data']['dev']['labels'])} subjects; {train:,} others were trained on."
    )


def _artefact(report: DemoReport) -> dict[str, str]:
    exported = report.exported
    cut = exported["subnet"]
    return {
        "Folder": f"{report.folder.name}/onnx",
        "Size": f"width {cut['width']:g}, depth {cut['depth']:g}",
        "model.onnx": f"{exported['bytes'] / 1e6:.1f} MB, {exported['precision']}",
        "Latency p50": f"{exported['latency_ms']:.2f} ms in ONNX Runtime",
        "Farthest from the model": f"{exported['largest_difference']:.0e} of its largest output",
        "Needs": "onnxruntime and tokenizers, no PyTorch",
    }


def _before(report: DemoReport) -> str:
    cards = [pretraining.FilledMask(one["text"], tuple(map(tuple, one["pieces"]))) for one in report.look["filled"]]
    drawn = f'<div class="filled">{"".join(map(pretraining.filled_card, cards))}</div>' if cards else ""
    return f'<div class="before">{drawn}<div class="near">{"".join(map(_near, report.look["near"]))}</div></div>'


def _before_note(report: DemoReport) -> str:
    fills = "Its likeliest words for a mask, and the" if report.look["filled"] else "This model fills no masks. The"
    return f"{fills} messages of the support desk that are nearest by encode, with the cosine and their label."


def _near(one: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<li><span class="similarity">{near["similarity"]:.2f}</span><span>{escape(near["text"])}</span>'
        f"<small>{escape(near['label'])}</small></li>"
        for near in one["near"]
    )
    return f'<div class="panel"><h3>{escape(one["text"])}</h3><ol>{rows}</ol></div>'


def _said(pairs: Sequence[tuple[str, str]]) -> str:
    """Texts, each with what was said of it."""
    rows = "".join(f"<div><dt>{escape(text)}</dt><dd>{escape(said)}</dd></div>" for text, said in pairs)
    return f'<dl class="said">{rows}</dl>'


def _row(folder: Path, step: Step) -> str:
    done, home = PARTS[step.name]
    has_report = home is not None and (folder / home / "report.html").is_file()
    link = f' · <a href="{home}/report.html">report</a>' if has_report else ""
    return (
        f"<li><b>{escape(step.name)}</b><span>{escape(done)}{link}</span>"
        f'<span class="seconds">{step.seconds:.0f} s</span><span class="gained">{escape(step.gained)}</span></li>'
    )
