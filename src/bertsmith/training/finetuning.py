"""Fine-tuning from its settings: task, model and method put together."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from bertsmith.answers.sequences import Features
from bertsmith.checkpoint.source import ModelSource
from bertsmith.data.examples import ExampleConfig, ExamplePlan
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import Activation
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import extract
from bertsmith.models.heads import HeadConfig, SequenceHeadConfig
from bertsmith.models.heads.base import FeaturesConfig, RecurrentConfig
from bertsmith.models.heads.task import ClassifierConfig, EmbedderConfig
from bertsmith.models.model import Model
from bertsmith.objectives.adversarial import Adversarial, AdversarialConfig
from bertsmith.objectives.distillation.objective import Distillation, named
from bertsmith.objectives.supervised import Frozen, Supervised
from bertsmith.settings import Record
from bertsmith.tasks import AnyTask
from bertsmith.tasks.base import Encoding, Evaluation
from bertsmith.tasks.notices import data_notices, length_notices, without_empty
from bertsmith.tasks.predictor import TaskRecord
from bertsmith.text.rows import Table
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import sharding
from bertsmith.training.distilling import (
    DistillationConfig,
    check_task,
    check_tokenizer,
    evaluate_teacher,
    fitted_student,
    read_teacher,
    teaching_cost,
)
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.hardware import device_type
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.quantising import QuantisedLearning, give_ranges, with_rounding
from bertsmith.training.starting_model import TokenizerConfig, finetuning_encoder
from bertsmith.training.task_trainer import ExampleBatchConfig, FinetuneRunConfig, task_trainer
from bertsmith.training.trainer import Trainer

_OF_SOME_HEADS = {"pooling": SequenceHeadConfig, "hidden": ClassifierConfig, "projection": EmbedderConfig}


class HeadChoice(Record):
    """The head of the task, where it is to be another than the family's usual one."""

    dropout: float | None = Field(default=None, ge=0, lt=1)
    """None for that of the model."""
    pooling: Literal["pooler", "first", "mean"] | None = None
    """For heads on whole texts: the vector of a text. None for the family's usual one."""
    hidden: Activation | None = None
    """For classes and numbers: the activation of a layer between that vector and the scores, such as the "gelu" that
    transformers' classes for ELECTRA and ConvBERT have. None for the family's usual form."""
    projection: int | None = Field(default=None, gt=0)
    """For vectors: a learned map of that vector to so many numbers. None for the vector as it is."""
    features: FeaturesConfig = FeaturesConfig()
    recurrent: RecurrentConfig | None = None

    def applied(self, head: HeadConfig) -> HeadConfig:
        """A task's head with what was chosen."""
        asked = {name: getattr(self, name) for name in HeadChoice.model_fields}
        changes = {name: value for name, value in asked.items() if value is not None}
        for name, owner in _OF_SOME_HEADS.items():
            if name in changes and not isinstance(head, owner):
                raise InputError(
                    f"head.{name} is {changes[name]!r}; a head of kind {head.kind!r} has none: leave it out"
                )
        if isinstance(head, SequenceHeadConfig) and head.pooling == "pooler" and self._has_other_width:
            # the pooler was trained on the states of the last layer, and is as wide
            if self.pooling == "pooler":
                raise InputError(
                    "head.pooling is 'pooler' with states of several layers side by side or of a BiLSTM; allowed: "
                    "first, mean"
                )
            changes["pooling"] = self.pooling or "mean"
        return head.changed(**changes)

    @property
    def _has_other_width(self) -> bool:
        """Whether the head reads states of another width than the encoder's."""
        is_wider = self.features.combine == "concatenate" and self.features.layers > 1
        return is_wider or self.recurrent is not None


