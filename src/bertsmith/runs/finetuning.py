"""One fine-tuning run: train, evaluate, write the model, its predictions, the report and the result."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bertsmith.answers.sequences import Answer
from bertsmith.bundled import model_folder
from bertsmith.checkpoint.store import write_model
from bertsmith.errors import InputError
from bertsmith.files import read_json
from bertsmith.models.model import Model
from bertsmith.report.finetuning import SeedRun, build_task_report, render_finetuning_page
from bertsmith.report.page import format_duration
from bertsmith.runs.folder import RunFolder
from bertsmith.runs.output import REPORT, RESULT, write_answers, write_files
from bertsmith.runs.result import Result, StoppedRun, print_plain, spread
from bertsmith.tasks.base import Evaluation, Task
from bertsmith.tasks.data_source import Tables
from bertsmith.tasks.degenerate import has_constant_answers
from bertsmith.tasks.metrics.base import confidence_interval
from bertsmith.tasks.predictor import Predictor, write_task_record
from bertsmith.toml import to_toml
from bertsmith.training.finetuning import AnySettings, FinetuneSettings, make_finetuning, processes_of, read_data
from bertsmith.training.summary import Notice, TrainingSummary, summarise_training

DEGENERATE = (
    "degenerate: the model predicts the same answer for every row of dev; try another seed, a lower learning rate, "
    "more epochs, or a task.metric that does not favour such a model"
)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The metrics of a model on one split."""

    metric: str
    score: float
    interval: tuple[float, float] | None
    """95 % bootstrap confidence interval of the score; None if it is not computed."""
    metrics: dict[str, float] = spread()
    details: dict[str, object] = spread()
    """Further values, such as the signature of BLEU."""


def compute_scores(evaluation: Evaluation, examples: int) -> Scores:
    """Return the scores of an evaluation with the confidence interval of the main metric."""
    return Scores(
        metric=evaluation.metric,
        score=evaluation.score,
        interval=confidence_interval(evaluation, examples),
        metrics=evaluation.metrics,
        details=evaluation.details,
    )


@dataclass(frozen=True, kw_only=True)
class PredictingResult(Result):
    """A result that carries its fine-tuned model."""

    predictor: Predictor | None = field(default=None, repr=False, metadata={"hidden": True})

    @property
    def model(self) -> Model:
        """The fine-tuned model."""
        assert self.predictor is not None
        assert isinstance(self.predictor.model, Model)
        return self.predictor.model

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """Predict labels, numbers, tags, texts … depending on the task."""
        assert self.predictor is not None
        return self.predictor.predict(inputs)


@dataclass(frozen=True, kw_only=True)
class FinetuneResult(PredictingResult):
    """Result of a finished fine-tuning."""

    scores: Scores = spread()
    teacher_score: float | None
    training: TrainingSummary = spread()
    best_step: int
    seed: int
    data: dict[str, Any]
    """Number of rows, labels and truncated sequences by split, and notices about the data."""
    is_degenerate: bool
    """Whether all predictions on dev are the same."""

    @property
    def score(self) -> float:
        return self.scores.score

    @property
    def metric(self) -> str:
        return self.scores.metric


def run_finetuning(
    settings: AnySettings,
    tables: Tables,
    out: Path,
    *,
    start: Model | None = None,
    device: str,
    resume: bool = False,
    force: bool = False,
    prints_data: bool = True,
    prints_folder: bool = True,
) -> FinetuneResult | StoppedRun:
    """Fine-tune with complete settings; write the model, its predictions on dev, the report and the result to `out`.

    `prints_data` and `prints_folder` are False for one of several runs, which repeats neither data notices nor paths.
    """
    data = read_data(divide_batches(settings, device), *tables)
    settings, task = data.settings, data.settings.task
    inputs = input_paths(settings, start)
    # translation runs keep run.keep checkpoints
    temporary = ("checkpoints",) if isinstance(settings, FinetuneSettings) else ()
    with RunFolder(out, settings, inputs=inputs, resume=resume, force=force, device=device, temporary=temporary) as run:
        finetuning = make_finetuning(data, out, start=start, device=device)
        trainer = finetuning.trainer
        if not prints_data:
            trainer.notices = ()
        run.claim()
        progress = trainer.run(resume=resume)
        if not trainer.is_finished:
            trainer.close()
            return StoppedRun(steps=progress.step)
        evaluation, answers = finetuning.evaluate()
        result = FinetuneResult(
            scores=compute_scores(evaluation, len(data.dev)),
            teacher_score=None if finetuning.teacher is None else finetuning.teacher.score,
            training=summarise_training(trainer),
            best_step=progress.best_step,
            seed=settings.run.seed,
            data=finetuning.counts,
            is_degenerate=has_constant_answers(task, data.dev, answers),
            predictor=Predictor(trainer.model.eval(), settings.task_record),
        )
        if run.is_main:
            write_model(trainer.model, out)
            write_task_record(settings.task_record, out)
            write_answers(out / "dev.predictions.jsonl", answers)
            write_files(out / "dev.official", task.files(data.dev, answers))
            notices = [*finetuning.notices, *(notice.text for notice in result.training.notices)]
            write_finetuning_page(
                settings, data.dev, answers, evaluation, result, out, rows=trainer.log.rows, notices=notices
            )
            run.finish(result)
            if trainer.show:
                _print_result(result, out if prints_folder else None)
        trainer.close()
        return result


