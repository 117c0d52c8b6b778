"""A fine-tuned model's vocabulary cut to what its texts use: from the settings to the folder and its figures."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.commands.finetune_task import Tables
from bertsmith.commands.run import RECIPE, print_explanation
from bertsmith.commands.shrink_work import inputs_of
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.shrinking.vocabulary import CutSettings


def shrink_vocabulary(
    settings: "CutSettings",
    tables: Tables,
    out: Path,
    *,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Cuts the vocabulary and compares the scores on dev before and after; returns the figures."""
    from rich.console import Console

    from bertsmith.checkpoint.store import load, write_model
    from bertsmith.runs.output import check_out, claim, write_result
    from bertsmith.shrinking.vocabulary import cut_vocabulary
    from bertsmith.tasks.predictor import Predictor, write_task_record
    from bertsmith.toml import to_toml
    from bertsmith.training.hardware import device_type

    if resume:
        raise InputError("--resume is given with --method vocabulary, which takes seconds; leave it out")
    task = settings.task
    texts = list(task.texts(task.examples(tables.train)))
    if explain:
        return print_explanation(settings, {"training texts": f"{len(texts):,}"})
    inputs = inputs_of(settings)
    check_out(out, force, *inputs)
    model = load(settings.model)
    kept = settings.task_record
    small, figures = cut_vocabulary(model, texts, settings.vocabulary)
    device = device_type(device)
    before, after = (Predictor(one.to(device).eval(), kept).evaluate(tables.dev)[0] for one in (model, small))
    figures = {
        "metric": after.metric,
        "score": after.score,
        "score_before": before.score,
        **figures,
        "is_finished": True,
    }
    claim(out, force, *inputs)
    (out / RECIPE).write_text(to_toml(settings.plain()), encoding="utf-8")
    write_model(small.cpu(), out)
    write_task_record(kept, out)
    write_result(out, figures)
    Console().print(
        f"dev: {after.metric} {after.score:.2f} (before: {before.score:.2f}) with {figures['pieces_after']:,} of "
        f"{figures['pieces_before']:,} pieces, {figures['megabytes_after']:.1f} of {figures['megabytes_before']:.1f} "
        f"MB; written to {out}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return figures
