"""`bertsmith compare`: pre-train several recipes with equal budgets and compare their losses."""

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bertsmith.data.devices import Device, device_type
from bertsmith.data.executor import open_executor
from bertsmith.data.shards import read_manifest
from bertsmith.errors import InputError
from bertsmith.files import read_json, write_json
from bertsmith.recipes import expand_patterns
from bertsmith.report.comparison import (
    NOTE,
    ComparedRun,
    RecipeSummary,
    read_run,
    render_comparison_page,
    summarize,
    table_headings,
)
from bertsmith.runs.flags import DataFlag, ForceFlag, OutFlag, RayFlag, SetFlag
from bertsmith.runs.folder import finished_result
from bertsmith.runs.output import REPORT, RESULT, check_out, claim, lock, write_result
from bertsmith.runs.pretrain import plain_settings, run_pretraining
from bertsmith.runs.result import Result, StoppedRun, print_plain
from bertsmith.settings import Plain
from bertsmith.training.budget import Budget
from bertsmith.training.log import LOG, read_log
from bertsmith.training.pretraining import PretrainSettings, steps_for

PLAN = "comparison.json"
_NOT_PRINTED = ("parameters", "tokens", "operations")


@dataclass(frozen=True, kw_only=True)
class CompareResult(Result):
    """Held-out metrics, costs and learning curves of every recipe."""

    budget: str
    unigram_level: float | None
    recipes: dict[str, dict[str, Any]]
    """The table row of each recipe: means over seeds."""
    curves: dict[str, list[list[dict[str, float]]]]
    """Held-out metrics over time, by recipe and seed."""


def compare(
    recipes: list[str | Path],
    *,
    out: OutFlag[Path],
    budget: str,
    data: DataFlag[Path | None] = None,
    seeds: int = 1,
    evaluations: int = 20,
    set: SetFlag = None,
    device: Device = "auto",
    ray: RayFlag = None,
    resume: bool = False,
    force: ForceFlag = False,
) -> CompareResult | StoppedRun:
    """Pre-train several recipes with the same budget and compare their held-out losses.

    Writes report.html with the learning curves and prints a table of metrics and costs.

    Parameters
    ----------
    recipes
        Recipes, as for `bertsmith pretrain`: TOML files, names such as electra-small:crammed, or patterns of names such
        as 'families/*'.
    out
        Output folder: one run per recipe and seed, report.html and result.json.
    budget
        Budget of each run: "300M tokens", "1e18 flops" or "10min". A time is converted to steps once per recipe,
        by measuring its speed; all seeds of the recipe then use the same number of steps.
    data
        Corpus folder written by `bertsmith corpus`, used for all recipes.
    seeds
        Number of runs per recipe, with seeds 0, 1, …
    evaluations
        Number of held-out evaluations per run, which are the points of its curve.
    set
        Override a setting in all recipes, for example run.compile=on; repeatable.
    device
        Device to run on; "auto" uses a GPU if one is available.
    ray
        Run on a Ray cluster: its address, "auto", or "local" to start one on this machine. --out and the corpus must be
        in folders that all machines share.
    resume
        Resume an interrupted comparison in --out.
    force
        Replace the contents of --out.
    """
    out = Path(out)
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise InputError(f"compare runs in 1 process, but {processes} were started; run it without `accelerate launch`")
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}; allowed: 1 or more")
    if evaluations < 1:
        raise InputError(f"--evaluations is {evaluations}; allowed: 1 or more")
    settings = _read_settings(recipes, data, set or [])
    plan = {"budget": budget, "seeds": seeds, "evaluations": evaluations}
    plan |= {"recipes": {name: recipe.plain() for name, recipe in settings.items()}}
    if resume:
        steps = _planned_steps(out, plan)
        lock(out)
    else:
        inputs = [Path(recipe.data) for recipe in settings.values() if recipe.data is not None]
        check_out(out, force, *inputs)
        steps = {name: steps_for(recipe, Budget.parse(budget), device) for name, recipe in settings.items()}
        claim(out, force, *inputs)
        write_json(out / PLAN, {**plan, "steps": steps})
    runs: dict[str, list[ComparedRun]] = {name: [] for name in settings}
    jobs = _jobs(settings, out, steps, seeds, evaluations)
    threads, is_gpu = torch.get_num_threads(), device_type(device) == "cuda"
    make = partial(CompareWorker, device, threads)
    with open_executor(make, ray=ray, cores=threads, gpus=int(is_gpu)) as executor:
        for job, stopped_at in executor.results(jobs):
            if stopped_at is not None:
                print_plain("interrupted; continue with --resume")
                return StoppedRun(steps=stopped_at, stage=f"{job.name}, seed {job.seed}")
            runs[job.name].append(read_run(job.seed, read_json(job.folder / RESULT), read_log(job.folder / LOG)))
    summaries = summarize(runs)
    result = CompareResult(
        budget=budget,
        unigram_level=next(iter(runs.values()))[0].result.get("unigram_level"),
        recipes={name: summary.plain() for name, summary in summaries.items()},
        curves={name: [run.held_out for run in seeds] for name, seeds in runs.items()},
    )
    facts = {"budget per run": budget, "seeds": str(seeds)}
    if result.unigram_level is not None:
        facts["unigram level"] = f"{result.unigram_level:.3f}"
    page = render_comparison_page(out.name, runs, facts, result.unigram_level)
    (out / REPORT).write_text(page, encoding="utf-8")
    write_result(out, result.to_json())
    _print_table(summaries, out)
    return result