def read_finetune_result(folder: Path) -> FinetuneResult:
    """Read the result of a finished run from its result.json, without metrics and details."""
    plain = read_json(folder / RESULT)
    summary: dict[str, Any] = {entry.name: plain.get(entry.name) for entry in fields(TrainingSummary)}
    summary["notices"] = tuple(Notice(**notice) for notice in plain["notices"])
    interval = plain.get("interval")
    return FinetuneResult(
        scores=Scores(
            metric=plain["metric"],
            score=plain["score"],
            interval=None if interval is None else (interval[0], interval[1]),
            metrics={},
            details={},
        ),
        teacher_score=plain.get("teacher_score"),
        training=TrainingSummary(**summary),
        best_step=plain["best_step"],
        seed=plain["seed"],
        data=plain["data"],
        is_degenerate=plain["is_degenerate"],
    )


def divide_batches(settings: AnySettings, device: str) -> AnySettings:
    """Set the micro-batch size for several processes; the order of the data depends on it."""
    if not isinstance(settings, FinetuneSettings):
        return settings
    batch, processes = settings.batch, processes_of(device)
    if processes == 1 or batch.micro_examples is not None:
        return settings
    if batch.examples % processes:
        raise InputError(f"batch.examples is {batch.examples}; allowed: a multiple of the {processes} processes")
    return settings.changed(batch=batch.changed(micro_examples=batch.examples // processes))


def input_paths(settings: AnySettings, start: Model | None) -> list[Path]:
    """Return the paths of data and models that a run reads and must not overwrite."""
    distillation = settings.distillation if isinstance(settings, FinetuneSettings) else None
    teacher = None if distillation is None else distillation.teacher
    models = [None if start is not None else settings.model.name, teacher]
    paths = [model_folder(name) for name in models if name is not None]
    paths += [Path(name) for name in (settings.data, settings.dev) if name is not None]
    return [path for path in paths if path.exists()]


def format_score(split: str, scores: Scores) -> str:
    """Return a line with the main metric and its confidence interval."""
    line = f"{split}: {scores.metric} {scores.score:.2f}"
    if scores.interval is None:
        return line
    low, high = scores.interval
    return f"{line} (95 % interval {low:.1f} to {high:.1f})"


def _print_result(result: FinetuneResult, out: Path | None) -> None:
    if result.is_degenerate:
        print_plain(DEGENERATE, style="yellow")
    print_plain(format_score("dev", result.scores))
    if out is not None:
        print_plain(f"written to {out}, see report.html; for new inputs run: bertsmith predict {out}")


def write_finetuning_page(
    settings: AnySettings,
    examples: Sequence[Any],
    answers: Sequence[Answer],
    evaluation: Evaluation,
    result: FinetuneResult,
    out: Path,
    *,
    rows: Sequence[dict[str, Any]],
    notices: Sequence[str],
    runs: Sequence[SeedRun] = (),
) -> None:
    """Write report.html of a fine-tuning run."""
    write_task_page(
        settings.task,
        examples,
        answers,
        evaluation,
        out,
        kind="Fine-tuning",
        split="dev",
        interval=result.scores.interval,
        facts=_facts(settings, result),
        rows=rows,
        runs=runs,
        settings=to_toml(settings.plain()),
        notices=notices,
    )


def write_task_page(
    task: Task[Any],
    examples: Sequence[Any],
    answers: Sequence[Answer],
    evaluation: Evaluation,
    out: Path,
    *,
    kind: str,
    split: str,
    interval: tuple[float, float] | None,
    facts: dict[str, str],
    rows: Sequence[dict[str, Any]] = (),
    runs: Sequence[SeedRun] = (),
    notices: Sequence[str] = (),
    settings: str = "",
) -> None:
    """Write report.html for the predictions on one split."""
    report = build_task_report(
        task,
        examples,
        answers,
        evaluation,
        title=out.resolve().name,
        kind=kind,
        split=split,
        interval=interval,
        rows=rows,
        runs=runs,
        notices=notices,
        facts=facts,
        settings=settings,
    )
    (out / REPORT).write_text(render_finetuning_page(report), encoding="utf-8")


def _facts(settings: AnySettings, result: FinetuneResult) -> dict[str, str]:
    """Return the facts about data, model and training shown on the page."""
    data, training, run = result.data, result.training, settings.run
    facts = {
        "Task": settings.task.kind + (f" ({settings.task.name})" if settings.task.name else ""),
        "Data": settings.data or "given in Python",
        "Training examples": f"{data['train']['rows']:,}",
        "Dev examples": f"{data['dev']['rows']:,}",
        "Truncated examples": f"{data['train'].get('cut', 0):,}",
        "Model": settings.model.name,
        "Parameters": f"{training.parameters:,}",
        "Learning rate": f"{settings.optimizer.learning_rate:g}",
        "Warm-up": f"{settings.schedule.warmup:.0%} of the steps",
    }
    if isinstance(settings, FinetuneSettings):
        facts |= {"Epochs": f"{settings.run.epochs:g}", "Examples per step": f"{settings.batch.examples}"}
    else:
        facts |= {"Tokens per step": f"{settings.batch.tokens:,}"}
    facts |= {
        "Max sequence length": f"{settings.sequences.length} tokens",
        "Checkpoint": f"step {result.best_step if run.choose == 'best' else training.steps:,}",
        "Steps": f"{training.steps:,}",
        "Seed": f"{run.seed}",
        "Time": format_duration(training.seconds),
    }
    if isinstance(settings, FinetuneSettings) and settings.encoder.layer_decay != 1:
        facts["Layer-wise rate decay"] = f"{settings.encoder.layer_decay:g}"
    if isinstance(settings, FinetuneSettings) and settings.encoder.frozen != "none":
        facts["Frozen"] = {"embedding": "the embedding", "all": "the encoder"}[settings.encoder.frozen]
    return facts
