"""The parts that all shrink methods share: settings, the fine-tuned model with its data, and trainings in stages."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from accelerate import PartialState

from bertsmith.answers.sequences import Features
from bertsmith.checkpoint.files import NewFolder, read_json, write_json
from bertsmith.checkpoint.source import FineTunedSource, expand_source
from bertsmith.checkpoint.store import load, write_model
from bertsmith.data.examples import ExampleConfig, ExamplePlan, ExampleReader, TaskBatch
from bertsmith.errors import InputError
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.models.build import rebuild
from bertsmith.models.model import Model
from bertsmith.settings import Plain, Record
from bertsmith.shrinking.importance import Importance, ImportanceConfig, importance
from bertsmith.tasks import AnyTask
from bertsmith.tasks.base import Encoding, Evaluation
from bertsmith.tasks.data_source import held_out, named_columns, task_splits
from bertsmith.tasks.predictor import TaskRecord, read_task_record
from bertsmith.text.rows import Table
from bertsmith.toml import read_toml
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.finetuning import processes_of
from bertsmith.training.interrupts import explained
from bertsmith.training.run_config import device_type
from bertsmith.training.trainer import Trainer

RECIPE = "recipe.toml"


class ShrinkSettings(Record):
    """Settings that all methods have: a fine-tuned model, its task and its data."""

    method: str
    data: str | None = None
    """A folder with the splits of the task, a file, or a name on the hub."""
    model: FineTunedSource
    """The folder of the fine-tuned model."""
    task: AnyTask
    sequences: ExampleConfig = ExampleConfig()

    @property
    def task_record(self) -> TaskRecord:
        """The task record to write beside the model."""
        return TaskRecord(task=self.task, sequences=self.sequences)

    @property
    def inputs(self) -> list[Path]:
        """The local folders and files that the run reads; its output folder must be another one."""
        paths = [self.model.path, *([] if self.data is None else [Path(self.data)])]
        return [path for path in paths if path.exists()]


AnySettings = TypeVar("AnySettings", bound=ShrinkSettings)


class TaskTables(NamedTuple):
    """The rows to train on and to evaluate on, and notices about them."""

    train: Table
    dev: Table
    notices: tuple[str, ...] = ()


def read_settings(
    kind: type[AnySettings], plain: Plain, columns: Sequence[str], *, source: str, inherits: bool = True
) -> tuple[AnySettings, TaskTables]:
    """Complete the settings of a method with the task of the fine-tuned model, and read the data.

    With `inherits`, learning rate and batch size are those of the fine-tuning unless others are given.
    """
    model = FineTunedSource.parse(expand_source(plain["model"]), source="model")
    folder, record = model.path, read_task_record(model.name)
    if record.task.kind == "translation":
        raise InputError(f"model {model.name!r} has a decoder; allowed: encoders")
    if plain.get("data") is None:
        raise InputError("data is not given: pass --data with the folder the model was fine-tuned on")
    splits = task_splits(plain["data"])
    train, dev, notices = splits.read("train"), splits.find("dev"), tuple[str, ...]()
    task, sequences = record.task.plain(), record.sequences.plain()
    given = {**task, **plain.get("task", {}), **named_columns(columns, type(record.task))}
    for name in ("kind", "labels"):
        if given.get(name) != task.get(name):
            theirs = f"the model's is {task.get(name)!r}"
            raise InputError(f"task.{name} is {given.get(name)!r} and {theirs}; allowed: what it was made for")
    plain = {**plain, "task": given, "sequences": {**sequences, **plain.get("sequences", {})}}
    settings = kind.parse(_inherit_training(plain, folder) if inherits else plain, source=source)
    if dev is None:
        train, dev, notice = held_out(settings.task, train, "there is no dev part")
        notices = (notice,)
    return settings, TaskTables(train, dev, notices)


def _inherit_training(plain: Plain, folder: Path) -> Plain:
    """Return the settings with learning rate and batch size of the model's own recipe, where it has one."""
    recipe = read_toml(folder / RECIPE) if (folder / RECIPE).is_file() else {}
    for group, name in (("optimizer", "learning_rate"), ("batch", "examples")):
        value = recipe.get(group, {}).get(name)
        if value is not None:
            plain[group] = {name: value, **plain.get(group, {})}
    return plain


def load_fine_tuned(settings: ShrinkSettings) -> Model:
    """Load the model to start from; InputError if it has no task head."""
    model = freeze_random_features(settings.model.load())
    model.task_head  # noqa: B018 (raises if there is none)
    return model


def freeze_random_features(model: Model) -> Model:
    """Return the model with random features that are never redrawn: teacher and student need the same ones."""
    encoder = model.config.encoder
    layers = tuple(
        layer.changed(mixer=layer.mixer.changed(redraw_every=0)) if isinstance(layer.mixer, FavorConfig) else layer
        for layer in encoder.layers
    )
    if layers == encoder.layers:
        return model
    return rebuild(model, model.config.changed(encoder=encoder.changed(layers=layers)))


