"""Fine-tune with several seeds and learning rates, and keep the best model."""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table

from bertsmith.checkpoint.masks import MASKS_FILE
from bertsmith.data.devices import device_type
from bertsmith.data.executor import open_executor
from bertsmith.errors import InputError
from bertsmith.files import SEAL, read_json, read_text, sealed_files, write_seal, write_text
from bertsmith.models.model import Model
from bertsmith.report.finetuning import SeedRun
from bertsmith.runs.finetuning import (
    DEGENERATE,
    FinetuneResult,
    PredictingResult,
    input_paths,
    read_finetune_result,
    run_finetuning,
    write_finetuning_page,
)
from bertsmith.runs.folder import RECIPE, RunFolder, finished_result
from bertsmith.runs.output import MARK, RESULT, write_result
from bertsmith.runs.result import Result, StoppedRun, print_plain
from bertsmith.settings import Record
from bertsmith.tasks.data_source import Tables
from bertsmith.tasks.predictor import TASK_FILE, Predictor
from bertsmith.training.finetuning import AnySettings, FinetuneSettings, read_data
from bertsmith.training.log import LOG, read_log
from bertsmith.training.run_config import process_state

SEARCH = "search.json"
MODEL_FILES = ("model.safetensors", MASKS_FILE, "config.json", "tokenizer.json", "tokenizer_config.json", TASK_FILE)
NOTE = (
    "score is the mean over seeds at the best learning rate. This rate and the best run, whose model is saved here, "
    "were chosen on dev, so the score of the best run is optimistic"
)


class SearchPlan(Record):
    """Seeds and learning rates; every combination is one run."""

    seeds: tuple[int, ...] = Field(min_length=1)
    learning_rates: tuple[float, ...] = Field(min_length=1)

    def runs(self) -> dict[str, tuple[int, float]]:
        """Return seed and learning rate of every run, by the name of its folder."""
        has_one_rate = len(self.learning_rates) == 1
        return {
            f"seed-{seed}" if has_one_rate else f"lr-{rate:g}-seed-{seed}": (seed, rate)
            for rate in self.learning_rates
            for seed in self.seeds
        }

    def temporary(self, settings: AnySettings) -> list[str]:
        """Return the files of the runs that a finished search does not need: it has a copy of the best model."""
        keeps_checkpoints = not isinstance(settings, FinetuneSettings)
        names = (*MODEL_FILES, *(() if keeps_checkpoints else ("checkpoints",)))
        return [f"{run}/{name}" for run in self.runs() for name in names]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Distribution of the scores of several runs; `std` is the sample standard deviation (0 for a single run)."""

    runs: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    median: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, scores: Sequence[float]) -> "Spread":
        if not scores:
            return cls(runs=0)
        return cls(
            runs=len(scores),
            mean=statistics.fmean(scores),
            std=statistics.stdev(scores) if len(scores) > 1 else 0.0,
            min=min(scores),
            median=statistics.median(scores),
            max=max(scores),
        )


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run of a search; a failed run has no score."""

    seed: int
    learning_rate: float
    score: float | None = None
    best_step: int | None = None
    steps: int | None = None
    is_degenerate: bool | None = None
    failed: str | None = None
    """Error message of a failed run."""


@dataclass(frozen=True, kw_only=True)
class BestRun:
    """The run whose model is saved in the output folder."""

    run: str
    score: float
    seed: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class FailedRun(Result):
    """A run whose loss became NaN."""

    failed: str
    seed: int
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class SearchResult(PredictingResult):
    """Result of a search; the score is the mean over seeds at the best learning rate."""

    metric: str
    score: float
    learning_rate: float
    mean: float
    std: float
    min: float
    median: float
    max: float
    best: BestRun
    note: str
    learning_rates: dict[str, Spread]
    runs: dict[str, RunSummary]
    steps: int


def find_search(
    seeds: int | None, rates: Sequence[float] | None, settings: AnySettings, earlier: Path | None
) -> SearchPlan | None:
    """Return the search set by the flags or stored in the folder to resume; None for a single run."""
    stored = None
    if earlier is not None and (earlier / SEARCH).is_file():
        stored = SearchPlan.parse(read_json(earlier / SEARCH), source=str(earlier / SEARCH))
    if seeds is None and not rates:
        return stored
    for name, values in (("--seeds", [] if seeds is None else [seeds]), ("--learning-rates", rates or [])):
        if any(value <= 0 for value in values):
            raise InputError(f"{name} is {min(values)}; allowed: above 0")
    if rates and len(set(rates)) < len(rates):
        raise InputError(f"--learning-rates are {', '.join(map(str, rates))}; each may be given only once")
    first = settings.run.seed if stored is None else stored.seeds[0]
    search = SearchPlan(
        seeds=tuple(range(first, first + (seeds or 1))),
        learning_rates=tuple(rates or [settings.optimizer.learning_rate]),
    )
    if earlier is not None and search != stored:
        raise InputError(f"--resume: {str(earlier)!r} was started with other seeds or learning rates; omit these flags")
    return search


