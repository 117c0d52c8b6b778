"""report.html of an elastic training: every size with its score and cost, which heads survive, how it was learned."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from bertsmith.layers.subnet import Subnet
from bertsmith.report import chart, head_heat, pretraining
from bertsmith.report.chart import (
    Plane,
    Series,
    axes,
    colour,
    column,
    legend,
    line_chart,
    nice_ticks,
    reference_line,
    widened,
)
from bertsmith.report.elastic import (
    HEADS_DRAWN,
    ElasticReport,
    cheapest_that_keeps,
    depths,
    kept_share,
    largest,
    mean_score,
    member_at,
    smallest,
    widths,
)
from bertsmith.report.finetuning import metric_name
from bertsmith.report.head_heat import importance_map, looks, looks_note, survival_map
from bertsmith.report.page import facts_table, masthead, page, section
from bertsmith.report.pretraining import command_list
from bertsmith.shrinking.elastic_metadata import ElasticRecord, MemberFigures
from bertsmith.shrinking.grid_judge import name_of

HEIGHT = 300
PALEST = 0.9  # of the best score, at most, is where the shade of the grid begins: small differences look small
STAGES = {"width": "Widths", "depth": "Widths and depths", "labels": "Labels"}

STYLE = """
.sizes { overflow-x: auto; }
.sizes table { border-collapse: separate; border-spacing: 4px; width: 100%; font-variant-numeric: tabular-nums; }
.sizes th { color: var(--muted); font-weight: 500; font-size: 14px; padding: 2px 6px; white-space: nowrap; }
.sizes tbody th { text-align: right; width: 1%; }
.sizes thead th.axis { text-align: right; font-size: 12.5px; line-height: 1.3; }
.sizes td { border-radius: 8px; padding: 10px 12px; vertical-align: top; line-height: 1.35; min-width: 84px;
  background: color-mix(in srgb, var(--series-1) calc(var(--share) * 46%), color-mix(in srgb, var(--line) 40%,
  var(--surface))); }