class Split(NamedTuple):
    """The examples of a split of the data, and their features."""

    examples: Sequence[Any]
    features: Features


def encode_split(settings: ShrinkSettings, model: Model, examples: Sequence[Any]) -> Split:
    """Encode examples as the model reads them."""
    return Split(examples, settings.task.features(examples, Encoding.of(model, settings.sequences.length)))


def load_together(folder: Path) -> Model:
    """Load a model and wait until every process has done so: the main one may remove the folder afterwards."""
    model = load(folder)
    PartialState().wait_for_everyone()
    return model


class TrainingStopped(Exception):
    """A training was asked to stop before its end."""

    def __init__(self, stage: str, step: int) -> None:
        super().__init__(f"{stage} stopped after step {step}")
        self.stage, self.step = stage, step


@dataclass(frozen=True)
class ShrinkContext:
    """The fine-tuned model, its data and the folder of a run, shared by all of its stages."""

    settings: ShrinkSettings
    model: Model
    """The fine-tuned model, on the device."""
    train: Split
    dev: Split
    out: Path
    device: str
    processes: int

    @classmethod
    def open(
        cls, settings: ShrinkSettings, tables: TaskTables, out: Path, device: str, model: Model | None = None
    ) -> "ShrinkContext":
        """Load the model, unless one is given, and encode the data."""
        task = settings.task
        train, dev = task.augment(task.examples(tables.train)), task.examples(tables.dev)
        model = load_fine_tuned(settings) if model is None else model
        processes = processes_of(device)
        splits = encode_split(settings, model, train), encode_split(settings, model, dev)
        return cls(settings, model.to(device_type(device)), *splits, out, device, processes)

    @property
    def is_main(self) -> bool:
        return bool(PartialState().is_main_process)

    @property
    def length(self) -> int:
        """Mean length of the dev sequences; costs are given for it."""
        return max(1, round(float(self.dev.features.tokens.lengths.mean())))

    def evaluate(self, model: Model) -> Evaluation:
        """Score a model on dev, on the device of the fine-tuned one."""
        objective = self.settings.task.objective(self.train.examples).for_evaluation()
        evaluator = Evaluator(self.settings.task, *self.dev, self.settings.sequences, objective)
        return evaluator.evaluate(model.to(self.model.device).eval())

    def importance(self, model: Model, config: ImportanceConfig, seed: int) -> Importance:
        """Measure the importance of all units of a model on training examples."""
        pad = model.require_tokenizer().pad
        batches = scoring_batches(self.train.features, config, self.settings.sequences, pad, seed)
        return importance(model, self.settings.task.objective(self.train.examples), batches, config.gradients)

    def finished_stage(self, folder: Path) -> tuple[Model, float] | None:
        """Return the model of a stage that is complete and the seconds it took, else None."""
        done = folder / "model"
        if not done.is_dir():
            return None
        seconds = float(read_json(done / "stage.json")["seconds"])
        return load_together(done), seconds

    def run_stage(self, trainer: Trainer, folder: Path) -> tuple[Model, float]:
        """Train one stage, resumed if its folder has checkpoints; return its model and the seconds it took."""
        done = folder / "model"
        folder.mkdir(parents=True, exist_ok=True)
        with explained(self.out, folder):
            progress = trainer.run(resume=(folder / "checkpoints").is_dir())
            if trainer.is_finished and self.is_main:
                with NewFolder(done) as new:
                    write_model(trainer.model, new)
                    write_json(new / "stage.json", {"seconds": progress.seconds})
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        PartialState().wait_for_everyone()  # all processes read the model that the main one has written
        trainer.close(is_last=False)
        if not trainer.is_finished:
            raise TrainingStopped(str(folder.relative_to(self.out)), progress.step)
        return load_together(done), progress.seconds

    def close(self) -> None:
        """Synchronise, then destroy the process group."""
        PartialState().wait_for_everyone()
        PartialState().destroy_process_group()


def scoring_batches(
    features: Features, config: ImportanceConfig, sequences: ExampleConfig, pad: int, seed: int
) -> Iterator[TaskBatch]:
    """Yield the batches that importance is measured on: random training examples, each at most once."""
    plan = ExamplePlan(features, sequences.changed(order="shuffled"), config.batch, seed)
    reader = ExampleReader(features, sequences, pad)
    count = min(plan.batches, -(-config.examples // config.batch))
    for _, planned in zip(range(count), plan.one_epoch(), strict=False):
        batch = reader[planned].batch
        assert isinstance(batch, TaskBatch)
        yield batch
