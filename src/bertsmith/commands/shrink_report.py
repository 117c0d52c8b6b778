"""What an elastic training shows: the table of its sub-networks, and report.html."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertsmith.shrinking.elastic import ElasticSettings
    from bertsmith.shrinking.record import ElasticRecord


def print_grid(record: "ElasticRecord", out: Path) -> None:
    """Nothing; the table of all sub-networks is shown."""
    from rich.console import Console
    from rich.table import Table

    title = f"dev: {record.metric}; the fine-tuned model has {record.teacher_score:.2f}"
    table = Table("width", "depth", "score", "kept", "parameters", "GFLOP", "ms", title=title)
    for member in reversed(record.grid):
        table.add_row(
            f"{member.width:g}",
            f"{member.depth:g}",
            f"{member.score:.2f}",
            f"{member.score / record.teacher_score:.1%}" if record.teacher_score else "–",
            f"{member.parameters / 1e6:.2f} M",
            f"{member.flops / 1e9:.3f}",
            f"{member.latency_ms:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"written to {out}: bertsmith fit {out} takes a budget; report.html tells more",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def write_elastic_report(settings: "ElasticSettings", record: "ElasticRecord", out: Path) -> None:
    """Nothing; report.html in the folder of the run."""
