"""`bertsmith pretrain`: a corpus and a recipe → a pre-trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertsmith.commands.run import carry_out, print_explanation, recipe_of, run_figures
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.training.pretraining import PretrainSettings
    from bertsmith.training.trainer import Trainer


def pretrain(
    recipe: Path | None = None,
    *,
    data: Path | None = None,
    out: Path | None = None,
    set: list[str] | None = None,
    seed: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Pre-train an encoder; start it under `accelerate launch -m bertsmith` to use several processes.

    Parameters
    ----------
    recipe
        A TOML file with the settings; --explain prints them all. With --resume the run's own recipe is used.
    data
        The folder that `bertsmith corpus` wrote.
    out
        The folder to write: the model, log.jsonl, checkpoints, recipe.toml, report.html and result.json.
    set
        One setting over the recipe, such as optimizer.learning_rate=1e-3; may be given several times.
    seed
        Of weights, data order, masks and dropout.
    device
        Where to compute; "auto" takes a GPU if there is one.
    explain
        Print the resolved settings, parameters, FLOPs per token and memory, then stop.
    resume
        Go on from the newest whole checkpoint in --out.
    force
        Replace an earlier run in --out.
    """
    from bertsmith.training.pretraining import PretrainSettings
    from bertsmith.training.pretraining import explain as explanation

    recipe, data, out = (None if path is None else Path(path) for path in (recipe, data, out))
    if resume and out is None:
        raise InputError("--resume needs --out with the folder of the run")
    plain = _plain_settings(recipe, data, out if resume else None, set or [], seed)
    settings = PretrainSettings.parse(plain, source=str(recipe or "settings"))
    if explain:
        return print_explanation(settings, explanation(settings))
    if out is None:
        raise InputError("--out is not given: it names the folder to write")
    return _run(settings, out, device=device, resume=resume, force=force)


def _plain_settings(
    recipe: Path | None, data: Path | None, run: Path | None, assignments: list[str], seed: int | None
) -> dict[str, Any]:
    """The settings as plain data: the recipe (or that of the run to go on with), then the flags."""
    from bertsmith.toml import override

    given = recipe_of(recipe, run)
    if given is None:
        raise InputError("no recipe is given; recipes/ has some to start from")
    plain = override(given, assignments)
    if data is not None:
        plain["data"] = str(data)
    if seed is not None:
        plain = override(plain, [f"run.seed={seed}"])
    return plain


def _run(settings: "PretrainSettings", out: Path, *, device: str, resume: bool, force: bool) -> dict[str, Any]:
    from bertsmith.training.pretraining import make_trainer

    return carry_out(
        settings,
        out,
        inputs=[Path(path) for path in (settings.data, settings.model.folder, settings.generator.folder) if path],
        make=lambda: make_trainer(settings, out, device=device, resume=resume),
        finish=lambda trainer: _finish(settings, trainer, out),
        device=device,
        resume=resume,
        force=force,
    )


def _finish(settings: "PretrainSettings", trainer: "Trainer", out: Path) -> dict[str, Any]:
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
    _print_figures(figures, out)
    return figures


def _figures(settings: "PretrainSettings", trainer: "Trainer") -> dict[str, Any]:
    """Every figure of the run, for result.json."""
    from bertsmith.batches.shards import TokenCorpus
    from bertsmith.batches.statistics import unigram_level
    from bertsmith.models.cost import training_flops

    targets, length = settings.objective.targets_per_token, settings.sequences.length
    held_out = trainer.log.of_kind("held_out")
    figures = run_figures(trainer)
    figures["training_flops_per_token"] = training_flops(trainer.model.config, length, targets)
    if held_out:
        part = Path(str(settings.data))
        figures["token_term"] = settings.objective.token_term
        figures["held_out"] = {name: value for name, value in held_out[-1].items() if name not in ("kind", "step")}
        figures["unigram_level"] = unigram_level(TokenCorpus(part, "train"), TokenCorpus(part, "held_out"))
    return figures


def _print_figures(figures: dict[str, Any], out: Path) -> None:
    from rich.console import Console

    console = Console()
    console.print(f"[bold]{figures['steps']} steps, {figures['tokens']:,} tokens in {figures['seconds']} s[/]")
    if "held_out" in figures:
        loss, level = figures["held_out"][f"{figures['token_term']}_loss"], figures["unigram_level"]
        console.print(f"held-out loss {loss:.3f} (unigram level {level:.3f})")
    console.print(f"written to {out}: model.safetensors, report.html, result.json", highlight=False, markup=False)
