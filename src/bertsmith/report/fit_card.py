"""card.md: what an artefact is, what it was made from, what it costs here, how good it is, how to run it."""

from collections.abc import Mapping
from typing import Any


def fit_card(figures: Mapping[str, Any], name: str) -> str:
    """The model card of a chosen artefact as Markdown."""
    row, percentile = figures["chosen"], figures["limits"].get("percentile", 95)
    interval = figures.get("interval")
    spread = f", 95 % interval {interval[0]:.1f} to {interval[1]:.1f}" if interval else ""
    whole = figures["reference"]
    lines = [
        f"# {name}",
        "",
        f"A model for {figures['task']}: the sub-network *{row['network']}* of `{figures['model']}`, run by "
        f"{row['engine']} in {row['precision']}"
        + (", with a vocabulary cut to the pieces its texts use." if row["vocabulary"] == "cut" else "."),
        f"It was chosen as the best one that keeps this budget: **{figures['budget']}**.",
        "",
        "| | this model | whole network |" if whole else "| | this model |",
        "|---|---|---|" if whole else "|---|---|",
    ]
    for label, cell in (
        (f"{figures['metric']} on {figures['part']}", lambda one: f"{one['score']:.2f}"),
        (f"latency p{percentile}, ms", lambda one: f"{one['latency_ms']:.2f}"),
        ("size, MB", lambda one: megabytes(one["size_mb"])),
        ("peak memory of the process, MB", lambda one: f"{one['memory_mb']:.0f}"),
        ("parameters", lambda one: f"{one['parameters']:,}"),
    ):
        cells = [label, cell(row), *([cell(whole)] if whole and whole["is_measured"] else [])]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Score: {figures['metric']} {figures['score']:.2f} on {figures['examples']:,} examples of `{figures['data']}` "
        f"({figures['part']}){spread}. The choice was made on the same examples, so expect a little less on new ones.",
        "",
        "## Measured",
        "",
        f"{len(row['timings'])} fresh processes, each warmed up; the table above has the medians of their figures.",
        "",
        "| process | sequences | p50 ms | p95 ms | calls | peak memory MB |",
        "|---|---|---|---|---|---|",
    ]
    for number, timing in enumerate(row["timings"], 1):
        for workload, found in timing["latency"].items():
            where = "as long as the data's" if workload == "data" else f"{workload} tokens"
            lines.append(
                f"| {number} | {where} | {found['p50']:.2f} | {found['p95']:.2f} | {found['runs']:.0f} | "
                f"{timing['memory_mb']:.0f} |"
            )
    machine, conditions = figures["machine"], figures["conditions"]
    versions = ", ".join(f"{package} {version}" for package, version in figures["versions"].items())
    lines += [
        "",
        f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['system']}; "
        f"{_counted(figures['threads'], 'thread')}; {_counted(conditions['batch'], 'sequence')} at a time. Versions: "
        f"{versions}. Latency is from token ids to the "
        "head's answer; splitting text into tokens is not counted in. On another machine measure again.",
        "",
        "## Run it",
        "",
        "```python",
        "from bertsmith import Predictor",
        "",
        f'predictor = Predictor.load("{name}")',
        'predictor.predict(["a text"])',
        "```",
        "",
        "```",
        f"bertsmith evaluate {name} --data {figures['data']} --part {figures['part']} --out evaluation",
        "```",
        "",
    ]
    return "\n".join(lines)


def _counted(count: int, thing: str) -> str:
    return f"1 {thing}" if count == 1 else f"{count} {thing}s"


def megabytes(size: float) -> str:
    """A size in megabytes as it is written: one digit after the point, more for small ones.

    >>> megabytes(86.64), megabytes(0.0314)
    ('86.6', '0.0314')
    """
    return f"{size:.1f}" if size >= 10 else f"{size:.3g}"
