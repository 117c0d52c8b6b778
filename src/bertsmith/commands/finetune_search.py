"""Several runs of one fine-tuning: seeds and learning rates, their mean and spread, and the best one's model."""

import json
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from bertsmith.commands.finetune_task import DEGENERATE, Finetuned, Tables, Told, finetune_task, input_paths
from bertsmith.commands.run import RECIPE, check_same
from bertsmith.commands.task_report import write_search_report
from bertsmith.errors import InputError
from bertsmith.runs.output import RESULT, check_out, claim, write_result
from bertsmith.settings import Record

if TYPE_CHECKING:
    from bertsmith.models.model import Model
    from bertsmith.recipes.finetune import Completed
    from bertsmith.training.finetuning import FinetuneSettings

SEARCH = "search.json"
_MODEL = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "task.json")


class Search(Record):
    """Which runs there are: every seed with every learning rate."""

    seeds: tuple[int, ...] = Field(min_length=1)
    learning_rates: tuple[float, ...] = Field(min_length=1)

    def runs(self) -> dict[str, tuple[int, float]]:
        """Seed and learning rate of every run, by the name of its folder."""
        alone = len(self.learning_rates) == 1
        return {
            f"seed-{seed}" if alone else f"lr-{rate:g}-seed-{seed}": (seed, rate)
            for rate in self.learning_rates
            for seed in self.seeds
        }


def search_of(
    seeds: int | None, rates: Sequence[float] | None, settings: "FinetuneSettings", earlier: Path | None
) -> Search | None:
    """The search that flags ask for, or that was begun in a folder; None for a single run."""
    begun = None
    if earlier is not None and (earlier / SEARCH).is_file():
        begun = Search.parse(json.loads((earlier / SEARCH).read_text(encoding="utf-8")), source=str(earlier / SEARCH))
    if seeds is None and not rates:
        return begun
    for name, given in (("--seeds", [] if seeds is None else [seeds]), ("--learning-rates", rates or [])):
        if any(value <= 0 for value in given):
            raise InputError(f"{name} is {min(given)}; allowed: above 0")
    if rates and len(set(rates)) < len(rates):
        raise InputError(f"--learning-rates are {', '.join(map(str, rates))}; each may be given once")
    first = settings.run.seed if begun is None else begun.seeds[0]
    asked = Search(
        seeds=tuple(range(first, first + (seeds or 1))),
        learning_rates=tuple(rates or [settings.optimizer.learning_rate]),
    )
    if earlier is not None and asked != begun:
        raise InputError(
            f"--resume: {str(earlier)!r} was not begun with these seeds and learning rates; leave them out"
        )
    return asked


def finetune_search(
    search: Search,
    whole: "Completed",
    tables: Tables,
    out: Path | None,
    *,
    start: "Model | None",
    device: str,
    resume: bool,
    force: bool,
) -> Finetuned:
    """Carries out all runs, one after the other; returns their figures, with the best one's model."""
    from accelerate import PartialState
    from rich.console import Console

    from bertsmith.tasks.predictor import Predictor
    from bertsmith.training.hardware import device_type

    if out is None:
        raise InputError("--out is not given: --seeds and --learning-rates keep every run in a folder there")
    if PartialState(cpu=device == "cpu" or None).num_processes > 1:
        raise InputError(
            "--seeds and --learning-rates run in one process; with several, give --seed and run them singly"
        )
    _begin(search, whole, tables, out, start=start, resume=resume, force=force)
    runs = search.runs()
    for number, (name, (seed, rate)) in enumerate(runs.items(), start=1):
        folder = out / name
        if _result(folder) is not None:
            continue
        single = replace(whole, settings=_changed(whole.settings, seed, rate))
        Console().print(f"{name}, run {number} of {len(runs)}", style="bold", markup=False, highlight=False)
        going_on = resume and (folder / RECIPE).is_file()
        # what is to be known of the data is the same for all
        told = Told(data=number == 1, end=False)
        figures = _attempt(single, tables, folder, start=start, device=device, resume=going_on, told=told)
        if not figures.get("is_finished"):
            return Finetuned({"steps": figures["steps"], "is_finished": False, "run": name})
        _keep_best(out, runs)
    result = _finish(search, out)
    if (out / "task.json").is_file():
        result.predictor = Predictor.load(out, device=device_type(device))
        settings = _changed(whole.settings, *runs[result["best"]["run"]])
        write_search_report(settings, result.predictor, tables, out, result)
    return result


def _begin(
    search: Search,
    whole: "Completed",
    tables: Tables,
    out: Path,
    *,
    start: "Model | None",
    resume: bool,
    force: bool,
) -> None:
    """Makes the folder and writes down what is to be run; or checks that it is the folder of this search."""
    from bertsmith.toml import read_toml, to_toml
    from bertsmith.training.finetuning import read_data

    settings = whole.settings
    if resume:
        if _result(out) is not None:
            raise InputError(f"the runs in {str(out)!r} are finished; there is nothing to resume")
        earlier = type(settings).parse(read_toml(out / RECIPE), source=str(out / RECIPE))
        check_same(earlier.plain(), settings.plain())
        return
    inputs = input_paths(settings, start)
    check_out(out, force, *inputs)
    read_data(settings, *tables)  # what is wrong with the data must cost no folder
    claim(out, force, *inputs)
    (out / SEARCH).write_text(json.dumps(search.plain()) + "\n", encoding="utf-8")
    (out / RECIPE).write_text(to_toml(settings.plain()), encoding="utf-8")


