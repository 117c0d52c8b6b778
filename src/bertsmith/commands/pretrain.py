"""`bertsmith pretrain`: a corpus and a recipe → a pre-trained model."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertsmith.commands.run import carry_out, print_explanation, recipe_of, run_figures
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.training.budget import Budget
    from bertsmith.training.pretraining import PretrainSettings
    from bertsmith.training.trainer import Trainer


def pretrain(
    recipe: Path | None = None,
    *,
    data: Path | None = None,
    out: Path | None = None,
    set: list[str] | None = None,
    seed: int | None = None,
    budget: str | None = None,
    branch: Path | None = None,
    decay: str | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Pre-train an encoder; start it under `accelerate launch -m bertsmith` to use several processes.

    Parameters
    ----------
    recipe
        A TOML file with the settings, or NAME[:TIER], tier being paper, crammed (the default) or modern.
        --explain prints all settings. With --resume the run's own recipe is used.
        Names: bert-tiny, bert-mini, bert-small, bert-medium, bert-base, bert-large, electra-small,
        electra-base, electra-large, convbert-small, convbert-medium-small, convbert-base, deberta-base,
        deberta-large, deberta-xlarge, deberta-ap-base, deberta-v2-xlarge, deberta-v2-xxlarge,
        deberta-v3-xsmall, deberta-v3-small, deberta-v3-base, deberta-v3-large, mdeberta-v3-base, albert-base,
        albert-large, albert-xlarge, albert-xxlarge, performer-small, performer-base, performer-relu-small,
        performer-relu-base, lightconv-base, dynamicconv-base, universal-base, modern-small, modern-base,
        modern-large, disentangled-small.
    data
        The folder that `bertsmith corpus` wrote.
    out
        The folder to write: the model, log.jsonl, checkpoints, recipe.toml, report.html and result.json.
    set
        One setting over the recipe, such as optimizer.learning_rate=1e-3; may be given several times.
    seed
        Of weights, data order, masks and dropout.
    budget
        How long the run may be, instead of run.steps: 10min, 2h, 300M (tokens) or "1e18 flops". A time is measured on
        the first steps and then fixed: recipe.toml holds the steps.
    branch
        A checkpoint, RUN/checkpoints/step-…, to go on from with that run's recipe: only the decay follows.
    decay
        With --branch: how long the rate falls, in steps (500), as a share of the whole (20%) or in tokens (50M).
    device
        Where to compute; "auto" takes a GPU if there is one.
    explain
        Print the resolved settings, parameters, FLOPs per token and memory, then stop.
    resume
        Go on from the newest whole checkpoint in --out.
    force
        Replace an earlier run in --out.
    """
    begin = time.perf_counter()  # a time budget counts the imports, too

    from bertsmith.training.branch import branched
    from bertsmith.training.budget import Budget
    from bertsmith.training.pretraining import PretrainSettings
    from bertsmith.training.pretraining import explain as explanation

    recipe, data, out, branch = (None if path is None else Path(path) for path in (recipe, data, out, branch))
    if resume and out is None:
        raise InputError("--resume needs --out with the folder of the run")
    _check_flags(recipe, resume, budget, branch, decay)
    within = None if budget is None else Budget.parse(budget)
    run = out if resume else None if branch is None else branch.parent.parent
    plain = plain_settings(recipe, data, run, set or [], seed)
    settings = PretrainSettings.parse(plain, source=str(recipe or "settings"))
    if branch is not None:
        settings = branched(settings, branch, str(decay))
    if within is not None:
        settings = _within(settings, within, out if resume else None)
    if explain:
        facts = explanation(settings)
        return print_explanation(settings, facts if within is None else facts | {"budget": within.explanation})
    if out is None:
        raise InputError("--out is not given: it names the folder to write")
    return run_pretraining(settings, out, budget=within, begin=begin, device=device, resume=resume, force=force)


def _check_flags(recipe: Path | None, resume: bool, budget: str | None, branch: Path | None, decay: str | None) -> None:
    """Raises a sentence if flags do not go together."""
    from bertsmith.training.branch import branch_step

    if (branch is None) != (decay is None):
        raise InputError("--branch and --decay belong together: where a run is left, and how long its rate then falls")
    for flag, is_given in (("RECIPE", recipe is not None), ("--budget", budget is not None), ("--resume", resume)):
        if branch is not None and is_given:
            raise InputError(f"--branch goes on with its run's recipe and --decay says how long; leave {flag} out")
    if branch is not None:
        branch_step(branch)


def plain_settings(
    recipe: str | Path | None, data: Path | None, run: Path | None, assignments: list[str], seed: int | None
) -> dict[str, Any]:
    """The settings as plain data: the recipe (or that of the run to go on with), then the flags."""
    from bertsmith.recipes import laid_over
    from bertsmith.toml import override

    plain = laid_over(_given(recipe, run), override({}, assignments))
    if data is not None:
        plain["data"] = str(data)
    if seed is not None:
        plain = override(plain, [f"run.seed={seed}"])
    return plain


def _given(recipe: str | Path | None, run: Path | None) -> dict[str, Any]:
    """The recipe by its name or file, or else that of the run to go on with."""
    from bertsmith.recipes import read_recipe

    recorded = recipe_of(None, run)
    if recipe is not None:
        # WORLD_SIZE is how accelerate and torchrun tell each process of the others
        return read_recipe(recipe, processes=int(os.environ.get("WORLD_SIZE", "1")))
    if recorded is None:
        raise InputError("no recipe is given: give a name such as bert-base:paper, or a .toml file")
    return recorded


