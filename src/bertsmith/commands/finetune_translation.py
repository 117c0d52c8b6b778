"""Fine-tuning on pairs of texts: an encoder-decoder learns to translate."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.bundled import model_folder
from bertsmith.commands.run import carry_out, print_explanation, run_figures
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.training.trainer import Trainer
    from bertsmith.training.translation import TranslationTask


def finetune_translation(
    plain: dict[str, Any], out: Path | None, *, source: str, device: str, explain: bool, resume: bool, force: bool
) -> dict[str, Any]:
    """Trains by settings as plain data, which `source` gave; returns the figures."""
    from bertsmith.training.translation import TranslationSettings, make_trainer, read_task
    from bertsmith.training.translation import explain as explanation

    settings = TranslationSettings.parse(plain, source=source)
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
    inputs += [] if settings.model.is_preset else [model_folder(settings.model.name)]
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
    from bertsmith.commands.translating import evaluated, print_evaluation, write_translations
    from bertsmith.runs.output import write_result
    from bertsmith.training.translation import pair_counts

    settings = task.settings
    write_model(trainer.model, out)
    evaluation = evaluated(trainer.model, task.dev, settings.generation, settings.sequences, show=trainer.show)
    write_translations(out / "dev.translations.jsonl", task.dev, evaluation.hypotheses)
    # the main figures first, by the names every fine-tuning has
    figures = {**evaluation.metrics, **run_figures(trainer), "training_pairs": pair_counts(task, trainer)}
    write_result(out, figures)
    print_evaluation("dev", task.dev, evaluation)
    return figures