def run_search(
    search: SearchPlan,
    settings: AnySettings,
    tables: Tables,
    out: Path | None,
    *,
    start: Model | None,
    device: str,
    resume: bool,
    force: bool,
    ray: str | None = None,
) -> SearchResult | StoppedRun:
    """Fine-tune with every seed and learning rate, in turn or on a Ray cluster; keep the best model."""
    if out is None:
        raise InputError("--out is not given; --seeds and --learning-rates write every run to a folder in it")
    if process_state(device).num_processes > 1:
        raise InputError(
            "--seeds and --learning-rates run in one process; with several processes, start one run per --seed"
        )
    with RunFolder(
        out,
        settings,
        inputs=input_paths(settings, start),
        resume=resume,
        force=force,
        device=device,
        temporary=search.temporary(settings),
    ) as run:
        if not resume:
            read_data(settings, *tables)  # bad rows raise before anything is written
        run.claim(files={SEARCH: search.plain()})
        runs = search.runs()
        jobs = [
            SearchJob(f"{name}, run {number} of {len(runs)}", _with(settings, seed, rate), out.resolve() / name, number)
            for number, (name, (seed, rate)) in enumerate(runs.items(), start=1)
            if finished_result(out / name) is None
        ]
        threads, is_gpu = torch.get_num_threads(), device_type(device) == "cuda"
        worker = partial(SearchWorker, tables, start, device, resume, threads)
        with open_executor(worker, ray=ray, cores=threads, gpus=int(is_gpu)) as executor:
            for job, steps in executor.results(jobs):
                if steps is not None:
                    return StoppedRun(steps=steps, stage=job.folder.name)
                _remove_worse_models(out, list(runs))
        summary = _summarise(search, out)
        best = summary.best.run
        # the recipe is replaced atomically, because --resume reads it
        others = shutil.ignore_patterns(RESULT, RECIPE, MARK, SEAL, "checkpoints")
        shutil.copytree(out / best, out, dirs_exist_ok=True, ignore=others)
        write_text(out / RECIPE, read_text(out / best / RECIPE))
        predictor = Predictor.load(out, device=device_type(device))
        _write_page(_with(settings, *runs[best]), predictor, tables, summary, out)
        _seal_without_model(out / best)
        run.finish(summary)  # removes the other copy of the best model last
        _print_result(summary, out)
        return replace(summary, predictor=predictor)


def _with(settings: AnySettings, seed: int, rate: float) -> AnySettings:
    return settings.changed(
        run=settings.run.changed(seed=seed), optimizer=settings.optimizer.changed(learning_rate=rate)
    )


class SearchJob(NamedTuple):
    """One run of a search."""

    title: str
    settings: AnySettings
    folder: Path
    number: int


class SearchWorker:
    """Runs jobs of a search, in this process or on a cluster; returns the steps of an interrupted run, else None."""

    def __init__(self, tables: Tables, start: Model | None, device: str, resume: bool, threads: int) -> None:
        self.tables, self.start, self.device, self.resume = tables, start, device, resume
        torch.set_num_threads(threads)

    def __call__(self, job: SearchJob) -> int | None:
        print_plain(job.title, style="bold")
        result = _run_one(
            job.settings,
            self.tables,
            job.folder,
            start=self.start,
            device=self.device,
            resume=self.resume and (job.folder / RECIPE).is_file(),
            prints_data=job.number == 1,
        )
        return result.steps if isinstance(result, StoppedRun) else None


def _run_one(
    settings: AnySettings,
    tables: Tables,
    folder: Path,
    *,
    start: Model | None,
    device: str,
    resume: bool,
    prints_data: bool,
) -> FinetuneResult | StoppedRun | FailedRun:
    """Fine-tune once; a NaN loss gives a FailedRun instead of an error."""
    try:
        return run_finetuning(
            settings,
            tables,
            folder,
            start=start,
            device=device,
            resume=resume,
            force=not resume,
            prints_data=prints_data,
            prints_folder=False,
        )
    except InputError as error:
        log = folder / LOG
        if not log.is_file() or '"not_finite"' not in log.read_text(encoding="utf-8"):
            raise
        result = FailedRun(failed=str(error), seed=settings.run.seed)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        write_result(folder, result.to_json())
        return result


