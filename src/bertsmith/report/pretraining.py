"""Report page of a pre-training run: results, loss curves, filled masks and commands for next steps."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bertsmith.report.attention import Explorer
from bertsmith.report.charts import LogRow, Panel, Series, column, line_chart, short_number
from bertsmith.report.page import format_count, format_duration, render

MASK = re.compile(r"\[MASK\]|<mask>")


@dataclass(frozen=True)
class FilledMask:
    """A sentence with a mask, and the most probable tokens for it with their probabilities, best first."""

    text: str
    candidates: tuple[tuple[str, float], ...]

    @property
    def parts(self) -> list[str]:
        """The sentence split at its masks."""
        return MASK.split(self.text)

    @property
    def best(self) -> str:
        """The best candidate; "[MASK]" for several masks, because the candidates do not say which one they fill."""
        best = self.candidates[0][0] if len(self.parts) == 2 and self.candidates else "[MASK]"
        return best.strip() or best


@dataclass(frozen=True)
class PretrainingReport:
    """Contents of the page; sections without data are omitted.

    `steps` are the training rows of the log (step, loss, learning_rate, tokens_per_second, and `tokens` and `seconds`
    since the start of the run). `held_out` are rows with step, loss and possibly masked_accuracy. With the metrics of
    replaced-token detection, `loss` is the generator's.
    """

    title: str
    facts: Mapping[str, str]
    steps: Sequence[LogRow]
    held_out: Sequence[LogRow]
    unigram_entropy: float | None
    """Set only if the loss is a mean cross-entropy per token, so that exp(loss) is a perplexity."""
    filled: tuple[FilledMask, ...] = ()
    attention: Explorer | None = None
    settings: str = ""
    commands: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    predicted: str = "masked tokens"
    """The tokens that the model predicts: "masked tokens" or "next tokens"."""

    @property
    def detects_replacements(self) -> bool:
        """Whether the run trains replaced-token detection."""
        return any("replaced_recall" in row for row in (*self.steps, *self.held_out))


def render_pretraining_page(report: PretrainingReport) -> str:
    """Return the report as one self-contained HTML document."""
    return render(
        "pretraining.html",
        report=report,
        headline=headline(report),
        lead=_lead(report),
        metrics=_metrics(report),
        detection=_detection_panels(report) if report.detects_replacements else (),
        loss_chart=_loss_chart(report),
        panels=_small_panels(report),
    )


def headline(report: PretrainingReport) -> str:
    """Return the outcome in one sentence: the loss relative to the unigram level, if that is known."""
    if report.detects_replacements:
        last = (report.held_out or report.steps)[-1]
        recall, precision = last["replaced_recall"], last["replaced_precision"]
        if not recall:
            return "The encoder detects none of the replaced tokens."
        return f"The encoder detects replaced tokens with {recall:.0%} recall and {precision:.0%} precision."
    name, losses = "Held-out loss", column(report.held_out, "loss")
    if not losses:
        name, losses = "Training loss", column(report.steps, "loss")
    if not losses:
        return "No step has been logged yet."
    last_loss, level = losses[-1][1], report.unigram_entropy
    if level is not None:
        below = level - last_loss
        if below > 0:
            return (
                f"{name} fell {below:.2f} nats below the unigram level: "
                f"perplexity {_perplexity(last_loss)} instead of {_perplexity(level)}."
            )
        return f"{name} is still {-below:.2f} nats above the unigram level: token frequencies alone do better."
    if len(losses) == 1:
        return f"{name} is {last_loss:.3g}."
    verb = "fell" if last_loss < losses[0][1] else "went"
    return f"{name} {verb} from {losses[0][1]:.3g} to {last_loss:.3g}."


def _lead(report: PretrainingReport) -> str:
    last = report.steps[-1] if report.steps else {}
    parts = []
    if "step" in last:
        parts.append(format_count(int(last["step"]), "step"))
    if "tokens" in last:
        parts.append(f"{_in_words(last['tokens'])} tokens")
    text = " over ".join(parts)
    if "seconds" in last:
        text += f"{' in ' if text else ''}{format_duration(last['seconds'])}"
    return f"{text}." if text else ""


def _metrics(report: PretrainingReport) -> dict[str, str]:
    metrics: dict[str, str] = {}
    owner = ""
    if report.detects_replacements:
        last, owner = (report.held_out or report.steps)[-1], ", generator"
        metrics["Recall of replaced tokens"] = f"{100 * last['replaced_recall']:.1f} %"
        metrics["Precision"] = f"{100 * last['replaced_precision']:.1f} %"
        metrics["Tokens replaced"] = f"{100 * last['replaced_share']:.1f} %"
    losses = column(report.held_out, "loss")
    if losses:
        metrics[f"Held-out loss{owner}"] = f"{losses[-1][1]:.3f}"
        if report.unigram_entropy is not None:
            metrics["Perplexity"] = _perplexity(losses[-1][1])
    for rows, name in ((report.held_out, "Held-out accuracy"), (report.steps, "Training accuracy")):
        accuracies = column(rows, "masked_accuracy")
        if accuracies:
            metrics[f"{name}, {report.predicted}{owner}"] = f"{100 * accuracies[-1][1]:.1f} %"
            break
    training = column(report.steps, "loss")
    if training:
        metrics[f"Training loss{owner}"] = f"{training[-1][1]:.3f}"
    speeds = [speed for _, speed in column(report.steps, "tokens_per_second")]
    if speeds:
        speed = median(speeds)
        metrics["Tokens per second (median)"] = f"{speed:,.0f}" if speed < 1e5 else short_number(float(f"{speed:.3g}"))
    return metrics


def _detection_panels(report: PretrainingReport) -> list[Panel]:
    """Return charts of recall, precision and the share of replaced tokens, and of the encoder's loss."""
    rows = report.held_out if len(report.held_out) > 1 else report.steps
    shares = [
        Series(name, column(rows, f"replaced_{key}", keep_gaps=True))
        for name, key in (("recall", "recall"), ("precision", "precision"), ("share of replaced tokens", "share"))
    ]
    losses = [
        Series("training", column(report.steps, "replaced_loss", keep_gaps=True)),
        Series("held-out", column(report.held_out, "replaced_loss", keep_gaps=True)),
        Series("constant share", [(step, entropy(share)) for step, share in column(rows, "replaced_share")]),
    ]
    return [
        Panel("Recall and precision", line_chart(shares, x_label="step", y_label="share", y_from_zero=True)),
        Panel("Encoder loss", line_chart(losses, x_label="step", y_label="nats per token", y_from_zero=True)),
    ]


