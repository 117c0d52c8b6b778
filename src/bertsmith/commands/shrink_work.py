"""What the methods of `bertsmith shrink` share: settings and data of a fine-tuned model, the folder, trainings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bertsmith.bundled import model_folder
from bertsmith.commands.finetune_task import Tables
from bertsmith.commands.run import RECIPE, check_same
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.answers.sequences import Features
    from bertsmith.models.model import Model
    from bertsmith.shrinking.elastic import ElasticSettings
    from bertsmith.shrinking.importance import Importance
    from bertsmith.shrinking.prune.prune import PruneSettings
    from bertsmith.shrinking.settings import ShrinkSettings
    from bertsmith.tasks.base import Evaluation
    from bertsmith.training.trainer import Trainer

Settings = TypeVar("Settings", "ElasticSettings", "PruneSettings")
Own = TypeVar("Own", bound="ShrinkSettings")


@dataclass(frozen=True)
class Work(Generic[Settings]):
    """What all stages have in common."""

    settings: Settings
    out: Path
    teacher: "Model"
    train: tuple[Sequence[Any], "Features"]
    taught: tuple[Sequence[Any], "Features"]
    """What teachers are asked about: the training part, with new rows where these are asked for."""
    dev: tuple[Sequence[Any], "Features"]
    device: str
    processes: int
    is_main: bool

    @property
    def length(self) -> int:
        """The mean length of the sequences of dev, for which costs are told."""
        return max(1, round(float(self.dev[1].tokens.lengths.mean())))

    def evaluate(self, model: "Model") -> "Evaluation":
        """How good a model is on dev; it is moved to where the teacher is."""
        from bertsmith.training.evaluator import Evaluator

        task = self.settings.task.objective(self.train[0]).for_evaluation()
        evaluator = Evaluator(self.settings.task, *self.dev, self.settings.sequences, task)
        return evaluator.evaluate(model.to(self.teacher.device).eval())

    def importance(self, model: "Model") -> "Importance":
        """What the loss over some training examples would change by without each unit of a model."""
        from bertsmith.shrinking.elastic import scoring_batches
        from bertsmith.shrinking.importance import importance

        settings, pad = self.settings, model.require_tokenizer().pad
        batches = scoring_batches(self.train[1], settings.importance, settings.sequences, pad, settings.run.seed)
        return importance(model, settings.task.objective(self.train[0]), batches, settings.importance.gradients)


def shrink_settings(
    kind: type[Own], plain: dict[str, Any], columns: Sequence[str], *, source: str, goes_on: bool = True
) -> tuple[Own, Tables]:
    """The settings of a method with the task of the fine-tuned model, and its data.

    Where learning goes on, the learning rate and the batch are those of the fine-tuning unless others are given.
    """
    from bertsmith.tasks.data_source import held_out, task_parts
    from bertsmith.tasks.predictor import read_task_record
    from bertsmith.tasks.recognise import named_columns

    folder = model_folder(plain["model"])
    if not folder.is_dir():
        raise InputError(f"MODEL is {plain['model']!r}, which is no folder; give that of a fine-tuned model")
    kept = read_task_record(plain["model"])
    if plain.get("data") is None:
        raise InputError("data is not given: pass --data with the folder the model was fine-tuned on")
    parts = task_parts(plain["data"])
    train, dev, notices = parts.read("train"), parts.find("dev"), []
    own = {"task": kept.task.plain(), "sequences": kept.sequences.plain()}
    plain = {**plain, **{name: {**values, **plain.get(name, {})} for name, values in own.items()}}
    plain["task"] |= named_columns(columns, type(kept.task))
    for name in ("kind", "labels"):
        if plain["task"].get(name) != own["task"].get(name):
            given, there = plain["task"].get(name), own["task"].get(name)
            raise InputError(f"task.{name} is {given!r} and the model's is {there!r}; allowed: what it was made for")
    settings = kind.parse(_with_defaults(plain, folder) if goes_on else plain, source=source)
    if dev is None:
        train, dev, said = held_out(settings.task, train, "there is no dev part")
        notices.append(said)
    return settings, Tables(train, dev, tuple(notices))


def _with_defaults(plain: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with the learning rate and the batch of the fine-tuning, where its recipe tells them."""
    from bertsmith.toml import read_toml

    if not (folder / RECIPE).is_file():
        return plain
    recipe = read_toml(folder / RECIPE)
    for group, name in (("optimizer", "learning_rate"), ("batch", "examples")):
        value = recipe.get(group, {}).get(name)
        if value is not None:
            plain[group] = {name: value, **plain.get(group, {})}
    return plain


