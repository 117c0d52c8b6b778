"""Shared by all shrink methods: settings, the fine-tuned model with its data, and training in stages."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from accelerate import PartialState

from bertsmith.answers.sequences import Features
from bertsmith.checkpoint.source import FineTunedSource, expand_source
from bertsmith.checkpoint.store import load, write_model
from bertsmith.data.devices import device_type
from bertsmith.data.examples import ExampleConfig, ExamplePlan, ExampleReader, TaskBatch
from bertsmith.data.pairs import PairConfig
from bertsmith.errors import InputError
from bertsmith.files import NewFolder, read_json, write_json
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.models.build import rebuild
from bertsmith.models.masks import refuse_masks
from bertsmith.models.model import Model
from bertsmith.settings import Plain, Record
from bertsmith.shrinking.importance import Importance, ImportanceConfig, importance
from bertsmith.tasks import AnyTask
from bertsmith.tasks.base import Encoding, Evaluation
from bertsmith.tasks.data_source import hold_out, parse_columns, task_splits
from bertsmith.tasks.degenerate import DEGENERATE, has_constant_answers
from bertsmith.tasks.hf_task import adapt_task
from bertsmith.tasks.predictor import TaskRecord, read_task_record
from bertsmith.text.rows import Table
from bertsmith.toml import read_toml
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.finetuning import processes_of
from bertsmith.training.interrupts import explain_faults
from bertsmith.training.trainer import Trainer

RECIPE = "recipe.toml"
STAGE_FILES = ("model", "checkpoints")
"""Folders of a stage that a finished run does not need."""


class ShrinkSettings(Record):
    """Settings shared by all methods: a fine-tuned model, its task and its data."""

    is_for_translation: ClassVar[bool] = False
    keeps_masks: ClassVar[bool] = False
    """Whether the method keeps pruned weights at 0 (checkpoint/masks.py)."""

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
    """Training rows, evaluation rows, and notices about them."""

    train: Table
    dev: Table
    notices: tuple[str, ...] = ()


def read_settings(
    kind: type[AnySettings], plain: Plain, columns: Sequence[str], *, source: str, inherits: bool = True
) -> tuple[AnySettings, TaskTables]:
    """Complete the settings of a method with the task of the fine-tuned model, and read the data.

    With `inherits`, learning rate and batch size default to the values of the fine-tuning recipe.
    """
    model = FineTunedSource.parse(expand_source(plain["model"]), source="model")
    folder, record = model.path, read_task_record(model.name)
    if isinstance(record.sequences, PairConfig) and not (record.task.kind == "translation" and kind.is_for_translation):
        raise InputError(
            f"model {model.name!r} has a decoder; allowed: encoders, or a translation model with --method exits, which "
            "adds exits to its decoder"
        )
    if plain.get("data") is None:
        raise InputError("data is not given; pass --data with the folder the model was fine-tuned on")
    splits = task_splits(plain["data"])
    train, dev, notices = splits.read("train"), splits.find("dev"), tuple[str, ...]()
    adapted = adapt_task(folder, record.task, train, columns, str(plain["data"]))
    task, sequences = adapted.plain(), record.sequences.plain()
    requested = {**task, **plain.get("task", {}), **parse_columns(columns, type(record.task))}
    for name in ("kind", "labels"):
        if requested.get(name) != task.get(name):
            raise InputError(
                f"task.{name} is {requested.get(name)!r}, but the model was fine-tuned with {task.get(name)!r}; "
                "remove the setting"
            )
    plain = {**plain, "task": requested, "sequences": {**sequences, **plain.get("sequences", {})}}
    settings = kind.parse(_inherit_training(plain, folder) if inherits else plain, source=source)
    if dev is None:
        train, dev, notice = hold_out(settings.task, train, "there is no dev split")
        notices = (notice,)
    return settings, TaskTables(train, dev, notices)


def _inherit_training(plain: Plain, folder: Path) -> Plain:
    """Fill in learning rate and batch size from the recipe in the model's folder, if it has one."""
    recipe = read_toml(folder / RECIPE) if (folder / RECIPE).is_file() else {}
    for group, name in (("optimizer", "learning_rate"), ("batch", "examples")):
        value = recipe.get(group, {}).get(name)
        if value is not None:
            plain[group] = {name: value, **plain.get(group, {})}
    return plain


def load_fine_tuned(settings: ShrinkSettings) -> Model:
    """Load the fine-tuned model; InputError if it has no task head."""
    model = freeze_random_features(settings.model.load())
    if not settings.keeps_masks:
        refuse_masks(model, f"--method {settings.method}")
    model.task_head  # noqa: B018 (raises if the model has no task head)
    return model


