"""`bertsmith pretrain`: a corpus and a recipe → a pre-trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.training.pretraining import PretrainSettings
    from bertsmith.training.trainer import Trainer

RECIPE = "recipe.toml"


def pretrain(
    recipe: Path | None = None,
    *,
    data: Path | None = None,
    out: Path | None = None,
    set: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
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

    recipe, data, out = (None if path is None else Path(path) for path in (recipe, data, out))
    if resume and out is None:
        raise InputError("--resume needs --out with the folder of the run")
    plain = _plain_settings(recipe, data, out if resume else None, set or [], seed)
    settings = PretrainSettings.parse(plain, source=str(recipe or "settings"))
    if explain:
        return _print_explanation(settings)
    if out is None:
        raise InputError("--out is not given: it names the folder to write")
    return _run(settings, out, device=device, resume=resume, force=force)


def _plain_settings(
    recipe: Path | None, data: Path | None, run: Path | None, assignments: list[str], seed: int | None
) -> dict[str, Any]:
    """The settings as plain data: the recipe (or that of the run to go on with), then the flags."""
    from bertsmith.toml import override, read_toml

    if run is not None and not (run / RECIPE).exists():
        raise InputError(f"--resume: {str(run)!r} holds no run ({RECIPE} is missing)")
    if recipe is None and run is not None:
        recipe = run / RECIPE
    if recipe is None:
        raise InputError("no recipe is given; recipes/ has some to start from")
    plain = override(read_toml(recipe), assignments)
    if data is not None:
        plain["data"] = str(data)
    if seed is not None:
        plain = override(plain, [f"run.seed={seed}"])
    return plain


def _run(settings: "PretrainSettings", out: Path, *, device: str, resume: bool, force: bool) -> dict[str, Any]:
    from accelerate import PartialState

    from bertsmith.checkpoint.files import read_json
    from bertsmith.checkpoint.store import write_model
    from bertsmith.commands.output import check_out, claim, write_result
    from bertsmith.commands.pretrain_report import write_report
    from bertsmith.toml import read_toml, to_toml
    from bertsmith.training.pretraining import PretrainSettings, make_trainer

    state = PartialState(cpu=device == "cpu" or None)
    recorded = out / RECIPE
    if resume:
        if (out / "result.json").exists() and read_json(out / "result.json").get("is_finished"):
            steps = read_json(out / "result.json")["steps"]
            raise InputError(f"the run in {str(out)!r} is finished ({steps} steps); there is nothing to resume")
        earlier = PretrainSettings.parse(read_toml(recorded), source=str(recorded))
        _check_same(earlier.plain(), settings.plain())
    inputs = [] if settings.data is None else [Path(settings.data)]
    if state.is_main_process and not resume:
        check_out(out, force, *inputs)
    trainer = make_trainer(settings, out, device=device)  # what is wrong with the input must cost no folder
    if state.is_main_process and not resume:
        claim(out, force, *inputs)
        recorded.write_text(to_toml(settings.plain()), encoding="utf-8")
    state.wait_for_everyone()
    progress = trainer.run(resume=resume)
    if not trainer.is_finished:
        trainer.close()
        return {"steps": progress.step, "is_finished": False}
    figures: dict[str, Any] = {"steps": progress.step, "is_finished": True}
    if state.is_main_process:
        figures = _figures(settings, trainer)
        write_model(trainer.model, out)
        write_result(out, figures)
        commands = (
            f'bertsmith inspect {out} --text "Some words." --out maps',
            f"bertsmith export {out} --out hf-model",
        )
        write_report(out, out / "report.html", title=out.name, commands=commands)
        _print_figures(figures, out)
    trainer.close()
    return figures


def _check_same(earlier: dict[str, Any], now: dict[str, Any], path: str = "") -> None:
    """Refuses to resume with other settings than the run began with."""
    for name in earlier:
        where = f"{path}{name}"
        if isinstance(earlier[name], dict) and isinstance(now[name], dict):
            _check_same(earlier[name], now[name], f"{where}.")
        elif earlier[name] != now[name]:
            raise InputError(
                f"--resume: {where} is {now[name]!r} but the run began with {earlier[name]!r}; start a new run for that"
            )


def _figures(settings: "PretrainSettings", trainer: "Trainer") -> dict[str, Any]:
    """Every figure of the run, for result.json."""
    from bertsmith.batches.shards import TokenCorpus
    from bertsmith.batches.statistics import unigram_level
    from bertsmith.models.cost import parameters, training_flops

    progress, config, targets = trainer.progress, trainer.model.config, settings.objective.targets_per_token
    last = trainer.log.of_kind("training")[-1]
    held_out = trainer.log.of_kind("held_out")
    figures: dict[str, Any] = {
        "steps": progress.step,
        "is_finished": True,
        "processes": trainer.processes,
        "parameters": parameters(config),
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "tokens_per_second": round(progress.tokens / max(progress.seconds, 1e-9), 1),
        "training_flops_per_token": training_flops(config, settings.sequences.length, targets),
        "training_loss": last["loss"],
    }
    if held_out:
        part = Path(str(settings.data))
        figures["held_out"] = {name: value for name, value in held_out[-1].items() if name not in ("kind", "step")}
        figures["unigram_level"] = unigram_level(TokenCorpus(part, "train"), TokenCorpus(part, "held_out"))
    return figures


def _print_explanation(settings: "PretrainSettings") -> dict[str, Any]:
    from rich.console import Console

    from bertsmith.toml import to_toml
    from bertsmith.training.pretraining import explain

    facts = explain(settings)
    console = Console()
    console.print(to_toml(settings.plain(), settings.help()), highlight=False, markup=False, soft_wrap=True)
    for name, value in facts.items():
        console.print(f"{name:<26}{value}", highlight=False)
    return dict(facts)


def _print_figures(figures: dict[str, Any], out: Path) -> None:
    from rich.console import Console

    console = Console()
    console.print(f"[bold]{figures['steps']} steps, {figures['tokens']:,} tokens in {figures['seconds']} s[/]")
    if "held_out" in figures:
        loss, level = figures["held_out"]["masked_tokens_loss"], figures["unigram_level"]
        console.print(f"held-out loss {loss:.3f} (unigram level {level:.3f})")
    console.print(f"written to {out}: model.safetensors, report.html, result.json", highlight=False, markup=False)