class CompareJob(NamedTuple):
    """One run of a comparison."""

    name: str
    seed: int
    settings: PretrainSettings
    folder: Path


def _jobs(
    settings: dict[str, PretrainSettings], out: Path, steps: dict[str, int], seeds: int, evaluations: int
) -> list[CompareJob]:
    """Return the runs of a comparison, seed by seed."""
    jobs: list[CompareJob] = []
    for seed in range(seeds):
        for name, recipe in settings.items():
            every = max(1, steps[name] // evaluations)
            changes = {"steps": steps[name], "seed": seed, "evaluate_every": every, "checkpoint_every": 5 * every}
            changed = recipe.changed(run=recipe.run.changed(**changes))
            jobs.append(CompareJob(name, seed, changed, out.resolve() / name / f"seed-{seed}"))
    return jobs


class CompareWorker:
    """Runs jobs of a comparison, in this process or on a cluster; returns the steps of an interrupted run, or None."""

    def __init__(self, device: str, threads: int) -> None:
        self.device = device
        torch.set_num_threads(threads)

    def __call__(self, job: CompareJob) -> int | None:
        is_finished = finished_result(job.folder) is not None
        remark = ", already finished" if is_finished else ""
        print_plain(f"{job.name}, seed {job.seed}: {job.settings.run.steps:,} steps{remark}")
        if is_finished:
            return None
        has_checkpoints = (job.folder / "checkpoints").exists()
        result = run_pretraining(
            job.settings,
            job.folder,
            device=self.device,
            resume=has_checkpoints,
            force=not has_checkpoints,
            prints=False,
        )
        return result.steps if isinstance(result, StoppedRun) else None


def _read_settings(recipes: list[str | Path], data: Path | None, assignments: list[str]) -> dict[str, PretrainSettings]:
    """Return the settings of every recipe by a unique name, validated as far as possible without training."""
    recipes = expand_patterns(recipes)
    if len(recipes) < 2:
        raise InputError(f"at least two recipes are required, but {len(recipes)} were given: {recipes}")
    settings: dict[str, PretrainSettings] = {}
    for recipe in recipes:
        name = Path(recipe).name.removesuffix(".toml").replace(":", "-")
        if name in settings:
            raise InputError(f"two recipes have the name {name!r}; rename one of the files")
        parsed = PretrainSettings.parse(plain_settings(recipe, data, None, assignments, None), source=str(recipe))
        if parsed.data is None:
            raise InputError(f"{recipe}: data is not given; pass --data with a folder written by `bertsmith corpus`")
        try:
            parsed.network(parsed.tokenizer)
        except InputError as error:
            raise InputError(f"{recipe}: {error}") from None
        settings[name] = parsed
    corpora = {parsed.data for parsed in settings.values()}
    if len(corpora) > 1:
        raise InputError(f"the recipes use different corpora ({', '.join(map(str, corpora))}); pass --data for all")
    for folder in map(str, corpora):
        if not read_manifest(Path(folder)).splits["held_out"].tokens:
            raise InputError(f"corpus {folder!r} has no held-out split; create it with `bertsmith corpus --held-out`")
    return settings


def _planned_steps(out: Path, plan: Plain) -> dict[str, int]:
    """Return the steps per recipe of the comparison to resume; raise InputError if its settings differ."""
    if not (out / PLAN).exists():
        raise InputError(f"--resume: {str(out)!r} contains no comparison ({PLAN} is missing)")
    earlier = read_json(out / PLAN)
    steps: dict[str, int] = earlier.pop("steps")
    for name, value in plan.items():
        stored = earlier.get(name)
        if name != "recipes" and stored != value:
            raise InputError(
                f"--resume: {name} is {value!r}, but the comparison in {str(out)!r} was started with {stored!r}"
            )
        if json.dumps(stored, sort_keys=True) != json.dumps(value, sort_keys=True):
            raise InputError(f"--resume: the recipes differ from the recipes that {str(out)!r} was started with")
    return steps


def _print_table(summaries: dict[str, RecipeSummary], out: Path) -> None:
    columns = [heading for heading in table_headings(summaries) if heading not in _NOT_PRINTED]
    printed = Table(box=None, pad_edge=False)
    printed.add_column("")
    for heading in columns:
        printed.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for name, summary in summaries.items():
        texts = summary.cells()
        printed.add_row(escape(name), *(texts.get(heading, "–") for heading in columns))
    console = Console()
    console.print(printed)
    console.print(NOTE, style="dim", highlight=False)
    print_plain(f"written to {out}: {REPORT}, {RESULT}")
