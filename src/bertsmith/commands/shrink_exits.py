"""Early exit from its settings: the exits learn, the rule is chosen on dev, and what they leave."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.commands.finetune_task import Tables
from bertsmith.commands.run import carry_out, print_explanation, run_figures
from bertsmith.commands.shrink_work import inputs_of

if TYPE_CHECKING:
    from bertsmith.models.model import Model
    from bertsmith.shrinking.exits import ExitAnswers, ExitSettings, RuleFigures
    from bertsmith.training.trainer import Trainer


def shrink_exits(
    settings: "ExitSettings",
    tables: Tables,
    out: Path,
    *,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Trains the exits and chooses the rule; returns the figures."""
    from bertsmith.checkpoint.store import load
    from bertsmith.shrinking.elastic import encoded, steady
    from bertsmith.shrinking.exits import answer_of, make_exits, with_exits
    from bertsmith.training.finetuning import processes_of
    from bertsmith.training.hardware import device_type

    answer_of(settings.task)
    task = settings.task
    examples = {"train": task.augment(task.examples(tables.train)), "dev": task.examples(tables.dev)}
    model = with_exits(steady(load(settings.model).float()), settings)
    if explain:
        return print_explanation(settings, _costs(settings, model, len(examples["train"])))
    train, dev = ((examples[name], encoded(settings, model, examples[name])) for name in ("train", "dev"))

    def make() -> "Trainer":
        return make_exits(
            settings,
            model,
            train,
            dev,
            out,
            processes=processes_of(device),
            device=device,
            notices=tables.notices,
        )

    return carry_out(
        settings,
        out,
        inputs=inputs_of(settings),
        make=make,
        finish=lambda trainer: _finish(settings, trainer, out),
        device=device_type(device),
        resume=resume,
        force=force,
    )


def _finish(settings: "ExitSettings", trainer: "Trainer", out: Path) -> dict[str, Any]:
    """Chooses the rule, writes the model with it and the figures; returns these."""
    import shutil

    from bertsmith.checkpoint.store import write_model
    from bertsmith.engines.exit_runner import ExitRunner
    from bertsmith.models.exiting import exits_config, with_rule
    from bertsmith.runs.output import write_result
    from bertsmith.shrinking.exits import ExitJudge, best_row, rules_of
    from bertsmith.tasks.predictor import item_outputs, write_task_record

    evaluator, model = trainer.evaluator, trainer.model
    assert isinstance(evaluator, ExitJudge)
    answers = evaluator.answers(model)
    *on_the_way, last = evaluator.evaluations(answers)
    config = exits_config(model)
    rules = rules_of(settings.measure, settings.leave.thresholds, len(config.layers), _within(settings, answers))
    rows = evaluator.rows(model, answers, rules)
    place = best_row(rows, last.score, settings.leave.tolerance)
    rule = None if place is None else rules[place]
    with_rule(model, rule)
    used: dict[str, Any] = {"score": last.score, "mean_layers": float(len(model.config.encoder.layers))}
    if rule is not None:
        runner = ExitRunner(model, rule)
        outputs = item_outputs(runner, evaluator.features, settings.sequences)
        used = {"score": evaluator.evaluate(outputs).score, "mean_layers": runner.mean_layers}
    write_model(model.cpu(), out)
    write_task_record(settings.task_record, out)
    figures = {
        "metric": last.metric,
        **used,
        "full_score": last.score,
        "layers": len(model.config.encoder.layers),
        "exit_scores": {str(layer): own.score for layer, own in zip(config.layers, on_the_way, strict=True)},
        "rule": None if rule is None else rule.plain(),
        "table": [row.plain() for row in rows],
        "tolerance": settings.leave.tolerance,
        "seed": settings.run.seed,
        **run_figures(trainer),
    }
    write_result(out, figures)
    # the model is written; what it took to get there is not needed
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    _print(settings, figures, rows, place, out)
    return figures


def _within(settings: "ExitSettings", answers: "ExitAnswers") -> float:
    """How far apart two numbers may be that count as the same; 0 where answers are no numbers."""
    import numpy as np

    if settings.answer != "value":
        return 0.0
    return settings.leave.within or 0.1 * float(np.std([own[0] for own in answers.by_head[-1]]))


def _print(
    settings: "ExitSettings", figures: dict[str, Any], rows: Sequence["RuleFigures"], place: int | None, out: Path
) -> None:
    """Nothing; the table of thresholds is shown, the chosen one marked."""
    from rich.console import Console
    from rich.table import Table

    title = f"dev: {figures['metric']}; all {figures['layers']} layers have {figures['full_score']:.2f}"
    table = Table(settings.measure, "score", "layers", "GFLOP", "saved", "", title=title)
    for number, row in enumerate(rows):
        table.add_row(
            f"{row.threshold:g}",
            f"{row.score:.2f}",
            f"{row.mean_layers:.2f}",
            f"{row.flops / 1e9:.3f}",
            f"{row.saving:.1%}",
            "chosen" if number == place else "",
        )
    console = Console()
    console.print(table)
    said = "no threshold saves anything within the tolerance, so all layers are computed"
    if place is not None:
        said = f"{figures['score']:.2f} with {figures['mean_layers']:.2f} layers in the mean"
    line = f"{said}; written to {out}: bertsmith evaluate uses it, benchmarks/exits.py tells what it is worth"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _costs(settings: "ExitSettings", model: "Model", examples: int) -> dict[str, str]:
    """What the settings cost, for --explain."""
    from bertsmith.models.cost import parameters
    from bertsmith.models.exiting import exits_config

    config = model.config
    plain = config.changed(heads=tuple(head for head in config.heads if head.kind != "exits"))
    steps = settings.run.steps(-(-examples // settings.batch.examples))
    layers = ", ".join(str(layer) for layer in exits_config(model).layers)
    return {
        "exits after layers": layers,
        "weights of the exits": f"{parameters(config) - parameters(plain):,}",
        "steps": f"{steps:,}",
    }
