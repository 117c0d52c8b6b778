"""Fine-tuning an encoder for a task: settings from the data, the run, what it leaves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from bertsmith.bundled import model_folder
from bertsmith.commands.run import carry_out, print_explanation, run_figures
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.models.model import Model
    from bertsmith.recipes.finetune import Completed
    from bertsmith.tasks.predictor import Predictor
    from bertsmith.text.rows import Table
    from bertsmith.training.finetuning import FinetuneSettings, Finetuning
    from bertsmith.training.trainer import Trainer


class Tables(NamedTuple):
    """The rows a fine-tuning learns from and those it is evaluated on."""

    train: "Table"
    dev: "Table"
    notices: tuple[str, ...] = ()
    """What is to be said of them before anything is learned."""


class Told(NamedTuple):
    """What a run prints besides its progress and its score."""

    data: bool = True
    """What is to be known of the data, before training."""
    end: bool = True
    """Where everything lies, and what to do with it."""


TELL_ALL = Told()


class Finetuned(dict[str, Any]):
    """The figures of a fine-tuning; `predict` answers with the model."""

    predictor: "Predictor"

    @property
    def model(self) -> "Model":
        """The fine-tuned model."""
        from bertsmith.models.model import Model

        assert isinstance(self.predictor.model, Model)
        return self.predictor.model

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """The answer for each input: a label, a number, tags, a text … as the task has it."""
        return self.predictor.predict(inputs)


def is_translation(plain: Mapping[str, Any], task: str | None) -> bool:
    """Whether the settings are those of a translation: told so, a model that writes, or columns to go between."""
    from bertsmith.checkpoint.source import check_name
    from bertsmith.models.published import preset

    if task is not None or "task" in plain:
        return task == "translation"
    source = plain["model"]
    if "preset" in source:
        return preset(source["preset"]).decoder is not None
    if "folder" not in source:
        return False
    check_name(source["folder"])  # before its data is looked at, of which more can be wrong
    config = model_folder(source["folder"]) / "config.json"
    if config.is_file():
        try:
            described = json.loads(config.read_text(encoding="utf-8"))
        except ValueError:
            return False  # what is wrong with it is said where the model is loaded
        return described.get("model_type") == "marian" or bool(described.get("model", {}).get("decoder"))
    return "source" in plain or "target" in plain


def task_settings(
    plain: dict[str, Any],
    task: str | None,
    columns: Sequence[str],
    train: Sequence[Any] | None,
    dev: Sequence[Any] | None,
    *,
    source: str,
) -> tuple["FinetuneSettings", Tables]:
    """The settings with the task that the data shows, and the data."""
    from bertsmith.tasks.data_source import held_out, task_parts
    from bertsmith.tasks.recognise import given_rows, recognise
    from bertsmith.training.finetuning import FinetuneSettings

    notices: list[str] = []
    rows, answered = None, None
    if train is not None:
        rows, answered = given_rows(train, "train"), None if dev is None else given_rows(dev, "dev")
    elif dev is not None:
        raise InputError("dev is given and train is not; give both, or data")
    elif plain.get("data") is None:
        raise InputError(
            "data is not given: pass --data with a folder that holds train.jsonl and dev.jsonl, a file, or a name on "
            "the hub"
        )
    else:
        parts = task_parts(plain["data"])
        rows = parts.read("train")
        answered = None if plain.get("dev") is not None else parts.find("dev")
    if plain.get("dev") is not None:
        if answered is not None:
            raise InputError(f"dev is {plain['dev']!r} and rows of dev are given as well; allowed: one of them")
        answered = task_parts(plain["dev"], file_is="dev").read("dev")
    if "kind" not in plain.get("task", {}) or task is not None or columns:
        found = recognise(rows, task, columns, plain.get("task", {}), plain.get("data"), notices=notices)
        plain = {**plain, "task": found}
    settings = FinetuneSettings.parse(plain, source=source)
    if answered is None:
        # all labels are known before rows are taken away, so that none is new to what is held out
        settings = settings.changed(task=settings.task.resolve(rows))
        rows, answered, said = held_out(settings.task, rows, "there is no dev part")
        notices.append(said)
    return settings, Tables(rows, answered, tuple(notices))


def resolved(
    settings: "FinetuneSettings", plain: Mapping[str, Any], tables: Tables, start: "Model | None" = None
) -> "Completed":
    """The settings with the papers' ones wherever `plain`, which they were read from, is silent."""
    from bertsmith.recipes.finetune import completed

    if start is not None and settings.model.overrides:
        raise InputError("model.overrides is given with a model in Python; allowed: with a preset or a folder")
    config = settings.model.described_config() if start is None else start.config
    return completed(settings, plain, config, len(tables.train))


