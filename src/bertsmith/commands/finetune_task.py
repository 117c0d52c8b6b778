"""Fine-tuning an encoder for a task: settings from the data, the run, what it leaves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple

from bertsmith.commands.run import carry_out, print_explanation, run_figures
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.tasks.predictor import Predictor
    from bertsmith.text.tables import Table
    from bertsmith.training.finetuning import FinetuneSettings, Finetuning
    from bertsmith.training.trainer import Trainer


class Tables(NamedTuple):
    """The rows a fine-tuning learns from and those it is evaluated on."""

    train: "Table"
    dev: "Table"
    notices: tuple[str, ...] = ()
    """What is to be said of them before anything is learned."""


class Finetuned(dict[str, Any]):
    """The figures of a fine-tuning; `predict` answers with the model."""

    predictor: "Predictor"

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """The answer for each input: a label, a number, tags, a text … as the task has it."""
        return self.predictor.predict(inputs)


def is_translation(plain: Mapping[str, Any], task: str | None) -> bool:
    """Whether the settings are those of a translation: told so, a model that writes, or columns to go between."""
    from bertsmith.models.published import PRESETS, preset
    from bertsmith.training.starting import check_name

    if task is not None or "task" in plain:
        return task == "translation"
    name = plain["model"].get("name")
    if name in PRESETS:
        return preset(name).decoder is not None
    check_name(str(name))  # before its data is looked at, of which more can be wrong
    config = Path(str(name)) / "config.json"
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
    from bertsmith.tasks.held_out import held_out
    from bertsmith.tasks.recognise import given_rows, recognise
    from bertsmith.text.tables import parts_of
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
        parts = parts_of(plain["data"])
        rows, answered = parts.read("train"), parts.find("dev")
    if "task" not in plain or task is not None or columns:
        plain = {**plain, "task": recognise(rows, task, columns, plain.get("task", {}), notices=notices)}
    settings = FinetuneSettings.parse(plain, source=source)
    if answered is None:
        # all labels are known before rows are taken away, so that none is new to what is held out
        settings = settings.changed(task=settings.task.settled(rows))
        rows, answered, said = held_out(settings.task, rows, "there is no dev part")
        notices.append(said)
    return settings, Tables(rows, answered, tuple(notices))


def finetune_task(
    settings: "FinetuneSettings",
    tables: Tables,
    out: Path | None,
    *,
    device: str,
    explain: bool,
    resume: bool,
    force: bool,
) -> Finetuned:
    """Trains and returns the figures with the model; without a folder nothing is kept."""
    from bertsmith.tasks.predictor import KeptTask, Predictor
    from bertsmith.training.finetuning import make_finetuning, read_data

    if explain:
        return Finetuned(print_explanation(settings, {}))
    if out is None and settings.data is not None:
        raise InputError("--out is not given: it names the folder to write")
    data = read_data(settings, *tables)
    settings, folder = data.settings, out or Path(mkdtemp()) / "run"
    made: list[Finetuning] = []

    def make() -> "Trainer":
        made.append(make_finetuning(data, folder, device=device))
        return made[0].trainer

    inputs = [] if settings.data is None else [Path(settings.data)]
    inputs += [] if settings.model.is_preset else [Path(settings.model.name)]
    figures = carry_out(
        settings,
        folder,
        inputs=inputs,
        make=make,
        finish=lambda trainer: _finish(settings, made[0], folder),
        device=device,
        resume=resume,
        force=force,
    )
    result = Finetuned(figures)
    if made[0].trainer.is_finished:
        kept = KeptTask(task=settings.task, sequences=settings.sequences)
        result.predictor = Predictor(made[0].trainer.model.eval(), kept)
    return result


def _finish(settings: "FinetuneSettings", made: "Finetuning", out: Path) -> dict[str, Any]:
    """Writes the model, what it answers on dev, and its figures; returns these."""
    import shutil

    from rich.console import Console

    from bertsmith.checkpoint.store import write_model
    from bertsmith.commands.output import write_result
    from bertsmith.tasks.predictor import KeptTask, write_kept

    trainer = made.trainer
    write_model(trainer.model, out)
    write_kept(KeptTask(task=settings.task, sequences=settings.sequences), out)
    judgement = made.judgement
    write_answers(out / "dev.predictions.jsonl", made.judge.answers)
    write_files(out / "dev.official", settings.task.files(made.judge.examples, made.judge.answers))
    figures = {
        "metric": judgement.metric,
        "score": judgement.score,
        **judgement.figures,
        **run_figures(trainer),
        "best_step": trainer.progress.best_step,
        "seed": settings.run.seed,
        "data": made.counts,
    }
    write_result(out, figures)
    shutil.rmtree(
        out / "checkpoints", ignore_errors=True
    )  # the model is written; what it took to get there is not needed
    if trainer.show:
        Console().print(
            f"dev: {judgement.metric} {judgement.score:.2f}; written to {out}", markup=False, highlight=False
        )
    return figures


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes files by name; no folder is made where there are none."""
    for name, content in files.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def write_answers(path: Path, answers: Sequence[Mapping[str, Any]]) -> None:
    """Writes answers, one object a line."""
    with path.open("w", encoding="utf-8") as file:
        for answer in answers:
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
