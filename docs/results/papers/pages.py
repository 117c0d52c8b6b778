"""Write the pages of the papers' tables from the tables of the package and the runs in runs.jsonl.

python docs/results/papers/pages.py                    # writes the pages
python docs/results/papers/pages.py RUNS.jsonl         # first adds the runs of these tables from another file
"""

import json
import sys
from pathlib import Path

from bertsmith.report.page import format_duration
from bertsmith.report.reproduction import index_rows, table_markdown
from bertsmith.reproduction.evaluation import TableEvaluation, evaluate_table
from bertsmith.reproduction.plan import RunPlan
from bertsmith.reproduction.table import read_table, table_names
from bertsmith.runs.reproduce import read_lines

FOLDER = Path(__file__).parent
LINES = FOLDER / "runs.jsonl"
KEPT = ("key", "label", "command", "seed", "result", "seconds", "device", "torch", "bertsmith", "error")
UNTESTABLE = {
    "ConvBERT, base rows of tables 3 and 4": "no budget for networks of 100 M parameters and a million steps",
    "DeBERTa, tables 1, 2, 5 and 14 (large, 1.5B)": "no budget for networks of this size",
    "DeBERTa, tables with RACE, ReCoRD, SuperGLUE": "the data are not available here",
    "BERT, tables 1 to 4": "MNLI, QQP, QNLI train, the SQuAD training set and SWAG are not available here",
    "Transformer, table 2 (WMT)": "the data are not available here",
    "Performer against exact attention on text": "both need learned positions, which are hardly used at this budget",
    "Performer, ImageNet64 and PG-19": "the data are not available here",
    "Performer, similarity of amino acids": "measured by benchmarks/proteins.py, not yet as a table",
    "DynaBERT, RoBERTa rows": "no budget for RoBERTa",
    "Q-BERT, mixed bits": "bits depend on each trained model; measured by benchmarks/mixed_precision.py",
    "DeBERTa, −EMD on SQuAD and RACE": "published effects (0.3 to 1.4 points) are below the noise of three seeds",
}
"""Published results that no table tests, and why."""
HEAD = (
    "# The papers' claims, tested\n\n"
    "Every claim below was written down as a [table](../../how-to/reproduce.md) with its rows, seeds, metric and "
    "verdict rule before the first run. All rows of a table have the same data, steps and schedule, so a verdict is "
    "about the claim at this scale: networks of about 12 M parameters, 16 M tokens, minutes of one GPU. Published "
    "figures stand beside the measured ones on every page and are not averaged with them.\n"
)


CHANGES = (
    "Pre-training on text has 1,000 steps of 16,384 tokens instead of 2,400 of 32,768, and one part of "
    "Wikipedia instead of three: minutes of one GPU are what a dozen tables with three seeds have.",
    "BERT has rotary instead of learned positions in every table on text. With learned ones it stood at a "
    "held-out loss of 6.16 after 30 M tokens ([families](../families.md)), so its claims would not be testable. "
    "ConvBERT keeps them.",
    "FAVOR+ cannot have rotary positions, so Performer left the table of families. It is compared with exact "
    "attention on proteins: 800 steps of 32,768 residues instead of 1,800 of 65,536.",
    "The Transformer whose weights a Performer takes over has seen 98 M instead of 197 M tokens.",
    "Pre-training on sentence pairs has 1,000 steps of 16,384 tokens instead of 4,000 of 32,768; the curve over "
    "steps has 250, 500 and 1,000.",
    "Elastic models have nine sub-networks and two epochs a stage instead of twelve and three, translation "
    "batches of 16,384 tokens instead of 32,768.",
    "All rows have three seeds or more; the widest networks and some rows of translation had two.",
    "The ablation of DeBERTa has no SQuAD: its published effects lie below the noise of three seeds.",
)
"""Changes of the tables, made before the runs that they concern."""


def evaluations() -> list[TableEvaluation]:
    """Evaluate all tables from the committed runs."""
    tables = [read_table(name) for name in table_names()]
    lines = {line["key"]: line for line in read_lines(LINES)}
    plan = RunPlan(tables)
    return [evaluate_table(table, plan, lines) for table in tables]


def pages() -> dict[str, str]:
    """Return the Markdown of every page by its file name."""
    found = evaluations()
    return {"index.md": _index(found), **{f"{one.table.name}.md": table_markdown(one) for one in found}}


def _index(found: list[TableEvaluation]) -> str:
    statuses = [status for one in found for _, status in index_rows(one)]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(sorted(statuses)))
    lines = [HEAD, f"{len(found)} tables with {len(statuses)} claims: {counts}.", ""]
    lines += ["| table | claim | verdict |", "|---|---|---|"]
    for one in found:
        name = f"[{one.table.title}]({one.table.name}.md)"
        for text, status in index_rows(one):
            lines.append(f"| {name} | {text} | {status} |")
            name = ""
    lines += ["", "## Not tested here", "", "| published | why |", "|---|---|"]
    lines += [f"| {what} | {why} |" for what, why in UNTESTABLE.items()]
    lines += ["", "## Changes of the plan, before the runs", "", *(f"- {change}" for change in CHANGES)]
    lines += ["", "## Costs", "", "| table | device | planned | runs done |", "|---|---|---|---|"]
    for one in found:
        plan = RunPlan([one.table])
        planned = format_duration(sum(job.seconds for job in plan.jobs.values()))
        device = "CPU" if one.table.device == "cpu" else "GPU"
        lines.append(f"| `{one.table.name}` | {device} | {planned} | {one.runs_done} of {one.runs} |")
    return "\n".join(lines) + "\n"


def add_runs(source: Path) -> None:
    """Add the finished runs of the papers' tables from another runs.jsonl, without settings and paths."""
    keys = set(RunPlan([read_table(name) for name in table_names()]).jobs)
    lines = {line["key"]: line for line in [*read_lines(LINES), *read_lines(source)] if line["key"] in keys}
    kept = [{name: line[name] for name in KEPT if name in line} for line in lines.values()]
    LINES.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), encoding="utf-8")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        add_runs(Path(given))
    for page, content in pages().items():
        (FOLDER / page).write_text(content, encoding="utf-8")
