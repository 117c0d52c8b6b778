"""What an elastic training shows: the table of its sub-networks, and report.html."""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertsmith.report.elastic import HeadComparison
    from bertsmith.shrinking.elastic import ElasticSettings
    from bertsmith.shrinking.elastic_metadata import ElasticRecord, MemberFigures

ROOMY = 4  # up to so many depths a score and its share stand side by side in 80 columns


def print_grid(record: "ElasticRecord", out: Path, data: str | None = None) -> None:
    """Nothing; the scores of all sub-networks are shown, what the ends of the grid cost, and how to go on."""
    from rich.console import Console
    from rich.table import Table

    from bertsmith.report.elastic import depths, largest, member_at, retained_share, smallest, widths

    def cell(member: "MemberFigures | None") -> str:
        if member is None:
            return "–"
        share = retained_share(record, member.score)
        between = " " if len(depths(record)) <= ROOMY else "\n"
        return f"{member.score:.2f}" + ("" if share is None else f"{between}{share:6.1%}")

    title = f"dev: {record.metric}; the fine-tuned model has {record.teacher_score:.2f}"
    table = Table("width", title=title)
    for depth in depths(record):
        table.add_column(f"depth {depth:g}", justify="right")
    for width in widths(record):
        table.add_row(f"{width:g}", *(cell(member_at(record, width, depth)) for depth in depths(record)))
    console = Console()
    console.print(table)
    ends = {"largest": largest(record), "smallest": smallest(record)}
    for name, member in ends.items() if len(record.grid) > 1 else ():
        console.print(
            f"{name}: {member.parameters / 1e6:.2f} M parameters, {member.flops / 1e9:.3g} GFLOP, "
            f"{member.latency_ms:.2f} ms for {record.length} tokens",
            markup=False,
            highlight=False,
        )
    told = f"written to {out}; report.html tells more. A budget: {fit_command(record, out, data)}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)


def fit_command(record: "ElasticRecord", out: Path, data: str | None = None) -> str:
    """The command that fits an elastic model to half the latency of the whole one."""
    from bertsmith.report.elastic import largest

    budget = f"{float(f'{largest(record).latency_ms / 2:.2g}'):g}"
    where = "DATA" if data is None else shlex.quote(data)
    target = shlex.quote(f"{out}-fit")
    return f"bertsmith fit {shlex.quote(str(out))} --data {where} --latency-ms {budget} --out {target}"


def write_elastic_report(
    settings: "ElasticSettings", record: "ElasticRecord", out: Path, texts: Iterable[str] = (), *, seconds: float
) -> None:
    """Nothing; report.html in the folder of the run. Attention is shown on the first of some texts of dev."""
    from bertsmith.commands.task_report import REPORT
    from bertsmith.report.elastic import ElasticReport, render_elastic_page
    from bertsmith.report.page import format_duration
    from bertsmith.toml import to_toml
    from bertsmith.training.log import read_log

    task = settings.task.kind + (f" ({settings.task.name})" if settings.task.name else "")
    run = settings.run
    facts = {
        "Fine-tuned model": settings.model,
        "Data": settings.data or "given in Python",
        "Task": task,
        "Stages": ", ".join(settings.stages),
        "Order of units": settings.order,
        "Depth rule": record.depth_rule,
        "Learning rate": f"{settings.optimizer.learning_rate:g}",
        "Epochs of a stage": f"{run.epochs:g}",
        "Examples a step": f"{settings.batch.examples}",
        "Scored on": f"up to {settings.importance.examples:,} training examples",
        "Seed": f"{run.seed}",
        "Time": format_duration(seconds),
    }
    report = ElasticReport(
        title=out.resolve().name,
        model=Path(settings.model).name,
        task=task,
        record=record,
        order=settings.order,
        stages={stage: read_log(out / stage / "log.jsonl") for stage in settings.stages},
        heads=_heads(record, out, texts),
        facts=facts,
        commands=(fit_command(record, out, settings.data), load_line(record, out)),
        settings=to_toml(settings.plain()),
    )
    (out / REPORT).write_text(render_elastic_page(report), encoding="utf-8")


def load_line(record: "ElasticRecord", out: Path) -> str:
    """The line of Python that takes out the cheapest sub-network that is still good, or the smallest."""
    from bertsmith.report.elastic import cheapest_with, smallest

    member = cheapest_with(record, 0.95) or smallest(record)
    subnet = f"bertsmith.Subnet(width={member.width:g}, depth={member.depth:g}"
    rule = "" if record.depth_rule == "keep_last" else f', depth_rule="{record.depth_rule}"'
    return f"bertsmith.load({json.dumps(str(out), ensure_ascii=False)}, subnet={subnet}{rule}))"


def _heads(record: "ElasticRecord", out: Path, texts: Iterable[str]) -> "HeadComparison | None":
    """What heads look at in the first text that has words."""
    from bertsmith.checkpoint.store import load
    from bertsmith.report.elastic import compare_heads

    text = next((text for text in texts if text.strip()), None)
    return None if text is None else compare_heads(load(out), record, text)