def _scores(out: Path, runs: Sequence[str]) -> dict[str, float]:
    """Return the scores of all finished runs that did not fail."""
    results = {name: finished_result(out / name) for name in runs}
    return {name: result["score"] for name, result in results.items() if result is not None and "score" in result}


def _remove_worse_models(out: Path, runs: Sequence[str]) -> None:
    """Delete the models of all runs except the best one so far."""
    scores = _scores(out, runs)
    best = max(scores, key=lambda name: scores[name], default=None)
    for name in scores:
        if name != best:
            _remove_model(out / name)


def _remove_model(folder: Path) -> None:
    _seal_without_model(folder)
    for file in MODEL_FILES:
        (folder / file).unlink(missing_ok=True)


def _seal_without_model(folder: Path) -> None:
    write_seal(folder, sealed_files(folder) - set(MODEL_FILES))


def _summarise(search: SearchPlan, out: Path) -> SearchResult:
    """Summarise all runs from their folders."""
    runs = search.runs()
    scores = _scores(out, list(runs))
    if not scores:
        raise InputError(f"all runs in {str(out)!r} failed; try lower learning rates")
    best = max(scores, key=lambda name: scores[name])
    results = {name: finished_result(out / name) or {} for name in runs}
    by_rate = {
        rate: Spread.of([scores[name] for name, (_, run_rate) in runs.items() if run_rate == rate and name in scores])
        for rate in search.learning_rates
    }
    complete = [rate for rate, spread in by_rate.items() if spread.runs == len(search.seeds)]
    rate = max(complete or by_rate, key=lambda rate: by_rate[rate].mean or 0.0 if by_rate[rate].runs else float("-inf"))
    chosen = by_rate[rate]
    assert chosen.mean is not None
    return SearchResult(
        metric=results[best]["metric"],
        score=chosen.mean,
        learning_rate=rate,
        mean=chosen.mean,
        std=chosen.std or 0.0,
        min=chosen.min or 0.0,
        median=chosen.median or 0.0,
        max=chosen.max or 0.0,
        best=BestRun(run=best, score=scores[best], seed=runs[best][0], learning_rate=runs[best][1]),
        note=NOTE,
        learning_rates={f"{rate:g}": spread for rate, spread in by_rate.items()},
        runs={name: _summarise_run(result, *runs[name]) for name, result in results.items()},
        steps=sum(result.get("steps", 0) for result in results.values()),
    )


def _summarise_run(result: dict[str, Any], seed: int, rate: float) -> RunSummary:
    names = ("score", "best_step", "steps", "is_degenerate", "failed")
    return RunSummary(seed=seed, learning_rate=rate, **{name: result[name] for name in names if name in result})


def _write_page(settings: AnySettings, predictor: Predictor, tables: Tables, result: SearchResult, out: Path) -> None:
    """Write report.html with the predictions of the best model on dev and the scores of all runs."""
    examples = predictor.task.examples(tables.dev)
    answers = predictor.answers(examples)
    best = read_finetune_result(out / result.best.run)
    write_finetuning_page(
        settings.changed(task=predictor.task),
        examples,
        answers,
        predictor.task.evaluate(examples, answers),
        best,
        out,
        rows=read_log(out / LOG),
        notices=[*best.data["notices"], result.note],
        runs=[SeedRun(run.score, run.seed, run.learning_rate) for run in result.runs.values() if run.score is not None],
    )


def _print_result(result: SearchResult, out: Path) -> None:
    table = Table("learning rate", "runs", "mean", "± sd", "min", "median", "max", title=f"dev: {result.metric}")
    for rate, spread in result.learning_rates.items():
        values = (spread.mean, spread.std, spread.min, spread.median, spread.max)
        table.add_row(rate, str(spread.runs), *("–" if value is None else f"{value:.2f}" for value in values))
    Console().print(table)
    degenerate = [f"{name} ({run.score:.2f})" for name, run in result.runs.items() if run.is_degenerate]
    if degenerate:
        print_plain(f"{', '.join(degenerate)}: {DEGENERATE}", style="yellow")
    for name, run in result.runs.items():
        if run.failed is not None:
            print_plain(f"{name} failed: {run.failed}", style="yellow")
    best = result.best
    print_plain(
        f"mean {result.metric} {result.score:.2f} at learning rate {result.learning_rate:g}; the best model, "
        f"{best.run} with {best.score:.2f}, chosen on dev, is written to {out}, see report.html"
    )