def finetune_task(
    whole: "Completed",
    tables: Tables,
    out: Path | None,
    *,
    start: "Model | None" = None,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
    told: Told = TELL_ALL,
) -> Finetuned:
    """Trains and returns the figures with the model; without a folder nothing is kept on disk."""
    from bertsmith.training.finetune_costs import explain as explanation
    from bertsmith.training.finetuning import read_data

    settings = whole.settings
    if explain:
        data = read_data(settings, *tables)
        facts = {"defaults from": whole.source, **explanation(data, start)}
        return Finetuned(print_explanation(data.settings, facts))
    if out is not None:
        return _run(settings, tables, out, start=start, device=device, resume=resume, force=force, told=told)
    if settings.data is not None and start is None:
        raise InputError("--out is not given: it names the folder to write")
    with TemporaryDirectory(prefix="bertsmith-") as folder:
        return _run(settings, tables, Path(folder) / "run", start=start, device=device, told=Told(end=False))


def _run(
    settings: "FinetuneSettings",
    tables: Tables,
    out: Path,
    *,
    start: "Model | None",
    device: str,
    resume: bool = False,
    force: bool = False,
    told: Told = TELL_ALL,
) -> Finetuned:
    from bertsmith.tasks.predictor import Predictor
    from bertsmith.training.finetuning import make_finetuning, read_data

    data = read_data(_divided(settings, device), *tables)
    settings = data.settings
    made: list[Finetuning] = []

    def make() -> "Trainer":
        made.append(make_finetuning(data, out, start=start, device=device))
        if not told.data:
            made[0].trainer.notices = ()
        return made[0].trainer

    inputs = input_paths(settings, start)
    figures = carry_out(
        settings,
        out,
        inputs=inputs,
        make=make,
        finish=lambda trainer: _finish(settings, made[0], out, told),
        device=device,
        resume=resume,
        force=force,
    )
    result = Finetuned(figures)
    if made[0].trainer.is_finished:
        result.predictor = Predictor(made[0].trainer.model.eval(), settings.task_record)
    return result


def input_paths(settings: "FinetuneSettings", start: "Model | None") -> list[Path]:
    """What a run reads and must not be written to: its data and its model, where they are on disk."""
    teacher = None if settings.distillation is None else settings.distillation.teacher
    models = [None if start is not None else settings.model.name, teacher]
    paths = [model_folder(name) for name in models if name is not None]
    paths += [Path(name) for name in (settings.data, settings.dev) if name is not None]
    return [path for path in paths if path.exists()]


def _divided(settings: "FinetuneSettings", device: str) -> "FinetuneSettings":
    """The settings with what each of several processes computes at a time, on which the order of the data depends."""
    from bertsmith.training.finetuning import processes_of

    batch, processes = settings.batch, processes_of(device)
    if processes == 1 or batch.micro_examples is not None:
        return settings
    if batch.examples % processes:
        raise InputError(f"batch.examples is {batch.examples}; allowed: a multiple of the processes, {processes}")
    return settings.changed(batch=batch.changed(micro_examples=batch.examples // processes))


def _finish(settings: "FinetuneSettings", made: "Finetuning", out: Path, told: "Told") -> dict[str, Any]:
    """Writes the model, what it answers on dev, and its figures; returns these."""
    import shutil

    from rich.console import Console

    from bertsmith.checkpoint.store import write_model
    from bertsmith.commands.task_report import interval_of, write_finetuning_report
    from bertsmith.runs.output import write_answers, write_files, write_result
    from bertsmith.tasks.degenerate import answers_alike
    from bertsmith.tasks.predictor import write_task_record

    trainer = made.trainer
    write_model(trainer.model, out)
    write_task_record(settings.task_record, out)
    evaluation = made.evaluate()
    write_answers(out / "dev.predictions.jsonl", made.evaluator.answers)
    write_files(out / "dev.official", settings.task.files(made.evaluator.examples, made.evaluator.answers))
    is_degenerate = answers_alike(settings.task, made.evaluator.examples, made.evaluator.answers)
    figures = {
        "metric": evaluation.metric,
        "score": evaluation.score,
        **interval_of(evaluation, len(made.evaluator.examples)),
        **evaluation.metrics,
        **({} if made.teacher is None else {"teacher_score": made.teacher.score}),
        **run_figures(trainer),
        "best_step": trainer.progress.best_step,
        "seed": settings.run.seed,
        "data": made.counts,
        "is_degenerate": is_degenerate,
    }
    write_result(out, figures)
    write_finetuning_report(settings, made, evaluation, out, figures)
    # the model is written; what it took to get there is not needed
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    if trainer.show:
        console = Console()
        if is_degenerate:
            console.print(DEGENERATE, style="yellow", markup=False)
        console.print(score_line("dev", figures), markup=False, highlight=False)
        if told.end:
            console.print(
                f"written to {out}: report.html tells more; answer new inputs with bertsmith predict {out}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    return figures


def score_line(part: str, figures: Mapping[str, Any]) -> str:
    """The main figure in words, with its interval where there is one.

    >>> score_line("dev", {"metric": "f1", "score": 83.9, "interval": [80.0, 87.5]})
    'dev: f1 83.90 (95 % interval 80.0 to 87.5)'
    """
    line = f"{part}: {figures['metric']} {figures['score']:.2f}"
    if "interval" not in figures:
        return line
    low, high = figures["interval"]
    return f"{line} (95 % interval {low:.1f} to {high:.1f})"


DEGENERATE = (
    "degenerate: the model gives one and the same answer to all of dev; try another seed, a lower learning rate, more "
    "epochs, or another task.metric if that prefers such a model"
)