class EncoderLearning(Record):
    """How the encoder learns with its head."""

    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """What the learning rate is multiplied by from each depth to the one below it; the top layer of an encoder has the
    square of it, as in ELECTRA's code (0.8 there)."""
    frozen: Frozen = "none"
    """What of it keeps its weights: "none"; its "embedding", which a generator may share; or "all", so that only the
    head learns."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and "is_frozen" in data:
            said, now = ("true", "all") if data["is_frozen"] else ("false", "none")
            raise ValueError(f"is_frozen is {said}, which is called frozen now; allowed in its place: frozen = {now!r}")
        return data


class FinetuneSettings(Record):
    """All that a fine-tuning depends on."""

    data: str | None = None
    """A folder with the parts of a task, a file, or a name on the hub."""
    dev: str | None = None
    """Another one, whose dev part is evaluated on; None for that of data."""
    model: ModelSource
    tokenizer: TokenizerConfig = TokenizerConfig()
    task: AnyTask
    head: HeadChoice = HeadChoice()
    encoder: EncoderLearning = EncoderLearning()
    adversarial: AdversarialConfig = AdversarialConfig()
    distillation: DistillationConfig | None = None
    """Learn from a teacher, too; None for the labels alone."""
    quantisation: QuantisedLearning | None = None
    """Learn with weights and activations rounded as integers would be; None for as the model does already."""
    sequences: ExampleConfig = ExampleConfig()
    batch: ExampleBatchConfig = ExampleBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-5, betas=(0.9, 0.999))
    schedule: ScheduleConfig = ScheduleConfig(warmup=0.1)
    run: FinetuneRunConfig = FinetuneRunConfig()

    @property
    def task_record(self) -> TaskRecord:
        """The task as it is stored beside the model."""
        return TaskRecord(task=self.task, sequences=self.sequences)

    @model_validator(mode="after")
    def _check_batch(self) -> "FinetuneSettings":
        micro = self.batch.micro_examples
        if micro is not None and self.batch.examples % micro:
            raise ValueError(
                f"batch.micro_examples is {micro}; allowed: what divides batch.examples {self.batch.examples}"
            )
        return self

    @model_validator(mode="after")
    def _check_adversarial(self) -> "FinetuneSettings":
        kind = self.adversarial.kind
        if kind != "none" and self.encoder.frozen == "all":
            raise ValueError(
                f"adversarial.kind is {kind!r} and encoder.frozen is 'all'; allowed with it: 'none', 'embedding'"
            )
        if kind != "none" and self.run.compile != "off":
            raise ValueError(f"adversarial.kind is {kind!r} and run.compile is {self.run.compile!r}; allowed: 'off'")
        return self

    @model_validator(mode="after")
    def _check_distillation(self) -> "FinetuneSettings":
        if self.distillation is None:
            return self
        others = {
            "adversarial.kind": (self.adversarial.kind, "none"),
            "encoder.frozen": (self.encoder.frozen, "none"),
            "run.compile": (self.run.compile, "off"),
        }
        for name, (value, allowed) in others.items():
            if value != allowed:
                raise ValueError(f"distillation is given and {name} is {value!r}; allowed with it: {allowed!r}")
        return self


@dataclass(frozen=True)
class TaskData:
    """The examples of a task, read and checked, and the settings with what they told."""

    settings: FinetuneSettings
    train: Sequence[Any]
    dev: Sequence[Any]
    notices: tuple[str, ...] = ()
    """What a person should know of the rows."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """Their counts, by part and label."""


@dataclass
class Finetuning:
    """A run and what belongs to it."""

    trainer: Trainer
    evaluator: Evaluator
    train_features: Features
    notices: list[str] = field(default_factory=list)
    """What was said of the data before training."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Rows, labels and what was cut, by part."""
    teacher: Evaluation | None = None
    """How good the teacher is on dev, where there is one."""

    def evaluate(self) -> Evaluation:
        """Evaluate the model on dev."""
        return self.evaluator.evaluate(self.trainer.model)


def read_data(settings: FinetuneSettings, train: Table, dev: Table, notices: Sequence[str] = ()) -> TaskData:
    """The examples of both parts: what is wrong with them is said before anything else happens.

    `notices` are what was to be said of the tables before.
    """
    train, left_out = without_empty(settings.task, train)
    settings = settings.changed(task=settings.task.resolve(train))
    tables = {"train": train, "dev": dev}
    examples = {part: settings.task.examples(table) for part, table in tables.items()}
    said, counts = data_notices(settings.task, tables, examples)
    return TaskData(settings, examples["train"], examples["dev"], (*notices, *left_out, *said), counts)


