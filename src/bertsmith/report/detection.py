"""What the page of a run tells of replaced-token detection: how well the encoder finds the generator's guesses."""

import math
from typing import Any

from bertsmith.report.chart import Series, column, line_chart

Rows = list[dict[str, Any]]

TITLE = "Tokens told apart"
NOTE = (
    "Recall is the share of replaced tokens that the encoder finds, precision the share of its finds that are right. "
    "Fewer tokens are replaced as the generator learns: a right guess counts as text. A loss below that of the share "
    "alone knows more than how often tokens are replaced."
)


def is_detecting(steps: Rows, held_out: Rows) -> bool:
    """Whether the rows of a log are those of replaced-token detection."""
    return any("replaced_recall" in row for row in (*steps, *held_out))


def detection_headline(steps: Rows, held_out: Rows) -> str:
    """How well tokens are told apart at the end, in one sentence."""
    last = (held_out or steps)[-1]
    found, right = last["replaced_recall"], last["replaced_precision"]
    if not found:
        return "The encoder finds none of the replaced tokens."
    return f"The encoder finds {found:.0%} of the replaced tokens, and {right:.0%} of its finds are right."


def detection_figures(steps: Rows, held_out: Rows) -> list[tuple[str, str]]:
    """Names and values for the top of the page."""
    last = (held_out or steps)[-1]
    return [
        ("Replaced tokens found", f"{100 * last['replaced_recall']:.1f} %"),
        ("Finds that are right", f"{100 * last['replaced_precision']:.1f} %"),
        ("Tokens replaced", f"{100 * last['replaced_share']:.1f} %"),
    ]


def detection_curves(steps: Rows, held_out: Rows) -> str:
    """Charts of recall, precision and the replaced share, and of the encoder's loss, in a row."""
    rows = held_out if len(held_out) > 1 else steps
    shares = [
        Series(name, column(rows, f"replaced_{key}", keep_gaps=True))
        for name, key in (("recall", "recall"), ("precision", "precision"), ("replaced share", "share"))
    ]
    losses = [
        Series("training", column(steps, "replaced_loss", keep_gaps=True)),
        Series("held-out", column(held_out, "replaced_loss", keep_gaps=True)),
        Series("share alone", [(step, entropy(share)) for step, share in column(rows, "replaced_share")]),
    ]
    charts = {
        "Found by the encoder": line_chart(shares, x_label="step", y_label="share", from_zero=True),
        "The encoder's loss": line_chart(losses, x_label="step", y_label="nats per token", from_zero=True),
    }
    panels = "".join(f'<div class="panel"><h3>{name}</h3>{curve}</div>' for name, curve in charts.items())
    return f'<div class="pair">{panels}</div>'


def entropy(share: float) -> float:
    """The binary loss of saying nothing but a share, in nats.

    >>> round(entropy(0.5), 3), entropy(0.0)
    (0.693, 0.0)
    """
    return -sum(part * math.log(part) for part in (share, 1 - share) if part > 0)