def fine_tuned(settings: "ShrinkSettings") -> "Model":
    """The model to begin with; a sentence if it has no task."""
    from bertsmith.checkpoint.store import load
    from bertsmith.shrinking.elastic import steady

    model = steady(load(settings.model))
    model.task_head  # noqa: B018 (a sentence if there is none)
    return model


def inputs_of(settings: "ShrinkSettings") -> list[Path]:
    """What a run reads from this machine, which its folder must not be."""
    named = [model_folder(settings.model), *([] if settings.data is None else [Path(settings.data)])]
    return [path for path in named if path.exists()]


def begun(
    settings: Settings,
    tables: Tables,
    out: Path,
    *,
    device: str,
    resume: bool = False,
    force: bool = False,
    others: Sequence[Path] = (),
) -> Work[Settings]:
    """The work of a run whose folder is there, made now or found, with its recipe in it; `others` are read, too."""
    from accelerate import PartialState

    from bertsmith.runs.output import check_out, claim
    from bertsmith.shrinking.elastic import encoded
    from bertsmith.toml import read_toml, to_toml
    from bertsmith.training.finetuning import processes_of
    from bertsmith.training.hardware import device_type

    task = settings.task
    examples = {"train": task.augment(task.examples(tables.train)), "dev": task.examples(tables.dev)}
    teacher = fine_tuned(settings)
    processes = processes_of(device)
    state = PartialState(cpu=device_type(device) == "cpu" or None)
    inputs = [*inputs_of(settings), *others]
    if resume:
        check_same(type(settings).parse(read_toml(out / RECIPE), source=str(out / RECIPE)).plain(), settings.plain())
        if (out / "result.json").is_file():
            raise InputError(f"the run in {str(out)!r} is finished; there is nothing to resume")
    elif state.is_main_process:
        check_out(out, force, *inputs)
    train, dev = ((examples[name], encoded(settings, teacher, examples[name])) for name in ("train", "dev"))
    if state.is_main_process and not resume:
        claim(out, force, *inputs)
        (out / RECIPE).write_text(to_toml(settings.plain()), encoding="utf-8")
    state.wait_for_everyone()
    return Work(
        settings, out, teacher.to(device_type(device)), train, train, dev, device, processes, state.is_main_process
    )


def learned(work: Work[Any], folder: Path, make: Callable[[Path], "Trainer"]) -> tuple["Model | None", float]:
    """The model that a training in a folder gives and the seconds it took, found there if it is done; None where it was
    asked to stop."""
    import shutil

    from bertsmith.checkpoint.files import NewFolder, read_json, write_json
    from bertsmith.checkpoint.store import load, write_model
    from bertsmith.training.interrupts import explained

    done = folder / "model"
    if done.is_dir():
        return load(done), float(read_json(done / "stage.json")["seconds"])
    folder.mkdir(parents=True, exist_ok=True)
    trainer = make(folder)
    with explained(work.out, folder):
        progress = trainer.run(resume=(folder / "checkpoints").is_dir())
        if trainer.is_finished and work.is_main:
            with NewFolder(done) as new:
                write_model(trainer.model, new)
                write_json(new / "stage.json", {"seconds": progress.seconds})
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    is_finished = trainer.is_finished
    trainer.engine.accelerator.wait_for_everyone()  # the others read what the main process has written
    trainer.close(is_last=False)
    return (load(done) if is_finished else None), progress.seconds


def end_together() -> None:
    """Nothing; the processes of a command that has trained for the last time part."""
    from accelerate import PartialState

    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()