def _within(settings: "PretrainSettings", budget: "Budget", run: Path | None) -> "PretrainSettings":
    """The settings with the steps of a budget, or of the run to go on with; a time leaves them as they are."""
    from bertsmith.training.pretraining import steps_for

    if run is not None:
        given = recipe_of(None, run)
        steps = 0 if given is None else given["run"]["steps"]
    elif budget.kind == "seconds":
        return settings
    else:
        steps = steps_for(settings, budget)
    return settings.changed(run=settings.run.changed(steps=steps))


def run_pretraining(
    settings: "PretrainSettings",
    out: Path,
    *,
    device: str,
    resume: bool = False,
    force: bool = False,
    budget: "Budget | None" = None,
    begin: float | None = None,
    tells: bool = True,
) -> dict[str, Any]:
    """The figures of a run, which leaves the model and all that belongs to it in `out`.

    `budget` is said again, or measured if it is a time, from the moment `begin` of `time.perf_counter` on. One of
    many runs need not print its figures: then it `tells` nothing.
    """
    from bertsmith.training.branch import check_branch
    from bertsmith.training.pretraining import make_trainer

    since = time.perf_counter() if begin is None else begin
    if not resume:  # a run that has checkpoints of its own needs the branch no more
        check_branch(settings)

    def settle(trainer: "Trainer") -> "PretrainSettings":
        return settings if budget is None else _settled(settings, trainer, budget, since)

    return carry_out(
        settings,
        out,
        inputs=list(settings.inputs),
        make=lambda: make_trainer(settings, out, device=device, resume=resume),
        settle=settle,
        finish=lambda trainer: _finish(settings, trainer, out, tells=tells),
        device=device,
        resume=resume,
        force=force,
    )


def _settled(settings: "PretrainSettings", trainer: "Trainer", budget: "Budget", begin: float) -> "PretrainSettings":
    """The settings with the steps of the budget, after measuring where it is a time; says what came out."""
    from rich.console import Console

    from bertsmith.training.budget import measure_pace, steps_at

    told = f"budget {budget.text}:"
    if budget.kind == "seconds":
        pace = measure_pace(trainer, budget.amount)
        steps = steps_at(pace, trainer, budget.amount, spent=time.perf_counter() - begin)
        settings = settings.changed(run=settings.run.changed(steps=steps))
        trainer.set_steps(steps)
        size, mark = (1e6, "M") if pace.tokens_per_second >= 1e6 else (1e3, "k")
        told += f" {pace.tokens_per_second / size:.2f} {mark} tokens/s, so"
    if trainer.show:
        told += f" {settings.run.steps:,} steps of {settings.batch.tokens:,} tokens"
        Console().print(told, highlight=False, markup=False)
    return settings


def _finish(settings: "PretrainSettings", trainer: "Trainer", out: Path, *, tells: bool) -> dict[str, Any]:
    """Writes the model, its figures and its page; returns the figures."""
    from bertsmith.checkpoint.store import write_model
    from bertsmith.commands.output import write_result
    from bertsmith.commands.pretrain_report import write_report
    from bertsmith.models.generator import fold

    figures = _figures(settings, trainer)
    write_model(fold(trainer.model), out)
    write_result(out, figures)
    commands = (
        f'bertsmith inspect {out} --text "Some words." --out maps',
        f"bertsmith export {out} --out hf-model",
    )
    write_report(out, out / "report.html", title=out.name, commands=commands)
    if tells:
        _print_figures(figures, out)
    return figures


def _figures(settings: "PretrainSettings", trainer: "Trainer") -> dict[str, Any]:
    """Every figure of the run, for result.json."""
    held_out = trainer.log.of_kind("held_out")
    figures = {"tier": settings.tier, "token_term": settings.objective.token_term, **run_figures(trainer)}
    figures["training_flops_per_token"] = trainer.data.phases[0].flops_per_token
    if held_out:
        assert trainer.baseline is not None
        figures["held_out"] = {name: value for name, value in held_out[-1].items() if name not in ("kind", "step")}
        figures["unigram_level"] = trainer.baseline.level()
    return figures


def _print_figures(figures: dict[str, Any], out: Path) -> None:
    from rich.console import Console

    console = Console()
    console.print(f"[bold]{figures['steps']} steps, {figures['tokens']:,} tokens in {figures['seconds']} s[/]")
    if "held_out" in figures:
        loss, level = figures["held_out"][f"{figures['token_term']}_loss"], figures["unigram_level"]
        whose = ""
        if "replaced_recall" in figures["held_out"]:
            whose = " of the generator"
            found, right = figures["held_out"]["replaced_recall"], figures["held_out"]["replaced_precision"]
            finds = f"{found:.1%} of the replaced tokens found, {right:.1%} of the finds right"
            console.print(f"held out: {finds if found else 'none of the replaced tokens found'}")
        console.print(f"held-out loss{whose} {loss:.3f} (unigram level {level:.3f})")
    console.print(f"written to {out}: model.safetensors, report.html, result.json", highlight=False, markup=False)
