"""`bertsmith fit`: find the best artefact of a model that meets a budget on this machine."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bertsmith.bundled import model_text
from bertsmith.checkpoint.source import replace_source
from bertsmith.errors import InputError
from bertsmith.files import clear, write_text
from bertsmith.report.fit import render_fit_card, render_fit_page
from bertsmith.report.page import format_megabytes
from bertsmith.runs.flags import DataFlag, ForceFlag, OutFlag, SetFlag, flag_group
from bertsmith.runs.folder import RECIPE, RunFolder, read_recipe_file
from bertsmith.runs.output import MARK, REPORT, write_answers
from bertsmith.runs.result import Explanation, OneShotResult, print_explanation, print_plain, spread, to_json
from bertsmith.settings import Plain
from bertsmith.shrinking.fit import measure
from bertsmith.shrinking.fit.candidates import Estimates, describe_subnet
from bertsmith.shrinking.fit.finals import Watch
from bertsmith.shrinking.fit.result import CandidateResult, FitOutcome, summarise_search
from bertsmith.shrinking.fit.search import FitSearch, prepare
from bertsmith.shrinking.fit.settings import FitSettings
from bertsmith.shrinking.fit.store import MEASUREMENTS, Measurements, cache_file, earlier_file
from bertsmith.shrinking.fit.table import table_stacks
from bertsmith.toml import override, to_toml

CANDIDATES = ".candidates"  # temporary folder of the artefacts to measure
CARD = "card.md"
LINE_SECONDS = 30.0
"""Seconds between two lines of progress off a terminal."""
BUDGET, SEARCH, MEASUREMENTS_GROUP = flag_group("Budget"), flag_group("Search"), flag_group("Measurements")


@dataclass(frozen=True, kw_only=True)
class FitResult(OneShotResult):
    """Result of a search; the exit code is 1 if no candidate meets the budget."""

    outcome: FitOutcome = spread()
    seconds: float

    @property
    def fits(self) -> bool:
        return self.outcome.fits

    @property
    def chosen(self) -> CandidateResult | None:
        return self.outcome.chosen

    @property
    def candidates(self) -> tuple[CandidateResult, ...]:
        return self.outcome.candidates

    @property
    def exit_code(self) -> int:
        """1 if no candidate meets the budget."""
        return 0 if self.outcome.fits else 1

    def to_json(self) -> Plain:
        """Return the content of result.json; the candidates are in candidates.jsonl."""
        rows = self.outcome.candidates
        counts = {"candidates": len(rows), "measured": sum(row.is_measured for row in rows)}
        return {**super().to_json(), **counts}


def fit(
    model: str | Path | None = None,
    *,
    data: DataFlag[str | None] = None,
    out: OutFlag[Path],
    latency_ms: Annotated[float | None, BUDGET] = None,
    percentile: Annotated[int | None, BUDGET] = None,
    length: Annotated[list[int] | None, BUDGET] = None,
    batch: Annotated[int | None, BUDGET] = None,
    threads: Annotated[int | None, BUDGET] = None,
    size_mb: Annotated[float | None, BUDGET] = None,
    memory_mb: Annotated[float | None, BUDGET] = None,
    at_least: Annotated[float | None, BUDGET] = None,
    prefer: Annotated[Literal["fast", "small"] | None, BUDGET] = None,
    engine: Annotated[list[str] | None, SEARCH] = None,
    precision: Annotated[list[str] | None, SEARCH] = None,
    subnets: Annotated[Literal["even", "layers"] | None, SEARCH] = None,
    vocabulary: Annotated[Literal["keep", "cut", "auto"] | None, SEARCH] = None,
    split: Annotated[str | None, SEARCH] = None,
    column: Annotated[list[str] | None, SEARCH] = None,
    set: SetFlag = None,
    measurements: Annotated[Path | None, MEASUREMENTS_GROUP] = None,
    fresh: Annotated[bool, MEASUREMENTS_GROUP] = False,
    explain: bool = False,
    resume: bool = False,
    force: ForceFlag = False,
) -> FitResult | Explanation:
    """Find the best variant of a model that meets a latency, size or memory budget on this machine.

    Candidates are combinations of a sub-network, an engine, a precision and a vocabulary. They are scored on dev and
    measured on this machine; the best one that meets the budget is written to --out.

    Parameters
    ----------
    model
        Folder of a fine-tuned model, ours or Hugging Face's, preferably an elastic one (bertsmith shrink).
    data
        Data of its task, as for bertsmith evaluate: a dev split, and preferably a train split.
    out
        Output folder: the chosen artefact, ready to serve, card.md, report.html, result.json, candidates.jsonl and
        measurements.jsonl. If nothing meets the budget, no artefact is written and the exit code is 1.
    latency_ms
        Maximum latency of a batch in milliseconds, from token ids to the output of the head.
    percentile
        Latency percentile that must meet the limit: 50 or 95; 95 by default.
    length
        Length of the timed sequences in tokens; repeatable. The lengths in the data by default.
    batch
        Sequences per batch; 1 by default.
    threads
        Number of CPU threads; all cores by default.
    size_mb
        Maximum size of all files needed for inference, in megabytes (1,000,000 bytes).
    memory_mb
        Maximum peak memory of an inference process, in megabytes.
    at_least
        Minimum score on dev; the fastest model that reaches it is chosen.
    prefer
        With --at-least: choose the fastest or the smallest model; "fast" by default.
    engine
        Engine to consider: torch, compiled or onnxruntime; repeatable. All by default.
    precision
        Precision to consider: float32, bfloat16, float16, int8, int8_static or int8_weights; repeatable. All except
        float16 by default, which halves an ONNX file but is not faster on a CPU.
    subnets
        "even": the same width in all layers; "layers": also different widths per layer, the default for an elastic
        model.
    vocabulary
        "cut" removes tokens that do not occur in the training texts; "auto" does so only if no other candidate is
        small enough.
    split
        Split that candidates are scored on; dev by default.
    column
        Name of a column if it differs from the training data, for example label=stars; repeatable.
    set
        Override a setting, for example measure.repeats=10 or search.generations=12; repeatable.
    measurements
        Reuse the measurements of another fit: a file, or its output folder. Earlier measurements on this machine are
        reused anyway.
    fresh
        Measure everything again.
    explain
        Print the settings and the planned measurements; do not search.
    resume
        Resume the search in --out, with its own budget unless you give another one.
    force
        Replace the contents of --out.
    """
    out = Path(out)
    plain = dict(read_recipe_file(None, out if resume else None) or {})
    groups: Plain = {
        "budget": {
            "latency_ms": latency_ms,
            "percentile": percentile,
            "lengths": length,
            "batch": batch,
            "threads": threads,
            "size_mb": size_mb,
            "memory_mb": memory_mb,
            "at_least": at_least,
        },
        "search": {"engines": engine, "precisions": precision, "subnets": subnets, "vocabulary": vocabulary},
    }
    top = {"data": data and str(data), "split": split, "columns": column, "prefer": prefer}
    plain |= {name: value for name, value in top.items() if value is not None}
    if model is not None:
        plain["model"] = replace_source(plain.get("model"), model_text(model))
    for group, values in groups.items():
        plain[group] = {
            **plain.get(group, {}),
            **{name: value for name, value in values.items() if value is not None},
        }
    if "model" not in plain:
        raise InputError("MODEL is not given; give the folder of a fine-tuned model")
    if "data" not in plain:
        raise InputError("--data is not given; give a folder with a dev split")
    settings = FitSettings.parse(override(plain, set or []), source="fit")
    if explain:
        return explain_fit(settings)
    return run_fit(settings, out, measurements=measurements, fresh=fresh, resume=resume, force=force)


def run_fit(
    settings: FitSettings, out: Path, *, measurements: Path | None, fresh: bool, resume: bool, force: bool
) -> FitResult:
    """Search; write the artefact, its card, the report, the candidates and the result to `out`."""
    start = time.perf_counter()
    other = [] if measurements is None else [earlier_file(Path(measurements))]
    earlier = other if fresh else [cache_file(), *other]
    data = [Path(settings.data)] if Path(settings.data).exists() else []
    with RunFolder(out, inputs=[settings.model.path, *data, *other], resume=resume, force=force) as run:
        inputs = prepare(settings)  # bad input raises before anything is written
        run.claim()
        if resume:
            clear(out, keep=(MEASUREMENTS, RECIPE, MARK))
        write_text(out / RECIPE, to_toml(settings.plain()))
        store = Measurements(out / MEASUREMENTS, earlier, copies=[cache_file()])
        work = out / CANDIDATES
        work.mkdir(exist_ok=True)
        _print_notices(inputs.notices)
        with _progress() as watch:
            search = FitSearch(inputs, store, work, measurer=measure.in_fresh_process, watch=watch).run()
        outcome, name = summarise_search(search), out.resolve().name
        if search.folder is not None:
            for path in search.folder.iterdir():
                (shutil.copytree if path.is_dir() else shutil.copyfile)(path, out / path.name)
            (out / CARD).write_text(render_fit_card(outcome, name), encoding="utf-8")
        (out / REPORT).write_text(render_fit_page(outcome, name), encoding="utf-8")
        write_answers(out / "candidates.jsonl", to_json(outcome.candidates))
        shutil.rmtree(work, ignore_errors=True)
        result = run.finish(FitResult(outcome=outcome, seconds=round(time.perf_counter() - start, 1)))
        _print_notices(outcome.notices[len(inputs.notices) :])
        _print_outcome(outcome, out)
        return result


def explain_fit(settings: FitSettings) -> Explanation:
    """Print the settings and the planned measurements."""
    inputs = prepare(settings)
    estimates = Estimates(inputs.model, settings.budget.percentile)
    stacks = table_stacks([shape for subnet in inputs.grid for shape in estimates.shapes(subnet)])
    search, repeats, conditions = settings.search, settings.measure.repeats, inputs.conditions
    evolved = search.population + search.generations * (search.population // 2)
    scored, scorer = settings.measure.finalists, inputs.scorer
    facts = {
        "budget": settings.budget.description,
        "sub-networks": f"{len(inputs.grid)}: " + "; ".join(map(describe_subnet, inputs.grid)),
        "unequal layers": f"up to {evolved} more sub-networks are scored" if inputs.evolves else "not searched",
        "run modes": ", ".join(mode.description for mode in inputs.run_modes),
        "scored on": f"{len(scorer.ranking_examples):,} of {len(scorer.examples):,} examples, finalists on all",
        "small networks timed": f"{len(stacks)} per run mode, {settings.measure.table_runs} calls each",
        "sequences": "; ".join(f"{load.name}: {_range(load.lengths)} tokens" for load in conditions.workloads)
        + f"; batch {conditions.batch}, {conditions.layout}, {conditions.threads} threads",
        "finalists": f"about {scored}, each in {repeats} to {2 * repeats} fresh processes of {settings.measure.runs} "
        "calls",
    }
    facts |= {f"note {number}": notice for number, notice in enumerate(inputs.notices, 1)}
    return print_explanation(settings, facts)


def _print_notices(notices: Sequence[str]) -> None:
    for notice in notices:
        print_plain(f"note: {notice}")


def _print_outcome(outcome: FitOutcome, out: Path) -> None:
    """Print the Pareto front as a table and the chosen or nearest candidate."""
    table = Table(title="Pareto front of score and latency", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "network", "run by", outcome.metric, f"p{outcome.limit.percentile} ms", "MB", "memory MB"):
        table.add_column(heading, justify="left" if heading in ("", "network", "run by") else "right")
    shown = [row for row in outcome.candidates if row.on_front or row.is_chosen]
    for row in sorted(shown, key=lambda row: row.latency_ms):
        estimate = "" if row.is_measured else "~"
        cut = ", cut vocabulary" if row.vocabulary == "cut" else ""
        table.add_row(
            "→" if row.is_chosen else "",
            row.network,
            f"{row.engine} {row.precision}{cut}",
            f"{row.score:.2f}",
            f"{estimate}{row.latency_ms:.2f}",
            format_megabytes(row.size_mb),
            f"{row.memory_mb:.0f}" if row.is_measured else "",
        )
    Console().print(table)
    if any(row.on_front and not row.is_measured for row in outcome.candidates):
        print_plain("~ estimated from measured layer latencies")
    print_plain(outcome_line(outcome, out))


def outcome_line(outcome: FitOutcome, out: Path) -> str:
    """Return one sentence about the chosen candidate, or about the nearest one if nothing meets the budget."""
    row = outcome.best
    if outcome.fits:
        interval = outcome.interval
        spread = f" (95 % interval {interval[0]:.1f} to {interval[1]:.1f})" if interval else ""
        costs = (
            f"p{outcome.limit.percentile} {row.latency_ms:.2f} ms, {format_megabytes(row.size_mb)} MB, "
            f"memory {row.memory_mb:.0f} MB"
        )
        return (
            f"{row.words} meets {outcome.budget}: {outcome.metric} {outcome.score:.2f}{spread}, {costs}; "
            f"written to {out}, see card.md and report.html"
        )
    missed = "; ".join(miss.words for miss in outcome.misses) or "not in every measurement"
    return (
        f"no candidate meets {outcome.budget}; the nearest is {row.words} with {missed}; {out}/report.html shows all "
        "candidates"
    )


def _range(lengths: Sequence[int]) -> str:
    return str(lengths[0]) if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"


@contextmanager
def _progress() -> Iterator[Watch]:
    """Show a progress bar with the remaining time of each stage; off a terminal, print a line at least every 30 s."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    bars = Progress(*columns, TimeRemainingColumn(), transient=True, console=console, disable=not console.is_terminal)
    stage, printed_at = "", 0.0
    with bars as progress:
        bar = progress.add_task("fit", total=None)

        def watch(description: str, done: int, total: int) -> None:
            nonlocal stage, printed_at
            if description != stage:
                progress.reset(bar)  # the remaining time is that of the stage
            progress.update(bar, description=description, completed=done, total=total)
            now = time.monotonic()
            if not console.is_terminal and (description != stage or now - printed_at >= LINE_SECONDS):
                console.print(f"fit: {description} {done}/{total}", highlight=False, markup=False, soft_wrap=True)
                printed_at = now
            stage = description

        yield watch
