"""`bertsmith fit`: a model and a budget → the best artefact that meets it on this machine."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bertsmith.bundled import model_text
from bertsmith.checkpoint.source import replace_source
from bertsmith.errors import InputError
from bertsmith.report.fit import render_fit_card, render_fit_page
from bertsmith.report.page import format_megabytes
from bertsmith.runs.folder import RECIPE, RunFolder, read_recipe_file
from bertsmith.runs.output import MARK, REPORT, clear, write_answers
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

CANDIDATES = ".candidates"  # artefacts that are being measured
CARD = "card.md"


@dataclass(frozen=True, kw_only=True)
class FitResult(OneShotResult):
    """Result of a search for a budget; exit code 1 if no candidate meets it."""

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
        """Return the content of result.json; candidates.jsonl has the candidates."""
        rows = self.outcome.candidates
        counts = {"candidates": len(rows), "measured": sum(row.is_measured for row in rows)}
        return {**super().to_json(), **counts}


def fit(
    model: str | Path | None = None,
    *,
    data: str | None = None,
    out: Path,
    latency_ms: float | None = None,
    percentile: int | None = None,
    length: list[int] | None = None,
    batch: int | None = None,
    threads: int | None = None,
    size_mb: float | None = None,
    memory_mb: float | None = None,
    at_least: float | None = None,
    prefer: Literal["fast", "small"] | None = None,
    engine: list[str] | None = None,
    precision: list[str] | None = None,
    subnets: Literal["even", "layers"] | None = None,
    vocabulary: Literal["keep", "cut", "auto"] | None = None,
    split: str | None = None,
    set: list[str] | None = None,
    measurements: Path | None = None,
    fresh: bool = False,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> FitResult | Explanation:
    """Find the best model that meets a budget on this machine, by measurements on this machine.

    Parameters
    ----------
    model
        The folder of a fine-tuned model, best an elastic one (bertsmith shrink).
    data
        A folder with a dev part, and best a train part, as for bertsmith evaluate.
    out
        The folder to write: an artefact ready to serve, card.md, report.html, result.json, candidates.jsonl and
        measurements.jsonl. If nothing meets the budget there is no artefact, and the exit code is 1.
    latency_ms
        Milliseconds that an answer may take, from token ids to the output of the head.
    percentile
        The percentile of latencies that must meet the limit: 50 or 95; 95 if not given.
    length
        Tokens of the timed sequences; may be given several times. By default lengths are those of the data.
    batch
        Sequences of a batch; 1 if not given.
    threads
        Threads to compute with; all cores if not given.
    size_mb
        Megabytes (of 1,000,000 bytes) of all files that are needed to answer.
    memory_mb
        Megabytes of peak memory of a fresh process that answers, everything included.
    at_least
        The lowest allowed score on dev: then the fastest model that reaches it is chosen.
    prefer
        With at_least: choose the fastest model, or the smallest.
    engine
        Engines that may run the model: torch, compiled, onnxruntime; may be given several times. All if not given.
    precision
        Precisions: float32, bfloat16, int8, int8_static, int8_weights; may be given several times.
    subnets
        Even widths and depths alone, or also unequal layers; the latter if the model is elastic.
    vocabulary
        Whether to drop pieces that the training texts do not use; "auto" does so if nothing else is small enough.
    split
        The split of the data that candidates are scored on; dev if not given.
    set
        One setting, such as measure.repeats=10 or search.generations=12; may be given several times.
    measurements
        Measurements of another fit, a file or its folder; those of earlier fits on this machine are always used.
    fresh
        Measure everything again.
    explain
        Print the settings and what would be measured, then stop.
    resume
        Resume the search in --out, with its own budget unless another one is given.
    force
        Replace the content of --out.
    """
    out = Path(out)
    plain = dict(read_recipe_file(None, out if resume else None) or {})
    given: Plain = {
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
    top = {"data": data and str(data), "split": split, "prefer": prefer}
    plain |= {name: value for name, value in top.items() if value is not None}
    if model is not None:
        plain["model"] = replace_source(plain.get("model"), model_text(model))
    for group, values in given.items():
        plain[group] = {
            **plain.get(group, {}),
            **{name: value for name, value in values.items() if value is not None},
        }
    if "model" not in plain:
        raise InputError("MODEL is not given; give the folder of a fine-tuned model")
    if "data" not in plain:
        raise InputError("--data is not given; give a folder with a dev part")
    settings = FitSettings.parse(override(plain, set or []), source="fit")
    if explain:
        return explain_fit(settings)
    return run_fit(settings, out, measurements=measurements, fresh=fresh, resume=resume, force=force)


def run_fit(
    settings: FitSettings, out: Path, *, measurements: Path | None, fresh: bool, resume: bool, force: bool
) -> FitResult:
    """Search, and leave the artefact with its card, page, candidates and result in `out`."""
    start = time.perf_counter()
    given = [] if measurements is None else [earlier_file(Path(measurements))]
    earlier = given if fresh else [cache_file(), *given]
    data = [Path(settings.data)] if Path(settings.data).exists() else []
    with RunFolder(out, inputs=[settings.model.path, *data, *given], resume=resume, force=force) as run:
        inputs = prepare(settings)  # bad input raises before anything is written
        run.claim()
        if resume:
            clear(out, keep=(MEASUREMENTS, RECIPE, MARK))
        (out / RECIPE).write_text(to_toml(settings.plain()), encoding="utf-8")
        store = Measurements(out / MEASUREMENTS, earlier, copies=[cache_file()])
        work = out / CANDIDATES
        work.mkdir(exist_ok=True)
        _print_notices(inputs.notices)
        with _progress() as watch:
            found = FitSearch(inputs, store, work, measurer=measure.in_fresh_process, watch=watch).run()
        outcome, name = summarise_search(found), out.resolve().name
        if found.folder is not None:
            for path in found.folder.iterdir():
                (shutil.copytree if path.is_dir() else shutil.copyfile)(path, out / path.name)
            (out / CARD).write_text(render_fit_card(outcome, name), encoding="utf-8")
        (out / REPORT).write_text(render_fit_page(outcome, name), encoding="utf-8")
        write_answers(out / "candidates.jsonl", to_json(outcome.candidates))
        result = run.finish(FitResult(outcome=outcome, seconds=round(time.perf_counter() - start, 1)))
        shutil.rmtree(work, ignore_errors=True)
        _print_notices(outcome.notices[len(inputs.notices) :])
        _print_outcome(outcome, out)
        return result


def explain_fit(settings: FitSettings) -> Explanation:
    """Print the settings and what would be measured."""
    inputs = prepare(settings)
    estimates = Estimates(inputs.model, settings.budget.percentile)
    stacks = table_stacks([shape for subnet in inputs.grid for shape in estimates.shapes(subnet)])
    search, repeats, conditions = settings.search, settings.measure.repeats, inputs.conditions
    evolved = search.population + search.generations * (search.population // 2)
    scored, scorer = settings.measure.finalists, inputs.scorer
    facts = {
        "budget": settings.budget.description,
        "sub-networks": f"{len(inputs.grid)}: " + "; ".join(map(describe_subnet, inputs.grid)),
        "with unequal layers": f"up to {evolved} more are scored" if inputs.evolves else "none",
        "run modes": ", ".join(mode.description for mode in inputs.run_modes),
        "scored on": f"{len(scorer.ranking_examples):,} of {len(scorer.examples):,} examples, finalists on all",
        "small networks timed": f"{len(stacks)} for each run mode, {settings.measure.table_runs} calls each",
        "sequences": "; ".join(f"{load.name}: {_range(load.lengths)} tokens" for load in conditions.workloads)
        + f"; {conditions.batch} at a time, {conditions.layout}, {conditions.threads} threads",
        "finalists": f"about {scored}, each in {repeats} to {2 * repeats} fresh processes of {settings.measure.runs} "
        "calls",
    }
    facts |= {f"note {number}": notice for number, notice in enumerate(inputs.notices, 1)}
    return print_explanation(settings, facts)


def _print_notices(notices: Sequence[str]) -> None:
    for notice in notices:
        print_plain(f"note: {notice}")


def _print_outcome(outcome: FitOutcome, out: Path) -> None:
    """Print the Pareto front as a table, and the chosen or the nearest candidate in one line."""
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
        print_plain("~ estimated from the table of layers")
    print_plain(outcome_line(outcome, out))


def outcome_line(outcome: FitOutcome, out: Path) -> str:
    """Describe the outcome of a search in one sentence."""
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
            f"written to {out}: see card.md and report.html"
        )
    missed = "; ".join(miss.words for miss in outcome.misses) or "not in every measurement"
    return (
        f"nothing meets {outcome.budget}: the nearest is {row.words} with {missed}; {out}/report.html shows all "
        "candidates"
    )


def _range(lengths: Sequence[int]) -> str:
    return str(lengths[0]) if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"


@contextmanager
def _progress() -> Iterator[Watch]:
    """Show a progress bar on a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("fit", total=None)

        def watch(description: str, done: int, total: int) -> None:
            progress.update(bar, description=description, completed=done, total=total)

        yield watch
