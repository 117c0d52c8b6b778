"""report.html of a fine-tuning and of an evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.commands.finetune_task import Tables
    from bertsmith.tasks.base import Evaluation, Task
    from bertsmith.tasks.predictor import Predictor
    from bertsmith.training.finetuning import FinetuneSettings, Finetuning

REPORT = "report.html"


def interval_of(evaluation: "Evaluation", examples: int) -> dict[str, list[float]]:
    """The 95 % interval of the main figure, as result.json has it; nothing where there is none."""
    from bertsmith.tasks.metrics.base import confidence_interval

    found = confidence_interval(evaluation, examples)
    return {} if found is None else {"interval": list(found)}


def write_finetuning_report(
    settings: "FinetuneSettings",
    made: "Finetuning",
    evaluation: "Evaluation",
    out: Path,
    figures: Mapping[str, Any],
) -> None:
    """Nothing; report.html in the folder of the run tells how good its model is on dev."""
    from bertsmith.toml import to_toml

    write_report(
        out,
        settings.task,
        made.evaluator.examples,
        made.evaluator.answers,
        evaluation,
        figures,
        kind="Fine-tuning",
        split="dev",
        facts=_facts(settings, figures),
        rows=made.trainer.log.rows,
        settings=to_toml(settings.plain()),
        notices=[*made.notices, *(notice["text"] for notice in figures.get("notices", ()))],
    )


def write_search_report(
    settings: "FinetuneSettings", predictor: "Predictor", tables: "Tables", out: Path, figures: Mapping[str, Any]
) -> None:
    """Nothing; report.html in the folder of several runs tells of the best one's model on dev, and of all the runs."""
    from bertsmith.checkpoint.files import read_json
    from bertsmith.toml import to_toml
    from bertsmith.training.log import read_log

    task = predictor.task
    examples = task.examples(tables.dev)
    answers = predictor.answers(examples)
    evaluation = task.evaluate(examples, answers)
    own = read_json(out / figures["best"]["run"] / "result.json")
    write_report(
        out,
        task,
        examples,
        answers,
        evaluation,
        {**own, "runs": [run for run in figures["runs"].values() if "score" in run]},
        kind="Fine-tuning",
        split="dev",
        facts=_facts(settings, own),
        rows=read_log(out / "log.jsonl"),
        settings=to_toml(settings.plain()),
        notices=[*own["data"]["notices"], figures["note"]],
    )


def write_report(
    out: Path,
    task: "Task[Any]",
    examples: Sequence[Any],
    answers: Sequence[Mapping[str, Any]],
    evaluation: "Evaluation",
    figures: Mapping[str, Any],
    **told: Any,
) -> None:
    """Nothing; report.html in `out` tells of some answers, of the interval and the runs in `figures`, and what else is
    told."""
    from bertsmith.report.finetuning import SeedRun, build_task_report, render_finetuning_page

    interval = figures.get("interval")
    report = build_task_report(
        task,
        examples,
        answers,
        evaluation,
        title=out.resolve().name,
        interval=None if interval is None else (interval[0], interval[1]),
        runs=[SeedRun(run["score"], run.get("seed"), run.get("learning_rate")) for run in figures.get("runs", ())],
        **told,
    )
    (out / REPORT).write_text(render_finetuning_page(report), encoding="utf-8")


def _facts(settings: "FinetuneSettings", figures: Mapping[str, Any]) -> dict[str, str]:
    """What was learned from, and the settings that matter."""
    from bertsmith.report.page import format_duration

    run, encoder, data = settings.run, settings.encoder, figures["data"]
    facts = {
        "Task": settings.task.kind + (f" ({settings.task.name})" if settings.task.name else ""),
        "Data": settings.data or "given in Python",
        "Training examples": f"{data['train']['rows']:,}",
        "Dev examples": f"{data['dev']['rows']:,}",
        "Cut as too long": f"{data['train'].get('cut', 0):,}",
        "Model": settings.model.name,
        "Parameters": f"{figures['parameters']:,}",
        "Learning rate": f"{settings.optimizer.learning_rate:g}",
        "Warm-up": f"{settings.schedule.warmup:.0%} of the steps",
        "Epochs": f"{run.epochs:g}",
        "Examples a step": f"{settings.batch.examples}",
        "Longest sequence": f"{settings.sequences.length} tokens",
        "Weights kept": f"step {figures['best_step'] if run.choose == 'best' else figures['steps']:,}",
        "Steps": f"{figures['steps']:,}",
        "Seed": f"{run.seed}",
        "Time": format_duration(figures["seconds"]),
    }
    if encoder.layer_decay != 1:
        facts["Rate of each layer below"] = f"× {encoder.layer_decay:g}"
    if encoder.frozen != "none":
        facts["Frozen"] = {"embedding": "the embedding", "all": "the encoder"}[encoder.frozen]
    return facts
