"""`bertsmith compare`: several recipes trained at an equal budget, with their curves and a table."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.report.comparison import Run
    from bertsmith.training.pretraining import PretrainSettings

PLAN = "comparison.json"


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
) -> dict[str, Any]:
    """Train recipes at equal tokens, operations or seconds, then draw their losses against each and print a table.

    Parameters
    ----------
    recipes
        Recipes as `bertsmith pretrain` takes them: TOML files or names such as electra-small:crammed.
    out
        The folder to write: one run for each recipe and seed, report.html and result.json.
    budget
        What each run may spend: "300M tokens", "1e18 flops" or "10min". A time is measured once for each recipe and
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
        Go on where an earlier `compare` in --out stopped.
    force
        Replace an earlier comparison in --out.
    """
    from bertsmith.runs.folder import check_out, claim, write_result

    out = Path(out)
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise InputError(f"compare is started on {processes} processes; allowed: 1, so leave `accelerate launch` out")
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}; allowed: 1 or more")
    if evaluations < 1:
        raise InputError(f"--evaluations is {evaluations}; allowed: 1 or more")
    settings = _settings(recipes, data, set or [])
    plan = {"budget": budget, "seeds": seeds, "evaluations": evaluations}
    plan |= {"recipes": {name: one.plain() for name, one in settings.items()}}
    if resume:
        steps = _recorded(out, plan)
    else:
        inputs = [Path(one.data) for one in settings.values() if one.data is not None]
        check_out(out, force, *inputs)
        steps = {name: _steps(one, budget, device) for name, one in settings.items()}
        claim(out, force, *inputs)
        (out / PLAN).write_text(json.dumps({**plan, "steps": steps}, indent=2) + "\n", encoding="utf-8")
    runs = _run_all(settings, steps, out, seeds=seeds, evaluations=evaluations, device=device)
    if runs is None:
        return {"is_finished": False}
    figures = _finish(out, budget, runs)
    write_result(out, figures)
    return figures


def _settings(recipes: list[str], data: Path | None, assignments: list[str]) -> dict[str, "PretrainSettings"]:
    """The settings of every recipe by a name that tells them apart, each checked as far as can be without training."""
    from bertsmith.data.shards import read_manifest
    from bertsmith.runs.pretrain import plain_settings
    from bertsmith.training.pretraining import PretrainSettings

    if len(recipes) < 2:
        raise InputError(f"recipes are {recipes}; give at least two to compare")
    settings: dict[str, PretrainSettings] = {}
    for recipe in recipes:
        name = Path(recipe).stem.replace(":", "-")
        if name in settings:
            raise InputError(f"two recipes are called {name!r}; give their files different names")
        plain = plain_settings(recipe, data, None, assignments, None)
        settings[name] = PretrainSettings.parse(plain, source=recipe)
        if settings[name].data is None:
            raise InputError(f"{recipe}: data is not given: pass --data with a folder that `bertsmith corpus` wrote")
        try:
            settings[name].network(settings[name].tokenizer)
        except InputError as error:
            raise InputError(f"{recipe}: {error}") from None
    corpora = {one.data for one in settings.values()}
    if len(corpora) > 1:
        raise InputError(f"the recipes read different corpora ({', '.join(map(str, corpora))}); give --data for all")
    for folder in map(str, corpora):
        if not read_manifest(Path(folder)).parts["held_out"].tokens:
            raise InputError(f"{folder!r} holds no text out to compare by; make it with `bertsmith corpus --held-out`")
    return settings


def _recorded(out: Path, plan: dict[str, Any]) -> dict[str, int]:
    """The steps of the comparison to go on with, after checking that it is this one."""
    from bertsmith.checkpoint.files import read_json

    if not (out / PLAN).exists():
        raise InputError(f"--resume: {str(out)!r} holds no comparison ({PLAN} is missing)")
    earlier = read_json(out / PLAN)
    steps = earlier.pop("steps")
    for name, value in plan.items():
        began = earlier.get(name)
        if name != "recipes" and began != value:
            raise InputError(f"--resume: {name} is {value!r} but the comparison in {str(out)!r} began with {began!r}")
        if json.dumps(began, sort_keys=True) != json.dumps(value, sort_keys=True):
            raise InputError(f"--resume: recipes differ from those the comparison in {str(out)!r} began with")
    return steps


def _steps(settings: "PretrainSettings", text: str, device: str) -> int:
    """The steps a recipe may take within a budget."""
    from bertsmith.training.budget import Budget
    from bertsmith.training.pretraining import steps_for

    return steps_for(settings, Budget.parse(text), device)


def _run_all(
    settings: dict[str, "PretrainSettings"],
    steps: dict[str, int],
    out: Path,
    *,
    seeds: int,
    evaluations: int,
    device: str,
) -> "dict[str, list[Run]] | None":
    """All runs, those that are finished left alone and the others gone on with; None if one was asked to stop."""
    from rich.console import Console

    from bertsmith.runs.pretrain import run_pretraining

    console = Console()
    runs: dict[str, list[Run]] = {}
    for seed in range(seeds):
        for name, one in settings.items():
            folder = out / name / f"seed-{seed}"
            every = max(1, steps[name] // evaluations)
            changes = {"steps": steps[name], "seed": seed, "evaluate_every": every, "checkpoint_every": 5 * every}
            changed = one.changed(run=one.run.changed(**changes))
            is_finished = _is_finished(folder)
            told = f"{name}, seed {seed}: {steps[name]:,} steps{', finished before' if is_finished else ''}"
            console.print(told, markup=False, highlight=False)
            if not is_finished:
                begun = (folder / "checkpoints").exists()
                figures = run_pretraining(changed, folder, device=device, resume=begun, force=not begun, prints=False)
                if not figures["is_finished"]:
                    console.print("asked to stop; go on with --resume", markup=False)
                    return None
            runs.setdefault(name, []).append(_read(folder, seed))
    return runs


def _is_finished(folder: Path) -> bool:
    from bertsmith.checkpoint.files import read_json
    from bertsmith.runs.folder import RESULT

    return (folder / RESULT).exists() and bool(read_json(folder / RESULT).get("is_finished"))


def _read(folder: Path, seed: int) -> "Run":
    from bertsmith.checkpoint.files import read_json
    from bertsmith.report.comparison import run_of
    from bertsmith.runs.folder import RESULT

    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return run_of(seed, read_json(folder / RESULT), rows)


def _finish(out: Path, budget: str, runs: "dict[str, list[Run]]") -> dict[str, Any]:
    """Writes the page and prints the table; returns the figures."""
    from rich.console import Console
    from rich.table import Table

    from bertsmith.report.comparison import NOTE, cells, comparison_page, headings, table

    rows = table(runs)
    first = next(iter(runs.values()))[0].figures
    unigram = first.get("unigram_level")
    facts = {"each run may spend": budget, "seeds": str(len(next(iter(runs.values()))))}
    if unigram is not None:
        facts["unigram level"] = f"{unigram:.3f}"
    (out / "report.html").write_text(comparison_page(out.name, runs, facts, unigram), encoding="utf-8")
    columns = [heading for heading in headings(rows) if heading not in ("parameters", "tokens", "operations")]
    printed = Table(box=None, pad_edge=False)
    printed.add_column("")
    for heading in columns:
        printed.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for name, row in rows.items():
        texts = cells(row)
        printed.add_row(name, *(texts.get(heading, "–") for heading in columns))
    console = Console()
    console.print(printed)
    console.print(NOTE, style="dim", highlight=False)
    console.print(f"written to {out}: report.html, result.json", markup=False, highlight=False)
    return {
        "is_finished": True,
        "budget": budget,
        "unigram_level": unigram,
        "recipes": rows,
        "curves": {name: [run.held_out for run in seeds] for name, seeds in runs.items()},
    }