.sizes td.none { background: none; }
.sizes b { font-size: 19px; letter-spacing: -.01em; font-weight: 640; }
.sizes .kept { font-size: 14px; margin-left: 8px; white-space: nowrap; }
.sizes small { display: flex; flex-wrap: wrap; gap: 0 12px; font-size: 12.5px; margin-top: 3px; opacity: .82; }
.sizes small span { white-space: nowrap; }
.trade .line { fill: none; stroke-width: 2; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.trade .size { stroke: transparent; stroke-width: 12; }
.trade .size:hover { stroke: var(--ink); stroke-width: 1.5; }
.pair .panel { min-width: 0; }
.next { margin-top: 16px; }
@media (max-width: 640px) { .sizes th { padding: 2px; } .sizes td { padding: 8px; } .sizes b { font-size: 17px; }
  .sizes .kept { display: block; margin: 0; font-size: 13px; } .sizes small { display: block; font-size: 11.5px; }
  .sizes small span { display: block; } .sizes table { border-spacing: 3px; } }
"""


def elastic_page(report: ElasticReport) -> str:
    """The whole report as one self-contained HTML document."""
    record = report.record
    body = masthead("Elastic training", report.title, headline(report), lead=_lead(report)) + _figures(record)
    body += section("Every size", size_grid(record), note=grid_note(record))
    if len(record.grid) > 1:
        trade_note = "Sub-networks of one depth are joined; the larger the dot, the wider. Latencies are of PyTorch on "
        body += section("Score and cost", _trades(record), note=f"{trade_note}the machine of the training.")
    body += _heads(report)
    drawn = "".join(_stage(record, stage, rows) for stage, rows in report.stages.items())
    if drawn:
        told = "The mean is over all sub-networks that a stage judges; the dashed line is the fine-tuned model."
        body += section("How it learned", drawn, note=told)
    if report.heads is not None:
        only = "" if len(report.heads.layers[0][1]) < HEADS_DRAWN else f" At most {HEADS_DRAWN} heads of a layer."
        body += section("Where heads look", looks(report.heads), note=looks_note(report.heads) + only)
    if report.commands:
        note = "Ask for a budget and get the best network that keeps it, or take one out by its size."
        body += section("Go on", command_list(report.commands), note=note)
    if report.facts:
        body += section("Data and settings", facts_table(report.facts))
    if report.settings:
        settings = f'<pre tabindex="0">{escape(report.settings)}</pre>'
        settings = f"<details><summary>Show all settings</summary>{settings}</details>"
        body += section("Resolved settings", settings, note="These settings, saved as a file, run the same run again.")
    style = chart.STYLE + pretraining.STYLE + head_heat.STYLE + STYLE
    return page(f"{report.title}: elastic training", body, style=style, script=pretraining.SCRIPT)


def headline(report: ElasticReport) -> str:
    """The outcome in one sentence."""
    record = report.record
    sizes = f"on average over {len(record.grid)} sizes of one model" if len(record.grid) > 1 else "at the only size"
    share = _share(record, mean_score(record))
    kept = f": {share} of the fine-tuned model's" if share else ""
    return f"{metric_name(record.metric)} {mean_score(record):.2f} {sizes}{kept}"


def _lead(report: ElasticReport) -> str:
    record, small = report.record, smallest(report.record)
    whole = largest(record)
    told = f"{report.model}, fine-tuned for {report.task}, has {record.teacher_score:.2f}."
    if small is whole:
        return told
    share = _share(record, small.score)
    kept = f"keeps {share} of that" if share else f"has {small.score:.2f}"
    return (
        f"{told} The smallest sub-network ({_named(small)}) {kept} with "
        f"{_ratio(small.parameters, whole.parameters)} of the parameters and {_ratio(small.flops, whole.flops)} of the "
        "operations."
    )


def _figures(record: ElasticRecord) -> str:
    whole, small = largest(record), smallest(record)
    figures = {
        "Fine-tuned model": f"{record.teacher_score:.2f}",
        "Mean of all sizes": f"{mean_score(record):.2f}",
    }
    if small is not whole:
        figures |= {"Largest size": f"{whole.score:.2f}", "Smallest size": f"{small.score:.2f}"}
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in figures.items())
    return f'<dl class="figures">{cells}</dl>'


def grid_note(record: ElasticRecord) -> str:
    """What the cells of the grid hold."""
    return (
        f"{metric_name(record.metric)} on dev, and its share of the fine-tuned model's {record.teacher_score:.2f}; "
        f"below it parameters, operations and latency for one sequence of {record.length} tokens."
    )


def size_grid(record: ElasticRecord) -> str:
    """Widths downwards, depths across; the better, the darker."""
    scores = [member.score for member in record.grid if math.isfinite(member.score)] or [0.0]
    best = max(scores)
    palest = min(*scores, best - (1 - PALEST) * abs(best))
    heads = "".join(f'<th scope="col">{depth:g}</th>' for depth in depths(record))
    rows = []
    for width in widths(record):
        cells = ""
        for depth in depths(record):
            member = member_at(record, width, depth)
            if member is None:
                cells += '<td class="none">–</td>'
                continue
            share = (member.score - palest) / ((best - palest) or 1.0) if math.isfinite(member.score) else 0.0
            cells += _size(record, member, share)
        rows.append(f'<tr><th scope="row">{width:g}</th>{cells}</tr>')
    return (
        f'<div class="panel sizes" tabindex="0"><table><thead><tr><th class="axis">depth →<br>width ↓</th>{heads}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table>{_good_enough(record)}</div>"
    )


def _size(record: ElasticRecord, member: MemberFigures, share: float) -> str:
    kept = _share(record, member.score)
    shown = f'<span class="kept">{kept}</span>' if kept else ""
    costs = (f"{_millions(member.parameters)} M", f"{_giga(member.flops)} GFLOP", f"{member.latency_ms:.2f} ms")
    told = "".join(f"<span>{cost}</span>" for cost in costs)
    title = (
        f"width {member.width:g}, depth {member.depth:g}: {member.parameters:,} parameters, {member.flops:,.0f} FLOP"
    )
    return f'<td style="--share:{share:.3f}" title="{title}"><b>{member.score:.2f}</b>{shown}<small>{told}</small></td>'


def _good_enough(record: ElasticRecord) -> str:
    """The cheapest that keep most of the score, as facts."""
    facts, whole = {}, largest(record)
    found: list[MemberFigures] = []
    for share in (0.99, 0.98, 0.95):
        member = cheapest_that_keeps(record, share)
        if member is not None and member is not whole and member not in found:
            found.append(member)
            named = f"{_named(member)} ({_ratio(member.flops, whole.flops)} of the work)"
            facts[f"{100 * share:.0f}\u00a0% kept by"] = named
    return f'<div class="next">{facts_table(facts)}</div>' if facts else ""


def _trades(record: ElasticRecord) -> str:
    by_latency = _trade(record, "latency, ms", lambda member: member.latency_ms)
    by_flops = _trade(record, "GFLOP", lambda member: member.flops / 1e9)
    return (
        f'<div class="pair"><div class="panel"><h3>By latency</h3>{by_latency}</div>'
        f'<div class="panel"><h3>By operations</h3>{by_flops}</div></div>'
    )


def _trade(record: ElasticRecord, x_label: str, cost: Callable[[MemberFigures], float]) -> str:
    """Score against a cost, a line for every depth with its widths in order."""
    groups = [
        [member for width in widths(record) if (member := member_at(record, width, depth)) is not None]
        for depth in depths(record)
    ]
    groups = [[member for member in group if math.isfinite(member.score + cost(member))] for group in groups]
    groups = [group for group in groups if group]
    if not groups:
        return '<p class="chart-empty">There is no score to draw.</p>'
    series = [
        Series(f"depth {group[0].depth:g}", [(cost(member), member.score) for member in group]) for group in groups
    ]
    points = [point for one in series for point in one.points]
    metric, reference = metric_name(record.metric), _teacher(record)
    x_ticks = nice_ticks(0.0, max(max(x for x, _ in points), 1e-9), wanted=5, covers=True)
    values = [*(y for _, y in points), *([] if reference is None else [reference[1]])]
    y_ticks = nice_ticks(*widened(min(values), max(values)), wanted=6, covers=True)
    plane = Plane(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1], HEIGHT)
    parts = [axes(plane, x_ticks, y_ticks, x_label, metric)]
    if reference is not None:
        parts.append(reference_line(reference, plane, at_start=True))
    for number, one in enumerate(series):
        places = " ".join(f"{10 * plane.across(x):.1f},{plane.down(y)}" for x, y in one.points)
        parts.append(
            f'<svg width="100%" height="{HEIGHT}" viewBox="0 0 1000 {HEIGHT}" preserveAspectRatio="none" '
            f'overflow="visible"><polyline class="line" style="stroke:{colour(number)}" points="{places}"/></svg>'
        )
    for number, group in enumerate(groups):
        for member in group:
            told = f"{_named(member)}: {member.score:.2f} at {cost(member):.4g} {x_label}"
            place = (
                f'cx="{plane.across(cost(member))}%" cy="{plane.down(member.score)}" r="{2.5 + 4 * member.width:.2f}"'
            )
            parts.append(
                f'<circle class="size" style="fill:{colour(number)}" {place}><title>{escape(told)}</title></circle>'
            )
    label = escape(f"{metric} by {x_label} of {len(points)} sub-networks")
    return (
        f'<figure class="chart trade" style="--height:{HEIGHT}px">{legend(series)}'
        f'<svg class="axes" role="img" aria-label="{label}">{"".join(parts)}</svg></figure>'
    )


def _heads(report: ElasticReport) -> str:
    record = report.record
    if not record.head_scores:
        return ""
    drawn = (
        f'<div class="panel"><h3>Importance</h3>{importance_map(record)}<p class="heat-key"><span>share of the '
        "layer&#x27;s importance, per cent</span></p></div>"
    )
    if len(record.grid) > 1:
        drawn += f'<div class="panel"><h3>Kept down to</h3>{survival_map(record)}</div>'
    note = "Rows are layers, columns heads, both counted from 1 as they stood in the fine-tuned model."
    if len(depths(record)) > 1:
        note += " The last column has the smallest depth that keeps the layer."
    if report.order != "importance":
        note += f" In this run units were not put in the order of their importance: order is {report.order}."
    return section("Which heads survive", f'<div class="pair">{drawn}</div>', note=note)


def _stage(record: ElasticRecord, stage: str, rows: Sequence[dict[str, Any]]) -> str:
    """The curves of a stage; nothing where its log has neither losses nor scores."""
    losses = column([row for row in rows if row.get("kind") == "training"], "loss", keep_gaps=True)
    held_out = [row for row in rows if row.get("kind") == "held_out"]
    judged = [subnet for subnet in record.subnets if any(name_of(subnet) in row for row in held_out)]
    scores = [Series("mean", column(held_out, "score"))]
    if len(judged) > 1:
        ends = sorted(judged, key=lambda subnet: (subnet.depth, subnet.width))
        scores += [Series(_named(subnet), column(held_out, name_of(subnet))) for subnet in (ends[-1], ends[0])]
    name, panels = escape(STAGES.get(stage, stage)), ""
    metric = metric_name(record.metric)
    if scores[0].points:
        curve = line_chart(
            scores,
            x_label="step",
            y_label=metric,
            reference=_teacher(record),
            height=220,
            starts_at_zero=True,
            reference_at_start=True,
        )
        panels += f'<div class="panel"><h3>{name}: {escape(metric)} on dev</h3>{curve}</div>'
    if losses:
        curve = line_chart(
            [Series("training", losses)],
            x_label="step",
            y_label="loss",
            height=220,
            from_zero=True,
            starts_at_zero=True,
        )
        panels += f'<div class="panel"><h3>{name}: training loss</h3>{curve}</div>'
    return f'<div class="pair">{panels}</div>' if panels else ""


def _teacher(record: ElasticRecord) -> tuple[str, float] | None:
    """The dashed line of the charts."""
    return ("fine-tuned", record.teacher_score) if math.isfinite(record.teacher_score) else None


def _named(size: MemberFigures | Subnet) -> str:
    return f"width {size.width:g}, depth {size.depth:g}"


def _share(record: ElasticRecord, score: float) -> str:
    share = kept_share(record, score)
    return "" if share is None else f"{100 * share:.1f}\u00a0%"


def _ratio(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}\u00a0%" if whole else "–"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}" if count >= 1e7 else f"{count / 1e6:.2f}"


def _giga(flops: float) -> str:
    return f"{flops / 1e9:.2f}" if flops >= 1e9 else f"{flops / 1e9:.3g}"
