"""Which labels were taken for which: the table of a confusion matrix, and how well each label is found."""

from collections.abc import Sequence
from html import escape

import numpy as np

from bertsmith.tasks.metrics.classes import ClassCounts

MOST_LABELS = 30  # more cannot be read on a screen
ROOMY = 8  # up to here a cell has room for its share, too
LONGEST_LABEL = 28

STYLE = """
.matrix, .classes { overflow-x: auto; }
.matrix table { border-collapse: separate; border-spacing: 3px; font-variant-numeric: tabular-nums; }
.matrix th { color: var(--muted); font-weight: 500; font-size: 14px; padding: 2px 8px; max-width: 16em; }
.matrix thead th { vertical-align: bottom; text-align: center; }
.matrix tbody th { text-align: right; white-space: nowrap; }
.matrix .axis { font-size: 12.5px; text-align: left; }
.matrix td { text-align: center; min-width: 74px; height: 54px; padding: 4px 8px; border-radius: 6px;
  line-height: 1.25; background: color-mix(in srgb, var(--hue) min(70%, var(--share) * var(--weight)), var(--quiet)); }
.matrix { --quiet: color-mix(in srgb, var(--line) 45%, transparent); }
.matrix td.right { --hue: var(--series-1); --weight: .5%; }
.matrix td.wrong { --hue: var(--series-2); --weight: 1.8%; }
.matrix td small { display: block; font-size: 12px; opacity: .8; }
.matrix.dense table { border-spacing: 1px; }
.matrix.dense td { min-width: 26px; height: 26px; padding: 0 3px; font-size: 12px; border-radius: 3px; }
.matrix.dense thead th { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left; padding: 6px 2px; }
.matrix.dense thead th.axis { writing-mode: horizontal-tb; transform: none; vertical-align: bottom; }
.matrix.dense tbody th { padding: 0 6px; font-size: 13px; }
.classes table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.classes th, .classes td { text-align: right; padding: 7px 8px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
.classes th { color: var(--muted); font-weight: 500; font-size: 14px; }
.classes th:first-child, .classes td:first-child { text-align: left; padding-left: 0; }
.classes td:first-child { font-weight: 600; }
.classes .bar { display: inline-block; width: 36px; height: 7px; margin-right: 9px; border-radius: 4px;
  vertical-align: 1px; background: linear-gradient(to right, var(--series-1) calc(var(--share) * 1%), var(--line) 0); }
@media (max-width: 640px) { .classes .bar { display: none; } .classes th, .classes td { padding: 7px 5px; }
  .classes th { font-size: 13px; } }
"""


def most_confused(counts: np.ndarray, most: int = MOST_LABELS) -> np.ndarray:
    """The numbers of the labels that take part in most mistakes, in their order.

    Shape: counts (labels that were right, labels that were said).
    """
    mistakes = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    chosen: np.ndarray = np.sort(np.argsort(-mistakes, kind="stable")[:most])
    return chosen


def matrix_table(labels: Sequence[str], counts: np.ndarray, totals: np.ndarray) -> str:
    """The matrix as a table: a row per right label, coloured by the share of its total that each answer got.

    Shape: counts (labels that were right, labels that were said), totals (labels that were right,).
    """
    dense = len(labels) > ROOMY
    heads = "".join(_head(label, "col") for label in labels)
    rows = []
    for row, label in enumerate(labels):
        cells = "".join(_cell(labels, row, column, counts, totals, dense) for column in range(len(labels)))
        rows.append(f"<tr>{_head(label, 'row')}{cells}</tr>")
    return (
        f'<div class="matrix{" dense" if dense else ""}" tabindex="0"><table><thead><tr>'
        f'<th class="axis">right ↓ &nbsp; said →</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def class_table(labels: Sequence[str], counts: ClassCounts, chosen: Sequence[int] | np.ndarray) -> str:
    """Of each chosen label how often it was right and was said, and how well it is found."""
    rows = []
    for number in chosen:
        figures = "".join(
            f'<td><span class="bar" style="--share:{100 * share:.1f}"></span>{100 * share:.1f}</td>'
            for share in (counts.precision[number], counts.recall[number], counts.f1[number])
        )
        rows.append(
            f"<tr><td>{escape(cut(labels[number], LONGEST_LABEL))}</td><td>{counts.right[number]:,}</td>"
            f"<td>{counts.said[number]:,}</td>{figures}</tr>"
        )
    heads = "".join(
        f'<th scope="col">{name}</th>' for name in ("Label", "Examples", "Said", "Precision", "Recall", "F1")
    )
    return (
        f'<div class="classes" tabindex="0"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def cut(text: str, longest: int) -> str:
    """A text with what is too long left out at its end."""
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


def _head(label: str, scope: str) -> str:
    return f'<th scope="{scope}" title="{escape(label)}">{escape(cut(label, LONGEST_LABEL))}</th>'


def _cell(labels: Sequence[str], row: int, column: int, counts: np.ndarray, totals: np.ndarray, dense: bool) -> str:
    count, share = int(counts[row, column]), 100 * float(counts[row, column]) / max(1, int(totals[row]))
    told = f"{labels[row]} → {labels[column]}: {count:,} of {int(totals[row]):,} ({share:.1f} %)"
    shown = (f"{count}" if count else "") if dense else f"{count:,}<small>{share:.1f} %</small>"
    kind = "right" if row == column else "wrong"
    return f'<td class="{kind}" style="--share:{share:.1f}" title="{escape(told)}">{shown}</td>'