def make_finetuning(
    data: TaskData, out: Path, *, start: Model | None = None, device: str = "auto", show: bool = True
) -> Finetuning:
    """The run, ready to go; `start` is the model to start from where there is no folder of it, and stays as it is."""
    settings, task = data.settings, data.settings.task
    sequences = settings.sequences
    processes = processes_of(device)
    model, teacher = starting_pair(settings, data.train, start)
    encoding = Encoding.of(model, sequences.length)
    if teacher is not None:
        encoding = _read_by_both(encoding, model, teacher, sequences.length)
    train = task.features(task.augment(data.train), encoding)
    dev = task.features(data.dev, encoding)
    cut, lost = length_notices({"train": train, "dev": dev}, sequences.length)
    notices = [*_fresh_weights(settings, start), *data.notices, *cut]
    counts = {part: {**count, **lost.get(part, {})} for part, count in data.counts.items()}
    if settings.quantisation is not None:
        plan = ExamplePlan(train, sequences, settings.batch.examples, settings.run.seed)
        give_ranges(model, plan, settings.quantisation.calibration)
    objective = learning(task.objective(data.train), settings, teacher)
    evaluator = Evaluator(task, data.dev, dev, sequences, objective.for_evaluation())
    cost, teacher_evaluation = settings.adversarial.cost, None
    if settings.distillation is not None and teacher is not None:
        folder = settings.distillation.teacher
        teacher_evaluation = evaluate_teacher(teacher.to(device_type(device)), evaluator, folder)
        notices.append(f"the teacher {folder}: {teacher_evaluation.metric} {teacher_evaluation.score:.2f} on dev")
        cost = teaching_cost(model.config, teacher.config, max(1, int(train.tokens.lengths.mean())))
    trainer = task_trainer(
        settings,
        model,
        objective,
        train,
        evaluator,
        out,
        processes=processes,
        cost=cost,
        device=device,
        show=show,
        notices=notices,
    )
    return Finetuning(trainer, evaluator, train, notices, {**counts, "notices": notices}, teacher_evaluation)


def _read_by_both(encoding: Encoding, student: Model, teacher: Model, length: int) -> Encoding:
    """The encoding for two models: with types where one of them tells segments apart, which the other does not see."""
    theirs = Encoding.of(teacher, length)
    is_blind = student.config.encoder.embedding.types == 0
    return replace(encoding, has_types=encoding.has_types or (theirs.has_types and is_blind))


def _fresh_weights(settings: FinetuneSettings, start: Model | None) -> list[str]:
    """A sentence where nothing was learned before: a preset bears the name of a published model, not its weights."""
    if start is not None or not settings.model.is_preset:
        return []
    name = settings.model.name
    return [f"{name} is a preset: its weights are fresh; to start from pre-trained ones, give the folder of a model"]


def starting_pair(
    settings: FinetuneSettings, train: Sequence[Any], start: Model | None = None
) -> tuple[Model, Model | None]:
    """The model with the head of its task, before it has learned anything of it, and its teacher, if it has one."""
    task, seed, distillation = settings.task, settings.run.seed, settings.distillation
    if distillation is None:
        return starting_model(settings, train, start), None
    teacher = read_teacher(distillation.teacher)
    model = starting_model(settings, train, start, teacher.require_tokenizer())
    check_task(distillation, task, model, teacher)
    check_tokenizer(model.require_tokenizer(), teacher, distillation.teacher)
    return fitted_student(model, teacher.config, distillation.terms, distillation.layers, seed=seed), teacher


def starting_model(
    settings: FinetuneSettings, train: Sequence[Any], start: Model | None = None, tokenizer: Tokenizer | None = None
) -> Model:
    """The model with the head of its task; fresh weights take the tokenizer that is given, or one that is learned."""
    task, seed = settings.task, settings.run.seed
    if start is None:
        texts = task.texts(train)
        model = finetuning_encoder(settings.model, settings.tokenizer, texts, seed=seed, given=tokenizer)
    else:
        model = copy.deepcopy(start).cpu().float()
        for parameter in model.parameters():
            # an earlier fine-tuning in this process may have frozen it
            parameter.requires_grad_(parameter.is_floating_point())
        model = model if settings.model.subnet is None else extract(model, settings.model.subnet)
    settings.head.features.check_depth(len(model.config.encoder.layers))
    return with_rounding(
        with_task_head(model, settings.head.applied(task.head(model.config)), seed=seed), settings.quantisation
    )


def learning(
    objective: Supervised, settings: FinetuneSettings, teacher: Model | None = None
) -> Supervised | Adversarial | Distillation:
    """A task's objective with the ways of learning that the settings ask for."""
    encoder = settings.encoder
    task = replace(objective, layer_decay=encoder.layer_decay, frozen=encoder.frozen)
    if settings.distillation is None:
        return settings.adversarial.applied(task)
    terms, layers = named(settings.distillation.terms), settings.distillation.layers
    return Distillation(task, terms, teacher=teacher, layer_map=layers)


def processes_of(device: str) -> int:
    """How many processes fine-tune together, each with a whole copy of the weights; a sentence if with shares."""
    from accelerate import PartialState

    # made here if nobody has: before, PyTorch does not know of the other processes
    processes = PartialState(cpu=device_type(device) == "cpu" or None).num_processes
    if processes > 1 and sharding.is_asked_for():
        raise InputError(
            "accelerate's config asks for sharded weights (FSDP); allowed in fine-tuning: whole copies (DDP), with "
            "which every process answers dev, such as configs/accelerate/one-machine-ddp.yaml"
        )
    return processes
