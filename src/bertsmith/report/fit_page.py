"""report.html of a search for a budget: the front as a picture, and every candidate in a table."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bertsmith.report import chart
from bertsmith.report.chart import COLOURS, Plane, axes, nice_ticks, widened
from bertsmith.report.fit_card import megabytes
from bertsmith.report.page import facts_table, masthead, page, section

Row = Mapping[str, Any]

STYLE = """
.front .candidate path { stroke-width: 1.6; }
.front .candidate.estimated path { fill: var(--surface); }
.front .candidate:hover path { stroke-width: 3; }
.front .ring { fill: none; stroke: var(--ink); stroke-width: 2; }
.front .chosen-label { fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: var(--surface);
  stroke-width: 5px; stroke-linejoin: round; }
.front .line { fill: none; stroke: var(--muted); stroke-width: 1.6; vector-effect: non-scaling-stroke; }
.front .legend svg { width: 14px; height: 14px; overflow: visible; }
.candidates { overflow-x: auto; }
.candidates table { border-collapse: collapse; width: 100%; font-size: 14.5px; }
.candidates th, .candidates td { text-align: left; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
.candidates th { color: var(--muted); font-weight: 500; }
.candidates .number { text-align: right; font-variant-numeric: tabular-nums; }
.candidates .chosen td { background: var(--wash); font-weight: 600; }
.candidates .guess { color: var(--muted); }
.notices li { margin: 6px 0 0 18px; }
"""
HEIGHT = 380
MARKS = {  # by precision, around (0, 0)
    "float32": "M5 0A5 5 0 1 1 -5 0A5 5 0 1 1 5 0Z",
    "bfloat16": "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "int8": "M0 -6L5.6 4.4H-5.6Z",
    "int8_static": "M0 6L5.6 -4.4H-5.6Z",
    "int8_weights": "M0 -6.2L6.2 0L0 6.2L-6.2 0Z",
}
FAR = 2.5  # times the slower of the whole network and the budget: what lies beyond would squeeze the rest


def fit_page(figures: Mapping[str, Any], name: str) -> str:
    """The search as one self-contained HTML document."""
    percentile = figures["limits"].get("percentile", 95)
    body = masthead("Fit to a budget", name, headline(figures), lead=_lead(figures))
    note = (
        "Filled marks were measured for real in fresh processes, hollow ones are estimated from the table of layers. "
        "The line joins what nothing else beats in score and latency, of those whose score is known."
    )
    body += section("Score and latency", front_picture(figures, percentile), note=note)
    if figures["notices"]:
        listed = "".join(f"<li>{escape(text)}</li>" for text in figures["notices"])
        body += section("To be known", f'<ul class="notices">{listed}</ul>')
    heading = f"All {len(figures['candidates'])} candidates"
    body += section(heading, _table(figures, percentile), note="~ marks an estimate; scores of those are float32's.")
    body += section("Facts", facts_table(_facts(figures)))
    return page(f"{name}: fit to a budget", body, style=chart.STYLE + STYLE)


def headline(figures: Mapping[str, Any]) -> str:
    """The outcome in one sentence."""
    percentile = figures["limits"].get("percentile", 95)
    if figures["fits"]:
        row = figures["chosen"]
        return (
            f"{figures['metric'].capitalize()} {figures['score']:.2f} at {row['latency_ms']:.2f}\u00a0ms "
            f"(p{percentile}) and {megabytes(row['size_mb'])}\u00a0MB: {row['words']}."
        )
    missed = "; ".join(miss["words"] for miss in figures["misses"]) or "not every time it was measured"
    return f"Nothing keeps the budget. Nearest came {figures['nearest']['words']}: {missed}."


def _lead(figures: Mapping[str, Any]) -> str:
    reference = figures["reference"]
    whole = ""
    if reference is not None and reference["is_measured"]:
        whole = (
            f" The whole network ({reference['engine']} {reference['precision']}) has {reference['score']:.2f} at "
            f"{reference['latency_ms']:.2f} ms and {megabytes(reference['size_mb'])} MB."
        )
    return f"Budget: {figures['budget']}.{whole}"


def front_picture(figures: Mapping[str, Any], percentile: int) -> str:
    rows, limit = figures["candidates"], figures["limits"].get("latency_ms")
    reference = figures["reference"] or figures["chosen"] or figures["nearest"]
    far = FAR * max(reference["latency_ms"], limit or 0.0)
    drawn = [row for row in rows if row["latency_ms"] <= far or row["is_chosen"]]
    x_values = [row["latency_ms"] for row in drawn] + ([limit] if limit else [])
    floor = figures["limits"].get("at_least")
    y_values = [row["score"] for row in drawn] + ([floor] if floor is not None else [])
    x_ticks = nice_ticks(*widened(0.0, max(x_values)), wanted=6, covers=True)
    y_ticks = nice_ticks(*widened(min(y_values), max(y_values)), wanted=7, covers=True)
    plane = Plane(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1], HEIGHT)
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    parts = [axes(plane, x_ticks, y_ticks, f"latency p{percentile}, ms", figures["metric"])]
    parts.append(_front(sorted((row for row in drawn if row["on_front"]), key=lambda row: row["latency_ms"]), plane))
    if limit:
        x = plane.across(limit)
        anchor, shift = ("end", -6) if x > 70 else ("start", 6)
        parts.append(
            f'<line class="reference" x1="{x}%" x2="{x}%" y1="0" y2="{HEIGHT}"/><text class="reference-label" '
            f'x="{x}%" dx="{shift}" y="{HEIGHT - 8}" text-anchor="{anchor}">budget {limit:g} ms</text>'
        )
    if floor is not None:
        y = plane.down(floor)
        parts.append(
            f'<line class="reference" x1="0" x2="100%" y1="{y}" y2="{y}"/><text class="reference-label" x="100%" '
            f'y="{y}" dy="16" text-anchor="end">at least {floor:g}</text>'
        )
    ordered = sorted(drawn, key=lambda row: (row["is_chosen"], row["is_measured"]))
    parts += [_mark(row, plane, engines) for row in ordered]
    left_out = len(rows) - len(drawn)
    beyond = f'<p class="note">{left_out} slower candidates are not drawn.</p>' if left_out else ""
    told = f"{figures['metric']} by latency of {len(drawn)} candidates"
    return (
        f'<figure class="chart front panel" style="--height:{HEIGHT}px">{_legend(rows, engines)}'
        f'<svg class="axes" role="img" aria-label="{escape(told)}">{"".join(parts)}</svg>{beyond}</figure>'
    )


def _front(rows: Sequence[Row], plane: Plane) -> str:
    points = " ".join(f"{10 * plane.across(row['latency_ms'])},{plane.down(row['score'])}" for row in rows)
    return (
        f'<svg width="100%" height="{plane.height}" viewBox="0 0 1000 {plane.height}" preserveAspectRatio="none" '
        f'overflow="visible"><polyline class="line" points="{points}"/></svg>'
    )


def _mark(row: Row, plane: Plane, engines: Sequence[str]) -> str:
    about = "" if row["is_measured"] else " (estimated)"
    told = f"{row['words']}: {row['score']:.2f} at {row['latency_ms']:.2f} ms, {megabytes(row['size_mb'])} MB{about}"
    x, y = plane.across(row["latency_ms"]), plane.down(row["score"])
    extra = ""
    if row["is_chosen"]:
        anchor, shift = ("end", -14) if x > 60 else ("start", 14)
        label = f'<text class="chosen-label" x="{shift}" y="-12" text-anchor="{anchor}">chosen</text>'
        extra = f'<circle class="ring" r="10"/>{label}'
    kind = "" if row["is_measured"] else " estimated"
    return (
        f'<svg class="candidate{kind}" x="{x}%" y="{y}" overflow="visible">{_shape(row, engines)}{extra}'
        f"<title>{escape(told)}</title></svg>"
    )


def _shape(row: Row, engines: Sequence[str]) -> str:
    colour = f"var(--series-{engines.index(row['engine']) % COLOURS + 1})"
    filling = f";fill:{colour}" if row.get("is_measured", True) else ""
    return f'<path style="stroke:{colour}{filling}" d="{MARKS.get(row["precision"], MARKS["float32"])}"/>'


def _legend(rows: Sequence[Row], engines: Sequence[str]) -> str:
    pairs = dict.fromkeys((row["engine"], row["precision"]) for row in rows)
    entries = "".join(
        f'<li><svg viewBox="-7 -7 14 14">{_shape({"engine": engine, "precision": precision}, engines)}</svg>'
        f"{escape(f'{engine} {precision}')}</li>"
        for engine, precision in pairs
    )
    return f'<ul class="legend">{entries}</ul>'


def _table(figures: Mapping[str, Any], percentile: int) -> str:
    names = ("network", "run by", figures["metric"], f"p{percentile} ms", "MB", "memory MB", "parameters", "budget")
    header = "".join(f'<th scope="col"{_number(place)}>{escape(heading)}</th>' for place, heading in enumerate(names))
    body = "".join(_table_row(row) for row in figures["candidates"])
    return f'<div class="candidates panel"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'


def _table_row(row: Row) -> str:
    about = "" if row["is_measured"] else "~"
    memory = f"{row['memory_mb']:.0f}" if row["is_measured"] else "–"
    kept = {True: "kept", False: "missed", None: ""}[row["holds"]]
    cut = ", cut vocabulary" if row["vocabulary"] == "cut" else ""
    cells = (
        row["network"],
        f"{row['engine']} {row['precision']}{cut}",
        f"{row['score']:.2f}",
        f"{about}{row['latency_ms']:.2f}",
        f"{about}{megabytes(row['size_mb'])}",
        memory,
        f"{row['parameters']:,}",
        "chosen" if row["is_chosen"] else kept,
    )
    kind = "chosen" if row["is_chosen"] else "" if row["is_measured"] else "guess"
    inner = "".join(f"<td{_number(place)}>{escape(cell)}</td>" for place, cell in enumerate(cells))
    return f'<tr class="{kind}">{inner}</tr>'


def _number(place: int) -> str:
    return ' class="number"' if 2 <= place <= 6 else ""


def _facts(figures: Mapping[str, Any]) -> dict[str, str]:
    machine, conditions = figures["machine"], figures["conditions"]
    lengths = "; ".join(
        "as long as the data's" if load["name"] == "data" else f"{load['name']} tokens"
        for load in conditions["workloads"]
    )
    return {
        "Model": figures["model"],
        "Data": f"{figures['data']} ({figures['part']}, {figures['examples']:,} examples)",
        "Task": figures["task"],
        "Processor": machine["processor"],
        "Cores, threads used": f"{machine['cores']}, {figures['threads']}",
        "System": machine["system"],
        "Sequences": f"{lengths}, {conditions['batch']} at a time",
        "Versions": ", ".join(f"{package} {version}" for package, version in figures["versions"].items()),
        "Measurements made": f"{figures['measurements']:,}",
    }
