"""What commands that train share: settings from a recipe and flags, the output folder, going on, ending well."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.errors import InputError
from bertsmith.settings import Record

if TYPE_CHECKING:
    from bertsmith.training.trainer import Trainer

RECIPE = "recipe.toml"


def recipe_of(recipe: Path | None, run: Path | None) -> dict[str, Any] | None:
    """The recipe as plain data: the one given, that of the run to go on with, or None."""
    from bertsmith.toml import read_toml

    if run is not None and not (run / RECIPE).exists():
        raise InputError(f"{str(run)!r} holds no run ({RECIPE} is missing)")
    if recipe is None and run is not None:
        recipe = run / RECIPE
    return None if recipe is None else read_toml(recipe)


def carry_out(
    settings: Record,
    out: Path,
    *,
    inputs: list[Path],
    make: Callable[[], "Trainer"],
    finish: Callable[["Trainer"], dict[str, Any]],
    device: str,
    resume: bool,
    force: bool,
    settle: Callable[["Trainer"], Record] | None = None,
) -> dict[str, Any]:
    """Trains and gives the figures; `make` is called before anything is written, `finish` on the main process only.

    `settle` gives the settings to record once the trainer is there: what can only be measured is settled by it.
    """
    from accelerate import PartialState

    from bertsmith.checkpoint.files import read_json
    from bertsmith.runs.output import RESULT, check_out, claim
    from bertsmith.toml import read_toml, to_toml
    from bertsmith.training.interrupts import explained

    state = PartialState(cpu=device == "cpu" or None)
    recorded = out / RECIPE
    if resume:
        if (out / RESULT).exists() and read_json(out / RESULT).get("is_finished"):
            steps = read_json(out / RESULT)["steps"]
            raise InputError(f"the run in {str(out)!r} is finished ({steps} steps); there is nothing to resume")
        earlier = type(settings).parse(read_toml(recorded), source=str(recorded))
        check_same(earlier.plain(), settings.plain())
    if state.is_main_process and not resume:
        check_out(out, force, *inputs)
    trainer = make()  # what is wrong with the input must cost no folder
    if settle is not None and not resume:
        settings = settle(trainer)
    if state.is_main_process and not resume:
        claim(out, force, *inputs)
        recorded.write_text(to_toml(settings.plain()), encoding="utf-8")
    state.wait_for_everyone()
    with explained(out):
        progress = trainer.run(resume=resume)
        figures: dict[str, Any] = {"steps": progress.step, "is_finished": trainer.is_finished}
        if trainer.is_finished and state.is_main_process:
            figures = finish(trainer)
    trainer.close()
    return figures


def print_explanation(settings: Record, facts: dict[str, str]) -> dict[str, Any]:
    """Prints all settings with their help, then the facts; returns these."""
    from rich.console import Console

    from bertsmith.toml import to_toml

    console = Console()
    console.print(to_toml(settings.plain(), settings.help()), highlight=False, markup=False, soft_wrap=True)
    for name, value in facts.items():
        console.print(f"{name:<26}{value}", highlight=False)
    return dict(facts)


def run_figures(trainer: "Trainer") -> dict[str, Any]:
    """The figures every finished run has."""
    from bertsmith.models.cost import parameters_by_part

    progress = trainer.progress
    return {
        "steps": progress.step,
        "is_finished": True,
        "processes": trainer.processes,
        **parameters_by_part(trainer.model.config),
        "tokens": progress.tokens,
        "training_flops": progress.flops,
        "seconds": round(progress.seconds, 1),
        "tokens_per_second": round(progress.tokens / max(progress.seconds, 1e-9), 1),
        "training_loss": trainer.log.of_kind("training")[-1]["loss"],
        "notices": [{"step": row["step"], "text": row["text"]} for row in trainer.log.of_kind("notice")],
    }


def check_same(earlier: dict[str, Any], now: dict[str, Any], path: str = "") -> None:
    """Refuses to resume with other settings than the run began with."""
    for name in earlier:
        where = f"{path}{name}"
        if isinstance(earlier[name], dict) and isinstance(now[name], dict):
            check_same(earlier[name], now[name], f"{where}.")
        elif earlier[name] != now[name]:
            raise InputError(
                f"--resume: {where} is {now[name]!r} but the run began with {earlier[name]!r}; start a new run for that"
            )