def _loss_chart(report: PretrainingReport) -> str:
    losses = [
        Series("training", column(report.steps, "loss", keep_gaps=True)),
        Series("held-out", column(report.held_out, "loss", keep_gaps=True)),
    ]
    level = report.unigram_entropy
    reference = None if level is None else (f"unigram level {level:.2f}", level)
    unit = "loss" if level is None else "nats per token"
    return line_chart(losses, x_label="step", y_label=unit, reference=reference, height=320)


def _small_panels(report: PretrainingReport) -> list[Panel]:
    panels = []
    for heading, rows, key, label in (
        (f"Accuracy on {report.predicted}", report.held_out, "masked_accuracy", "accuracy"),
        ("Learning rate", report.steps, "learning_rate", "rate"),
        ("Speed", report.steps, "tokens_per_second", "tokens per second"),
    ):
        points = column(rows, key)
        if len(points) > 1:
            series = [Series(heading.lower(), points)]
            panels.append(
                Panel(heading, line_chart(series, x_label="step", y_label=label, height=160, y_from_zero=True))
            )
    return panels


def entropy(share: float) -> float:
    """Return the binary cross-entropy of always predicting the share itself, in nats.

    >>> round(entropy(0.5), 3), entropy(0.0)
    (0.693, 0.0)
    """
    return -sum(p * math.log(p) for p in (share, 1 - share) if p > 0)


def _perplexity(loss: float) -> str:
    value = math.exp(min(loss, 60.0))  # avoids overflow if training diverged
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}" if value < 1e7 else f"{value:.1e}"


def _in_words(value: float) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"
