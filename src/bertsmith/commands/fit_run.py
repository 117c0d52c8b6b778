"""The search for a budget as a command: its folder, its progress, what it leaves."""

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.bundled import model_folder
from bertsmith.commands.run import RECIPE, print_explanation
from bertsmith.report.page import format_megabytes
from bertsmith.runs.output import MARK, check_out, claim, clear, write_answers, write_result

if TYPE_CHECKING:
    from rich.console import Console

    from bertsmith.shrinking.fit.finals import Watch
    from bertsmith.shrinking.fit.search import Fitted
    from bertsmith.shrinking.fit.settings import FitSettings

WORK = ".candidates"  # artefacts that are being measured
FRONT = "What nothing else beats in score and latency"


def run_fit(
    settings: "FitSettings", out: Path, *, measurements: Path | None, fresh: bool, resume: bool, force: bool
) -> dict[str, Any]:
    """Searches, and returns the figures; `fits` says whether anything keeps the budget."""
    from rich.console import Console

    from bertsmith.shrinking.fit import measure
    from bertsmith.shrinking.fit.result import fit_figures
    from bertsmith.shrinking.fit.search import Search, prepare
    from bertsmith.shrinking.fit.store import MEASUREMENTS, Measurements, cache_file, earlier_file
    from bertsmith.toml import to_toml

    begin = time.perf_counter()
    given = [] if measurements is None else [earlier_file(Path(measurements))]
    earlier = given if fresh else [cache_file(), *given]
    inputs = [model_folder(settings.model), *([Path(settings.data)] if Path(settings.data).exists() else []), *given]
    if not resume:
        check_out(out, force, *inputs)
    prepared = prepare(settings)  # what is wrong with the input must cost no folder
    if resume:
        clear(out, keep=(MEASUREMENTS, RECIPE, MARK))
    else:
        claim(out, force, *inputs)
    (out / RECIPE).write_text(to_toml(settings.plain()), encoding="utf-8")
    store = Measurements(out / MEASUREMENTS, earlier, copies=[cache_file()])
    work = out / WORK
    work.mkdir(exist_ok=True)
    console = Console()
    for notice in prepared.notices:
        console.print(f"note: {notice}", markup=False, highlight=False, soft_wrap=True)
    with _progress() as watch:
        search = Search(prepared, store, work, measurer=measure.in_fresh_process, watch=watch)
        found = search.run()
    figures = fit_figures(found)
    figures["seconds"] = round(time.perf_counter() - begin, 1)
    _leave(found, figures, out)
    shutil.rmtree(work, ignore_errors=True)
    for notice in found.notices[len(prepared.notices) :]:
        console.print(f"note: {notice}", markup=False, highlight=False, soft_wrap=True)
    _print(figures, out, console)
    return figures