def freeze_random_features(model: Model) -> Model:
    """Return the model with random features that are never redrawn, because teacher and student must share them."""
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
    """Tokenise examples for a model."""
    return Split(examples, settings.task.features(examples, Encoding.of(model, settings.sequences.length)))


def load_together(folder: Path) -> Model:
    """Load a model and wait for all processes, since the main one may remove the folder afterwards."""
    model = load(folder, keep_masks=True)
    PartialState().wait_for_everyone()
    return model


class TrainingStopped(Exception):
    """Training was interrupted before its last step."""

    def __init__(self, stage: str, step: int) -> None:
        super().__init__(f"{stage} stopped after step {step}")
        self.stage, self.step = stage, step


@dataclass(frozen=True)
class ShrinkContext:
    """The fine-tuned model, its data and the output folder, shared by all stages of a run."""

    settings: ShrinkSettings
    model: Model
    """The fine-tuned model, on the device."""
    train: Split
    dev: Split
    out: Path
    device: str
    processes: int
    notices: list[str] = field(default_factory=list)
    """Sentences for the report, such as a fine-tuned model that is degenerate."""

    @classmethod
    def open(
        cls, settings: ShrinkSettings, tables: TaskTables, out: Path, device: str, model: Model | None = None
    ) -> "ShrinkContext":
        """Load the model, unless one is passed, and encode the data."""
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
        """Mean length of the dev sequences, at which costs are computed."""
        return max(1, round(float(self.dev.features.tokens.lengths.mean())))

    def evaluate(self, model: Model) -> Evaluation:
        """Score a model on dev, on the device of the fine-tuned model."""
        objective = self.settings.task.objective(self.train.examples).for_evaluation()
        evaluator = Evaluator(self.settings.task, *self.dev, self.settings.sequences, objective)
        evaluation = evaluator.evaluate(model.to(self.model.device).eval())
        if model is self.model and has_constant_answers(evaluator.task, evaluator.examples, evaluator.answers):
            self.notices.append(DEGENERATE)
            print(f"bertsmith: {DEGENERATE}", file=sys.stderr)
        return evaluation

    def importance(self, model: Model, config: ImportanceConfig, seed: int) -> Importance:
        """Measure the importance of all units of a model on training examples."""
        pad = model.require_tokenizer().pad
        batches = scoring_batches(self.train.features, config, self.settings.sequences, pad, seed)
        return importance(model, self.settings.task.objective(self.train.examples), batches, config.gradients)

    def finished_stage(self, folder: Path) -> tuple[Model, float] | None:
        """Return the model of a completed stage and its training time in seconds; None if it is not complete."""
        saved = folder / "model"
        if not saved.is_dir():
            return None
        seconds = float(read_json(saved / "stage.json")["seconds"])
        return load_together(saved), seconds

    def run_stage(self, trainer: Trainer, folder: Path) -> tuple[Model, float]:
        """Train one stage, resuming from checkpoints if any; return its model and training time in seconds."""
        saved = folder / "model"
        folder.mkdir(parents=True, exist_ok=True)
        with explain_faults(self.out, folder):
            progress = trainer.run(resume=(folder / "checkpoints").is_dir())
            if trainer.is_finished and self.is_main:
                with NewFolder(saved) as new:
                    write_model(trainer.model, new)
                    write_json(new / "stage.json", {"seconds": progress.seconds})
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        PartialState().wait_for_everyone()  # all processes load the model that the main one has written
        trainer.close(is_last=False)
        if not trainer.is_finished:
            raise TrainingStopped(str(folder.relative_to(self.out)), progress.step)
        return load_together(saved), progress.seconds

    def close(self) -> None:
        """Synchronise, then destroy the process group."""
        PartialState().wait_for_everyone()
        PartialState().destroy_process_group()


def scoring_batches(
    features: Features, config: ImportanceConfig, sequences: ExampleConfig, pad: int, seed: int
) -> Iterator[TaskBatch]:
    """Yield random batches of training examples, each example at most once, to measure importance on."""
    plan = ExamplePlan(features, sequences.changed(order="shuffled"), config.batch, seed)
    reader = ExampleReader(features, sequences, pad)
    count = min(plan.batches, -(-config.examples // config.batch))
    for _, planned in zip(range(count), plan.one_epoch(), strict=False):
        batch = reader[planned].batch
        assert isinstance(batch, TaskBatch)
        yield batch