def _changed(settings: "FinetuneSettings", seed: int, rate: float) -> "FinetuneSettings":
    return settings.changed(
        run=settings.run.changed(seed=seed), optimizer=settings.optimizer.changed(learning_rate=rate)
    )


def _attempt(
    single: "Completed", tables: Tables, folder: Path, *, start: "Model | None", device: str, resume: bool, told: Told
) -> dict[str, Any]:
    """One run; one whose loss is no number any more is a result, too."""
    try:
        ways: dict[str, Any] = {"start": start, "device": device, "told": told}
        return finetune_task(single, tables, folder, resume=resume, force=not resume, **ways)
    except InputError as error:
        log = folder / "log.jsonl"
        if not log.is_file() or '"not_finite"' not in log.read_text(encoding="utf-8"):
            raise
        figures = {"is_finished": True, "failed": str(error), "steps": 0, "seed": single.settings.run.seed}
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        write_result(folder, figures)
        return figures


def _result(folder: Path) -> dict[str, Any] | None:
    """The figures of a run, or of all, that came to an end."""
    path = folder / RESULT
    if not path.is_file():
        return None
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures if figures.get("is_finished") else None


def _scores(out: Path, runs: Sequence[str]) -> dict[str, float]:
    """The score of every run that has one."""
    found = {name: _result(out / name) for name in runs}
    return {name: figures["score"] for name, figures in found.items() if figures is not None and "score" in figures}


def _keep_best(out: Path, runs: "dict[str, tuple[int, float]]") -> None:
    """Removes the models of all runs but the best so far."""
    scores = _scores(out, list(runs))
    best = max(scores, key=lambda name: scores[name], default=None)
    for name in scores:
        if name != best:
            _remove_model(out / name)


def _remove_model(folder: Path) -> None:
    for file in _MODEL:
        (folder / file).unlink(missing_ok=True)


def _finish(search: Search, out: Path) -> Finetuned:
    """Gives the folder the model of the best run, and the figures of all; prints them."""
    runs = search.runs()
    scores = _scores(out, list(runs))
    if not scores:
        raise InputError(f"none of the runs in {str(out)!r} came to an end with a score; try lower learning rates")
    best = max(scores, key=lambda name: scores[name])
    results = {name: _result(out / name) or {} for name in runs}
    by_rate = {
        rate: spread([scores[name] for name, (_, own) in runs.items() if own == rate and name in scores])
        for rate in search.learning_rates
    }
    usable = {rate: figures for rate, figures in by_rate.items() if figures["runs"] == len(search.seeds)}
    rate = max(usable or by_rate, key=lambda rate: by_rate[rate].get("mean", float("-inf")))
    figures = {
        "metric": results[best]["metric"],
        "score": by_rate[rate]["mean"],
        "learning_rate": rate,
        **{name: value for name, value in by_rate[rate].items() if name != "runs"},
        "best": {"run": best, "score": scores[best], "seed": runs[best][0], "learning_rate": runs[best][1]},
        "note": "score is the mean over the seeds at the best learning rate; that rate and the best run, whose model "
        "this folder holds, were chosen on dev, so the best run's score flatters it",
        "learning_rates": {f"{rate:g}": own for rate, own in by_rate.items()},
        "runs": {
            name: {
                "seed": runs[name][0],
                "learning_rate": runs[name][1],
                **{key: own[key] for key in ("score", "best_step", "steps", "is_degenerate", "failed") if key in own},
            }
            for name, own in results.items()
        },
        "steps": sum(own.get("steps", 0) for own in results.values()),
        "is_finished": True,
    }
    others = shutil.ignore_patterns(RESULT, RECIPE, "checkpoints")
    shutil.copytree(out / best, out, dirs_exist_ok=True, ignore=others)
    # whole or not at all: --resume reads it
    shutil.copyfile(out / best / RECIPE, out / f".{RECIPE}").replace(out / RECIPE)
    write_result(out, figures)
    _remove_model(out / best)  # last: until all else is there, this is the only copy
    _print(figures, out)
    return Finetuned(figures)


def spread(scores: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (of a sample; 0 for a single run), least, middle and largest of some scores."""
    if not scores:
        return {"runs": 0}
    return {
        "runs": len(scores),
        "mean": statistics.fmean(scores),
        "deviation": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "min": min(scores),
        "median": statistics.median(scores),
        "max": max(scores),
    }


def _print(figures: dict[str, Any], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("learning rate", "runs", "mean", "± sd", "min", "median", "max", title=f"dev: {figures['metric']}")
    for rate, own in figures["learning_rates"].items():
        names = ("mean", "deviation", "min", "median", "max")
        table.add_row(rate, str(own["runs"]), *(f"{own[name]:.2f}" if name in own else "–" for name in names))
    console.print(table)
    alike = [f"{name} ({own['score']:.2f})" for name, own in figures["runs"].items() if own.get("is_degenerate")]
    if alike:
        console.print(f"{', '.join(alike)}: {DEGENERATE}", style="yellow", markup=False)
    for name, own in figures["runs"].items():
        if "failed" in own:
            console.print(f"{name} failed: {own['failed']}", style="yellow", markup=False)
    best = figures["best"]
    console.print(
        f"{figures['metric']} {figures['score']:.2f} on average at a learning rate of {figures['learning_rate']:g}; "
        f"best {best['score']:.2f} ({best['run']}), chosen on dev, is the model in {out}; report.html there "
        "tells more",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