def explain_fit(settings: "FitSettings") -> dict[str, Any]:
    """Prints the settings and what would be measured; returns the latter."""
    from bertsmith.shrinking.fit.candidates import Estimates, subnet_words
    from bertsmith.shrinking.fit.search import prepare
    from bertsmith.shrinking.fit.table import table_stacks

    prepared = prepare(settings)
    estimates = Estimates(prepared.model, settings.budget.percentile)
    kinds = [kind for subnet in prepared.grid for kind in estimates.kinds(subnet)]
    stacks, conditions = table_stacks(kinds), prepared.conditions
    search = settings.search
    evolved = search.population + search.generations * (search.population // 2)
    facts = {
        "budget": settings.budget.words,
        "sub-networks": f"{len(prepared.grid)}: " + "; ".join(map(subnet_words, prepared.grid)),
        "with layers that differ": f"up to {evolved} more are scored" if prepared.evolves else "none",
        "ways to run them": ", ".join(way.words for way in prepared.ways),
        "scored on": f"{len(prepared.quality.some):,} of {len(prepared.quality.examples):,} examples, finalists on all",
        "small networks timed": f"{len(stacks)} for each way, {settings.measure.table_runs} calls each",
        "sequences": "; ".join(f"{load.name}: {_shortened(load.lengths)} tokens" for load in conditions.workloads)
        + f"; {conditions.batch} at a time, {conditions.layout}, {conditions.threads} threads",
        "finalists": f"about {settings.measure.finalists}, each in {settings.measure.repeats} to "
        f"{2 * settings.measure.repeats} fresh processes of {settings.measure.runs} calls",
    }
    for number, notice in enumerate(prepared.notices, 1):
        facts[f"note {number}"] = notice
    return print_explanation(settings, facts)


def _leave(found: "Fitted", figures: dict[str, Any], out: Path) -> None:
    """Puts the artefact and all that tells of it into the folder; result.json comes last."""
    from bertsmith.report.fit import render_fit_card, render_fit_page

    if found.folder is not None:
        for path in found.folder.iterdir():
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, out / path.name)
        (out / "card.md").write_text(render_fit_card(figures, out.resolve().name), encoding="utf-8")
    (out / "report.html").write_text(render_fit_page(figures, out.resolve().name), encoding="utf-8")
    rows = figures["candidates"]
    write_answers(out / "candidates.jsonl", rows)
    write_result(out, {**figures, "candidates": len(rows), "measured": sum(row["is_measured"] for row in rows)})


def _print(figures: Mapping[str, Any], out: Path, console: "Console") -> None:
    """The front as a table, and one line with the winner or with what came nearest."""
    from rich.table import Table

    percentile = figures["limits"].get("percentile", 95)
    table = Table(title=FRONT, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "network", "run by", figures["metric"], f"p{percentile} ms", "MB", "memory MB"):
        table.add_column(heading, justify="left" if heading in ("", "network", "run by") else "right")
    for row in sorted(figures["candidates"], key=lambda row: row["latency_ms"]):
        if row["on_front"] or row["is_chosen"]:
            table.add_row("→" if row["is_chosen"] else "", *_cells(row))
    console.print(table)
    estimated = any(row["on_front"] and not row["is_measured"] for row in figures["candidates"])
    if estimated:
        console.print("~ estimated from the table of layers", highlight=False)
    console.print(verdict_line(figures, out), markup=False, highlight=False, soft_wrap=True)


def verdict_line(figures: Mapping[str, Any], out: Path) -> str:
    """What the search came to, in one sentence."""
    row = figures["chosen"] or figures["nearest"]
    percentile = figures["limits"].get("percentile", 95)
    size, memory = format_megabytes(row["size_mb"]), f"{row['memory_mb']:.0f}"
    costs = f"p{percentile} {row['latency_ms']:.2f} ms, {size} MB, memory {memory} MB"
    if figures["fits"]:
        low_high = figures.get("interval")
        interval = f" (95 % interval {low_high[0]:.1f} to {low_high[1]:.1f})" if low_high else ""
        return (
            f"{row['words']} keeps {figures['budget']}: {figures['metric']} {figures['score']:.2f}{interval}, {costs}; "
            f"written to {out}: card.md and report.html tell more"
        )
    missed = "; ".join(miss["words"] for miss in figures["misses"]) or "not every time it was measured"
    return (
        f"nothing keeps {figures['budget']}: nearest came {row['words']} with {missed}; {out}/report.html shows all "
        "candidates"
    )


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    about = "" if row["is_measured"] else "~"
    memory = f"{row['memory_mb']:.0f}" if row["is_measured"] else ""
    cut = ", cut vocabulary" if row["vocabulary"] == "cut" else ""
    run_by = f"{row['engine']} {row['precision']}{cut}"
    return (
        row["network"],
        run_by,
        f"{row['score']:.2f}",
        f"{about}{row['latency_ms']:.2f}",
        format_megabytes(row["size_mb"]),
        memory,
    )


def _shortened(lengths: Sequence[int]) -> str:
    return str(lengths[0]) if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"


@contextmanager
def _progress() -> Iterator["Watch"]:
    """Shows a bar for what is being done, gone when all is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("fit", total=None)

        def watch(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        yield watch
