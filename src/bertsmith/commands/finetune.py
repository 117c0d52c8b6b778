"""`bertsmith finetune`: a model and a task → a model for the task. For now the task is pairs of texts: translation."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertsmith.commands.run import carry_out, print_explanation, recipe_of, run_figures
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.training.trainer import Trainer
    from bertsmith.training.translation import TranslationTask


def finetune(
    model: str | None = None,
    *,
    data: Path | None = None,
    out: Path | None = None,
    recipe: Path | None = None,
    source: str | None = None,
    target: str | None = None,
    set: list[str] | None = None,
    seed: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Train an encoder-decoder on pairs of texts, evaluate it on dev, and leave it in a folder.

    Parameters
    ----------
    model
        A preset (transformer-small …), whose weights are fresh and whose tokenizer is learned from the training pairs,
        or the folder of a model. It stands for the whole [model] of the recipe, unless that has the same name.
    data
        A folder with train.jsonl and dev.jsonl (also .gz, .xz, .zst), one pair a line.
    out
        The folder to write: the model, log.jsonl, checkpoints, recipe.toml, translations of dev and result.json.
    recipe
        A TOML file with the settings. With --resume the run's own recipe is used.
    source
        The column to translate from; found out where exactly two columns hold text.
    target
        The column to translate to.
    set
        One setting over the recipe, such as optimizer.learning_rate=1e-3; may be given several times.
    seed
        Of weights, data order and dropout.
    device
        Where to compute; "auto" takes a GPU if there is one.
    explain
        Print the resolved settings, parameters and FLOPs per token, then stop.
    resume
        Go on from the newest whole checkpoint in --out.
    force
        Replace an earlier run in --out.
    """
    from bertsmith.training.translation import TranslationSettings, make_trainer, read_task
    from bertsmith.training.translation import explain as explanation

    data, out, recipe = (None if path is None else Path(path) for path in (data, out, recipe))
    if resume and out is None:
        raise InputError("--resume needs --out with the folder of the run")
    given = recipe_of(recipe, out if resume else None) or {}
    flags = {"data": None if data is None else str(data), "source": source, "target": target}
    plain = _with_flags(given, model, flags, set or [], seed)
    settings = TranslationSettings.parse(plain, source=str(recipe or "settings"))
    if explain:
        return print_explanation(settings, explanation(settings))
    if out is None:
        raise InputError("--out is not given: it names the folder to write")
    task = read_task(settings)
    settings = task.settings

    def make() -> "Trainer":
        trainer = make_trainer(task, out, device=device)
        if trainer.show:
            _print_task(task, trainer)
        return trainer

    inputs = [Path(str(settings.data))]
    inputs += [] if settings.model.is_preset else [Path(settings.model.name)]
    return carry_out(
        settings,
        out,
        inputs=inputs,
        make=make,
        finish=lambda trainer: _finish(task, trainer, out),
        device=device,
        resume=resume,
        force=force,
    )


def _with_flags(
    given: dict[str, Any], model: str | None, flags: dict[str, Any], assignments: list[str], seed: int | None
) -> dict[str, Any]:
    """The settings as plain data: the recipe, then the flags."""
    from bertsmith.toml import override

    plain = dict(given)
    if model is not None and plain.get("model", {}).get("name") != str(model):
        plain["model"] = {"name": str(model)}
    if "model" not in plain:
        raise InputError("MODEL is not given and no recipe names one; transformer-small is a preset to start from")
    plain = override(plain, assignments) | {name: value for name, value in flags.items() if value is not None}
    return plain if seed is None else override(plain, [f"run.seed={seed}"])


def _print_task(task: "TranslationTask", trainer: "Trainer") -> None:
    from rich.console import Console

    from bertsmith.training.translation import pair_counts
    from bertsmith.training.translation_metrics import NO_BLEU, has_bleu

    console, counts = Console(), pair_counts(task, trainer)
    lost = [f"{counts[name]} {text}" for name, text in _LOST.items() if counts[name]]
    console.print(
        f"{task.settings.source} → {task.settings.target}: {counts['pairs']:,} pairs to learn from, {len(task.dev):,} "
        f"in dev{'; ' if lost else ''}{', '.join(lost)}",
        highlight=False,
        markup=False,
    )
    if not has_bleu():
        console.print(NO_BLEU, markup=False)


_LOST = {"empty": "left out as empty", "dropped": "left out as too long", "cut": "cut to the longest length"}


def _finish(task: "TranslationTask", trainer: "Trainer", out: Path) -> dict[str, Any]:
    """Writes the model, what it makes of dev, and its figures; returns these."""
    from bertsmith.checkpoint.store import write_model
    from bertsmith.commands.output import write_result
    from bertsmith.commands.translating import evaluated, print_evaluation, write_translations
    from bertsmith.training.translation import pair_counts

    settings = task.settings
    write_model(trainer.model, out)
    evaluation = evaluated(trainer.model, task.dev, settings.generation, settings.sequences, show=trainer.show)
    write_translations(out / "dev.translations.jsonl", task.dev, evaluation.hypotheses)
    # the main figures first, by the names every fine-tuning has
    figures = {**evaluation.figures, **run_figures(trainer), "training_pairs": pair_counts(task, trainer)}
    write_result(out, figures)
    print_evaluation("dev", task.dev, evaluation)
    return figures
