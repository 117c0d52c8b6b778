"""`bertsmith compare`: several recipes trained at an equal budget, with their curves and a table."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from bertsmith.checkpoint.files import read_json, write_json
from bertsmith.data.shards import read_manifest
from bertsmith.errors import InputError
from bertsmith.report.comparison import (
    NOTE,
    ComparedRun,
    RecipeSummary,
    read_run,
    render_comparison_page,
    summarize,
    table_headings,
)
from bertsmith.runs.folder import finished_result
from bertsmith.runs.output import REPORT, RESULT, check_out, claim, write_result
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
    """Held-out metrics and costs of every recipe, with their curves."""

    budget: str
    unigram_level: float | None
    recipes: dict[str, dict[str, Any]]
    """One row of the table for each recipe: means over the seeds."""
    curves: dict[str, list[list[dict[str, float]]]]
    """Held-out rows of every seed of each recipe."""


def compare(
    recipes: list[str],
    *,
    out: Path,
    budget: str,
    data: Path | None = None,
    seeds: int = 1,
    evaluations: int = 20,
    set: list[str] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    resume: bool = False,
    force: bool = False,
) -> CompareResult | StoppedRun:
    """Pre-train recipes at an equal budget of tokens, operations or seconds; plot their losses and print a table.

    Parameters
    ----------
    recipes
        Recipes as `bertsmith pretrain` takes them: TOML files or names such as electra-small:crammed.
    out
        The folder to write: one run for each recipe and seed, report.html and result.json.
    budget
        Budget of each run: "300M tokens", "1e18 flops" or "10min". A time is measured once for each recipe and
        then fixed in steps, the same for all its seeds.
    data
        The folder that `bertsmith corpus` wrote, for all recipes.
    seeds
        Runs of each recipe, with the seeds 0, 1, …
    evaluations
        Points of each curve.
    set
        One setting over all recipes, such as run.compile=on; may be given several times.
    device
        Where to compute; "auto" takes a GPU if there is one.
    resume
        Resume an earlier comparison in --out.
    force
        Replace an earlier comparison in --out.
    """
    out = Path(out)
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise InputError(f"compare is started on {processes} processes; allowed: 1, so leave `accelerate launch` out")
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}; allowed: 1 or more")
    if evaluations < 1:
        raise InputError(f"--evaluations is {evaluations}; allowed: 1 or more")
    settings = _read_settings(recipes, data, set or [])
    plan = {"budget": budget, "seeds": seeds, "evaluations": evaluations}
    plan |= {"recipes": {name: own.plain() for name, own in settings.items()}}
    if resume:
        steps = _planned_steps(out, plan)
    else:
        inputs = [Path(own.data) for own in settings.values() if own.data is not None]
        check_out(out, force, *inputs)
        steps = {name: steps_for(own, Budget.parse(budget), device) for name, own in settings.items()}
        claim(out, force, *inputs)
        write_json(out / PLAN, {**plan, "steps": steps})
    runs: dict[str, list[ComparedRun]] = {name: [] for name in settings}
    for seed in range(seeds):
        for name, own in settings.items():
            folder, every = out / name / f"seed-{seed}", max(1, steps[name] // evaluations)
            is_finished = finished_result(folder) is not None
            print_plain(f"{name}, seed {seed}: {steps[name]:,} steps{', finished before' if is_finished else ''}")
            if not is_finished:
                changes = {"steps": steps[name], "seed": seed, "evaluate_every": every, "checkpoint_every": 5 * every}
                changed = own.changed(run=own.run.changed(**changes))
                continues = (folder / "checkpoints").exists()
                single = run_pretraining(
                    changed, folder, device=device, resume=continues, force=not continues, prints=False
                )
                if isinstance(single, StoppedRun):
                    print_plain("asked to stop; continue with --resume")
                    return StoppedRun(steps=single.steps, stage=f"{name}, seed {seed}")
            runs[name].append(read_run(seed, read_json(folder / RESULT), read_log(folder / LOG)))
    summaries = summarize(runs)
    result = CompareResult(
        budget=budget,
        unigram_level=next(iter(runs.values()))[0].result.get("unigram_level"),
        recipes={name: summary.plain() for name, summary in summaries.items()},
        curves={name: [run.held_out for run in seeds] for name, seeds in runs.items()},
    )
    facts = {"each run may spend": budget, "seeds": str(seeds)}
    if result.unigram_level is not None:
        facts["unigram level"] = f"{result.unigram_level:.3f}"
    page = render_comparison_page(out.name, runs, facts, result.unigram_level)
    (out / REPORT).write_text(page, encoding="utf-8")
    write_result(out, result.to_json())
    _print_table(summaries, out)
    return result


def _read_settings(recipes: list[str], data: Path | None, assignments: list[str]) -> dict[str, PretrainSettings]:
    """Return the settings of every recipe by a distinct name, checked as far as possible without training."""
    if len(recipes) < 2:
        raise InputError(f"recipes are {recipes}; give at least two to compare")
    settings: dict[str, PretrainSettings] = {}
    for recipe in recipes:
        name = Path(recipe).stem.replace(":", "-")
        if name in settings:
            raise InputError(f"two recipes are called {name!r}; give their files different names")
        own = PretrainSettings.parse(plain_settings(recipe, data, None, assignments, None), source=recipe)
        if own.data is None:
            raise InputError(f"{recipe}: data is not given: pass --data with a folder that `bertsmith corpus` wrote")
        try:
            own.network(own.tokenizer)
        except InputError as error:
            raise InputError(f"{recipe}: {error}") from None
        settings[name] = own
    corpora = {own.data for own in settings.values()}
    if len(corpora) > 1:
        raise InputError(f"the recipes read different corpora ({', '.join(map(str, corpora))}); give --data for all")
    for folder in map(str, corpora):
        if not read_manifest(Path(folder)).splits["held_out"].tokens:
            raise InputError(f"{folder!r} holds no text out to compare by; make it with `bertsmith corpus --held-out`")
    return settings


def _planned_steps(out: Path, plan: Plain) -> dict[str, int]:
    """Return the steps of the comparison to resume, after checking that its plan is the same."""
    if not (out / PLAN).exists():
        raise InputError(f"--resume: {str(out)!r} holds no comparison ({PLAN} is missing)")
    earlier = read_json(out / PLAN)
    steps: dict[str, int] = earlier.pop("steps")
    for name, value in plan.items():
        began = earlier.get(name)
        if name != "recipes" and began != value:
            raise InputError(f"--resume: {name} is {value!r} but the comparison in {str(out)!r} began with {began!r}")
        if json.dumps(began, sort_keys=True) != json.dumps(value, sort_keys=True):
            raise InputError(f"--resume: recipes differ from those the comparison in {str(out)!r} began with")
    return steps


def _print_table(summaries: dict[str, RecipeSummary], out: Path) -> None:
    columns = [heading for heading in table_headings(summaries) if heading not in _NOT_PRINTED]
    printed = Table(box=None, pad_edge=False)
    printed.add_column("")
    for heading in columns:
        printed.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for name, summary in summaries.items():
        texts = summary.cells()
        printed.add_row(name, *(texts.get(heading, "–") for heading in columns))
    console = Console()
    console.print(printed)
    console.print(NOTE, style="dim", highlight=False)
    print_plain(f"written to {out}: {REPORT}, {RESULT}")
