"""The page that tells how a pre-training run went: what it reached, its curves, the masks it fills, how to go on."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import median
from typing import Any

from bertsmith.report import attention, chart, detection
from bertsmith.report.chart import Series, column, line_chart, short_number
from bertsmith.report.page import facts_table, masthead, page, section

STYLE = """
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); gap: 22px 28px;
  margin-top: clamp(28px, 4vw, 40px);
  padding-top: 22px; border-top: 1px solid var(--line); }
.figures div { display: flex; flex-direction: column-reverse; justify-content: flex-end; }
.figures dt { color: var(--muted); font-size: 14px; }
.figures dd { font-size: 25px; line-height: 1.25; letter-spacing: -.015em; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.pair { display: grid; gap: 20px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr));
  margin-top: 20px; }
.pair h3 { font-size: 15px; font-weight: 600; margin-bottom: 2px; }
.notices { padding-left: 20px; display: grid; gap: 8px; }
.filled { display: grid; gap: 20px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.filled blockquote { margin: 0 0 16px; font-size: 17.5px; line-height: 1.5; }
.filled mark { background: var(--wash); color: var(--accent); border-radius: 5px; padding: 1px 6px;
  font-weight: 600; }
.filled ol { list-style: none; display: grid; gap: 7px; font-size: 14px; }
.filled li { display: grid; grid-template-columns: minmax(0, 8.5em) 1fr 4em; gap: 10px; align-items: center; }
.filled .word { font: 13.5px var(--mono); white-space: pre; overflow: hidden; text-overflow: ellipsis; }
.filled .bar { height: 8px; border-radius: 4px; background: linear-gradient(to right,
  var(--series-1) calc(var(--share) * 1%), var(--line) 0); }
.filled li:not(:first-child) .bar { opacity: .62; }
.filled .percent { text-align: right; white-space: nowrap; color: var(--muted); font-variant-numeric: tabular-nums; }
.command { display: flex; gap: 12px; align-items: start; padding: 10px 0; }
.command + .command { border-top: 1px solid var(--line); }
.command pre { flex: 1; min-width: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.command button { flex: none; font-size: 13px; border: 1px solid var(--line); background: none;
  color: var(--muted); border-radius: 6px;
  padding: 1px 10px; cursor: pointer; }
.command button:hover { color: var(--accent); border-color: var(--accent); }
.commands { padding-top: 8px; padding-bottom: 8px; }
details summary { cursor: pointer; color: var(--accent); width: fit-content; }
details pre { margin-top: 16px; max-height: 520px; overflow: auto; }
"""

SCRIPT = """
for (const button of document.querySelectorAll(".command button")) {
  if (!navigator.clipboard) { button.hidden = true; continue; }
  button.onclick = async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
}
"""

MASK = re.compile(r"\[MASK\]|<mask>")


@dataclass(frozen=True)
class FilledMask:
    """A sentence with a mask in it, and what the model would write there, likeliest first, with its probability."""

    text: str
    candidates: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class PretrainingReport:
    """Everything the page tells.

    `steps` are the rows of the log (step, loss, learning_rate, tokens_per_second, and `tokens` and `seconds` counted
    from the start of the run); `held_out` are rows of step, loss and maybe masked_accuracy; where both have the figures
    of replaced-token detection, their loss is the generator's. `unigram_entropy` is given for a masked-language-model
    loss only: it is what makes the loss a perplexity. `attention` is the body that
    `attention_fragment` gives; `settings` the resolved settings as text. `notices` are what the run said of its health,
    `guessed` are the tokens whose loss is drawn: "masked tokens" or "next tokens".
    """

    title: str
    facts: dict[str, str]
    steps: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    unigram_entropy: float | None
    filled: tuple[FilledMask, ...]
    attention: str | None
    settings: str
    commands: tuple[str, ...]
    notices: tuple[str, ...] = ()
    guessed: str = "masked tokens"

    @property
    def is_detecting(self) -> bool:
        return detection.is_detecting(self.steps, self.held_out)


def pretraining_page(report: PretrainingReport) -> str:
    """The whole report as one self-contained HTML document."""
    body = masthead("Pre-training", report.title, headline(report), lead=_lead(report)) + _figures(report)
    if report.notices:
        told = "".join(f"<li>{escape(notice)}</li>" for notice in report.notices)
        body += section("What the run said", f'<div class="panel"><ul class="notices">{told}</ul></div>')
    if report.is_detecting:
        curves = detection.detection_curves(report.steps, report.held_out)
        body += section(detection.TITLE, curves, note=detection.NOTE)
    loss = "The generator's loss" if report.is_detecting else "Loss"
    body += section(loss, _curves(report), note=_loss_note(report))
    if report.filled:
        body += section(
            "What it fills in",
            f'<div class="filled">{"".join(map(filled_card, report.filled))}</div>',
            note="Sentences with one token hidden, and the model's likeliest tokens for it.",
        )
    style, script = chart.STYLE + STYLE, SCRIPT
    if report.attention is not None:
        body += section("Where it looks", report.attention, note=attention.NOTE)
        style, script = style + attention.STYLE, script + attention.SCRIPT
    if report.facts:
        body += section("Facts", facts_table(report.facts))
    if report.commands:
        body += section("Go on", command_list(report.commands))
    if report.settings:
        settings = f'<pre tabindex="0">{escape(report.settings)}</pre>'
        settings = f"<details><summary>Show all settings</summary>{settings}</details>"
        body += section("Resolved settings", settings, note="These settings, saved as a file, run the same run again.")
    return page(f"{report.title}: pre-training", body, style=style, script=script)


def headline(report: PretrainingReport) -> str:
    """The run in one sentence: how far below the unigram level the loss fell, or as much of that as the data tell."""
    if report.is_detecting:
        return detection.detection_headline(report.steps, report.held_out)
    name, losses = "Held-out loss", column(report.held_out, "loss")
    if not losses:
        name, losses = "Training loss", column(report.steps, "loss")
    if not losses:
        return "No step has been logged yet."
    last, level = losses[-1][1], report.unigram_entropy
    if level is not None:
        below = level - last
        if below > 0:
            return (
                f"{name} fell {below:.2f} nats below the unigram level: "
                f"perplexity {_perplexity(last)} instead of {_perplexity(level)}."
            )
        return f"{name} is still {-below:.2f} nats above the unigram level: word frequencies alone do better."
    if len(losses) == 1:
        return f"{name} is {last:.3g}."
    moved = "fell" if last < losses[0][1] else "went"
    return f"{name} {moved} from {losses[0][1]:.3g} to {last:.3g}."


def _lead(report: PretrainingReport) -> str:
    last = report.steps[-1] if report.steps else {}
    parts = []
    if "step" in last:
        parts.append(f"{last['step']:,} {'step' if last['step'] == 1 else 'steps'}")
    if "tokens" in last:
        parts.append(f"{_in_words(last['tokens'])} tokens")
    told = " over ".join(parts)
    if "seconds" in last:
        told += f"{' in ' if told else ''}{duration(last['seconds'])}"
    return f"{told}." if told else ""


def _figures(report: PretrainingReport) -> str:
    figures: list[tuple[str, str]] = []
    whose = ""
    if report.is_detecting:
        figures, whose = detection.detection_figures(report.steps, report.held_out), ", generator"
    losses = column(report.held_out, "loss")
    if losses:
        figures.append((f"Held-out loss{whose}", f"{losses[-1][1]:.3f}"))
        if report.unigram_entropy is not None:
            figures.append(("Perplexity", _perplexity(losses[-1][1])))
    for rows, name in ((report.held_out, "Held-out accuracy"), (report.steps, "Training accuracy")):
        accuracies = column(rows, "masked_accuracy")
        if accuracies:
            figures.append((f"{name}, {report.guessed}{whose}", f"{100 * accuracies[-1][1]:.1f} %"))
            break
    training = column(report.steps, "loss")
    if training:
        figures.append((f"Training loss{whose}", f"{training[-1][1]:.3f}"))
    speeds = [speed for _, speed in column(report.steps, "tokens_per_second")]
    if speeds:
        figures.append(("Tokens per second (median)", _amount(median(speeds))))
    if not figures:
        return ""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    return f'<dl class="figures">{cells}</dl>'


def _curves(report: PretrainingReport) -> str:
    losses = [
        Series("training", column(report.steps, "loss", keep_gaps=True)),
        Series("held-out", column(report.held_out, "loss", keep_gaps=True)),
    ]
    level = None if report.unigram_entropy is None else ("unigram level", report.unigram_entropy)
    unit = "nats per token" if level else "loss"
    large = line_chart(losses, x_label="step", y_label=unit, reference=level, height=320)
    small = []
    for heading, rows, key, label in (
        (f"Accuracy on {report.guessed}", report.held_out, "masked_accuracy", "share right"),
        ("Learning rate", report.steps, "learning_rate", "rate"),
        ("Speed", report.steps, "tokens_per_second", "tokens per second"),
    ):
        points = column(rows, key)
        if len(points) > 1:
            curve = line_chart(
                [Series(heading.lower(), points)], x_label="step", y_label=label, height=160, from_zero=True
            )
            small.append(f'<div class="panel"><h3>{heading}</h3>{curve}</div>')
    pair = f'<div class="pair">{"".join(small)}</div>' if small else ""
    return f'<div class="panel">{large}</div>{pair}'


def _loss_note(report: PretrainingReport) -> str:
    note = "Lower is better."
    if report.held_out:
        note += " The held-out text is never trained on."
    if report.unigram_entropy is not None:
        note += (
            " The dashed line is the loss of a model that knows how often each token occurs and nothing else; "
            "below it, context is being used."
        )
    return note


def filled_card(filled: FilledMask) -> str:
    """The sentence with the likeliest token in the place of its mask, and a bar per candidate."""
    parts = MASK.split(filled.text)
    # With two masks the candidates are for one of them, and nobody can tell which: the masks stay visible.
    best = filled.candidates[0][0] if len(parts) == 2 and filled.candidates else "[MASK]"
    sentence = f"<mark>{escape(best.strip() or best)}</mark>".join(map(escape, parts))
    bars = "".join(
        f'<li><span class="word">{escape(word)}</span>'
        f'<span class="bar" style="--share:{100 * min(1.0, max(0.0, share)):.2f}"></span>'
        f'<span class="percent">{100 * share:.1f} %</span></li>'
        for word, share in filled.candidates
    )
    return f'<div class="panel"><blockquote>{sentence}</blockquote><ol>{bars}</ol></div>'


def command_list(commands: Sequence[str]) -> str:
    """Commands below each other, each with a button to copy it; SCRIPT brings the buttons to life."""
    rows = "".join(
        f'<div class="command"><pre>{escape(command)}</pre><button type="button">Copy</button></div>'
        for command in commands
    )
    return f'<div class="panel commands">{rows}</div>'


def _perplexity(loss: float) -> str:
    value = math.exp(min(loss, 60.0))  # a diverged loss must not overflow
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}" if value < 1e7 else f"{value:.1e}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if abs(value) < 1e5 else short_number(float(f"{value:.3g}"))


def _in_words(value: float) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """A span of time in its two largest units: 42 s, 3 min 5 s, 2 h 14 min, 3 d 4 h."""
    whole = round(seconds)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (name, size), (below, below_size) in pairwise(units):
        if whole >= size:
            rest = whole % size // below_size
            return f"{whole // size} {name}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"
