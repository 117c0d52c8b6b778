"""Fine-tuning from its settings: task, model and method put together."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from bertsmith.batches.examples import ExampleConfig, ExamplePlan, ExampleReader, Features
from bertsmith.batches.ragged import Ragged
from bertsmith.errors import InputError
from bertsmith.models.cost import training_flops
from bertsmith.models.heads import HeadConfig, SequenceHeadConfig
from bertsmith.models.heads.features import FeaturesConfig, RecurrentConfig
from bertsmith.models.model import Model
from bertsmith.objectives.adversarial import Adversarial, AdversarialConfig
from bertsmith.objectives.supervised import Supervised
from bertsmith.settings import Record
from bertsmith.tasks import AnyTask
from bertsmith.tasks.base import Encoding, Judgement
from bertsmith.tasks.notices import data_notices, length_notices, without_empty
from bertsmith.tasks.predictor import KeptTask
from bertsmith.text.tables import Table
from bertsmith.training import sharding
from bertsmith.training.feed import PhaseData, TrainingData
from bertsmith.training.hardware import device_type
from bertsmith.training.judging import DevJudge
from bertsmith.training.method import Method, RunConfig
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.phases import ExamplePhase
from bertsmith.training.quantising import QuantisedLearning, give_ranges, with_rounding
from bertsmith.training.starting import ModelSource, TokenizerChoice, starting_encoder, with_task_head
from bertsmith.training.trainer import Trainer


class ExampleBatchConfig(Record):
    """How many examples an optimiser step sees."""

    examples: int = Field(default=32, gt=0)
    """Over all processes."""
    micro_examples: int | None = Field(default=None, gt=0)
    """What one process computes at a time; None for all at once."""


class HeadChoice(Record):
    """The head of the task, where it is to be another than the family's usual one."""

    dropout: float | None = Field(default=None, ge=0, lt=1)
    """None for that of the model."""
    pooling: Literal["pooler", "first", "mean"] | None = None
    """For heads on whole texts: the vector of a text. None for the family's usual one."""
    features: FeaturesConfig = FeaturesConfig()
    recurrent: RecurrentConfig | None = None

    def applied(self, head: HeadConfig) -> HeadConfig:
        """A task's head with what was chosen."""
        asked = {name: getattr(self, name) for name in ("dropout", "pooling", "features", "recurrent")}
        changes = {name: value for name, value in asked.items() if value is not None}
        if "pooling" in changes and not isinstance(head, SequenceHeadConfig):
            raise InputError(f"head.pooling is {self.pooling!r}; a head of kind {head.kind!r} has none: leave it out")
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
    is_frozen: bool = False
    """Whether it keeps its weights, so that only the head learns."""


class FinetuneRunConfig(Record):
    """How long a fine-tuning takes and how it is carried out."""

    epochs: float = Field(default=3.0, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**62)
    evaluations: int = Field(default=1, gt=0)
    """On dev, in every epoch."""
    choose: Literal["last", "best"] = "best"
    """Which weights the model has at the end: those of the last step, or of the best evaluation."""
    patience: int | None = Field(default=None, ge=1)
    """Evaluations without a better one after which the run ends early; None for never."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the matrix products; "auto" is bfloat16 on a GPU and float32 elsewhere. Weights stay float32."""
    compile: Literal["off", "whole"] = "off"
    workers: int = Field(default=0, ge=0)
    """Processes that make batches."""
    log_every: int = Field(default=10, gt=0)
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get the log, too."""

    def steps(self, batches: int) -> int:
        """Steps in all, where an epoch has so many."""
        return max(1, round(self.epochs * batches))

    def run(self, batches: int) -> RunConfig:
        """The same in steps."""
        every = max(1, -(-batches // self.evaluations))
        return RunConfig(
            steps=self.steps(batches),
            seed=self.seed,
            precision=self.precision,
            compile=self.compile,
            workers=self.workers,
            log_every=self.log_every,
            evaluate_every=every,
            checkpoint_every=min(every, 500),
            keep=1,
            choose=self.choose,
            patience=self.patience,
            track=self.track,
        )


class FinetuneSettings(Record):
    """All that a fine-tuning depends on."""

    data: str | None = None
    """A folder with the parts of a task, a file, or a name on the hub."""
    model: ModelSource
    tokenizer: TokenizerChoice = TokenizerChoice()
    task: AnyTask
    head: HeadChoice = HeadChoice()
    encoder: EncoderLearning = EncoderLearning()
    adversarial: AdversarialConfig = AdversarialConfig()
    quantisation: QuantisedLearning | None = None
    """Learn with weights and activations rounded as integers would be; None for as the model does already."""
    sequences: ExampleConfig = ExampleConfig()
    batch: ExampleBatchConfig = ExampleBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-5, betas=(0.9, 0.999))
    schedule: ScheduleConfig = ScheduleConfig(warmup=0.1)
    run: FinetuneRunConfig = FinetuneRunConfig()

    @property
    def kept(self) -> KeptTask:
        """What is kept of them beside the model."""
        return KeptTask(task=self.task, sequences=self.sequences)

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
        if kind != "none" and self.encoder.is_frozen:
            raise ValueError(f"adversarial.kind is {kind!r} and encoder.is_frozen is true; allowed: false")
        if kind != "none" and self.run.compile != "off":
            raise ValueError(f"adversarial.kind is {kind!r} and run.compile is {self.run.compile!r}; allowed: 'off'")
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
    judge: DevJudge
    train_features: Features
    notices: list[str] = field(default_factory=list)
    """What was said of the data before training."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Rows, labels and what was cut, by part."""

    @property
    def judgement(self) -> Judgement:
        """How good the model is on dev now."""
        return self.judge.judgement(self.trainer.model)


def read_data(settings: FinetuneSettings, train: Table, dev: Table, notices: Sequence[str] = ()) -> TaskData:
    """The examples of both parts: what is wrong with them is said before anything else happens.

    `notices` are what was to be said of the tables before.
    """
    train, left_out = without_empty(settings.task, train)
    settings = settings.changed(task=settings.task.settled(train))
    tables = {"train": train, "dev": dev}
    examples = {part: settings.task.examples(table) for part, table in tables.items()}
    said, counts = data_notices(settings.task, tables, examples)
    return TaskData(settings, examples["train"], examples["dev"], (*notices, *left_out, *said), counts)


def make_finetuning(
    data: TaskData, out: Path, *, start: Model | None = None, device: str = "auto", show: bool = True
) -> Finetuning:
    """The run, ready to go; `start` is the model to start from where there is no folder of it, and stays as it is."""
    settings, task = data.settings, data.settings.task
    run, sequences = settings.run, settings.sequences
    processes = processes_of(device)
    model = starting_model(settings, data.train, start)
    encoding = Encoding.of(model, sequences.length)
    train = task.features(task.augmented(data.train), encoding)
    dev = task.features(data.dev, encoding)
    cut, lost = length_notices({"train": train, "dev": dev}, sequences.length)
    notices = [*_fresh_weights(settings, start), *data.notices, *cut]
    counts = {part: {**count, **lost.get(part, {})} for part, count in data.counts.items()}
    examples = settings.batch.examples
    micro = settings.batch.micro_examples or max(1, examples // processes)
    plan = ExamplePlan(train, sequences, examples, run.seed, parts=max(1, examples // micro))
    pad = encoding.tokenizer.pad
    flops = training_flops(model.config, max(1, int(train.tokens.lengths.mean())), 0.0)
    reader = ExampleReader(train, sequences, pad)
    phase = PhaseData(plan, reader, flops * settings.adversarial.cost, run.seed)
    if settings.quantisation is not None:
        give_ranges(model, plan, reader, settings.quantisation.calibration)
    method = Method(
        run.run(plan.batches),
        settings.optimizer,
        settings.schedule,
        (ExamplePhase(0.0, sequences.length, examples, micro),),
    )
    objective = learning(task.objective(data.train), settings)
    judge = DevJudge(task, data.dev, dev, sequences, objective.for_evaluation())
    trainer = Trainer(
        model,
        objective,
        TrainingData((phase,), None, None),
        method,
        out,
        fingerprint=_fingerprint(train, encoding, is_half=run.run(1).is_half(device)),
        judge=judge,
        device=device,
        show=show,
        notices=notices,
    )
    return Finetuning(trainer, judge, train, notices, {**counts, "notices": notices})


def _fresh_weights(settings: FinetuneSettings, start: Model | None) -> list[str]:
    """A sentence where nothing was learned before: a preset bears the name of a published model, not its weights."""
    if start is not None or not settings.model.is_preset:
        return []
    name = settings.model.name
    return [f"{name} is a preset: its weights are fresh; to start from pre-trained ones, give the folder of a model"]


def starting_model(settings: FinetuneSettings, train: Sequence[Any], start: Model | None = None) -> Model:
    """The model with the head of its task, before it has learned anything of it."""
    task, seed = settings.task, settings.run.seed
    if start is None:
        model = starting_encoder(settings.model, settings.tokenizer, task.texts(train), seed=seed)
    else:
        model = copy.deepcopy(start).cpu().float()
    settings.head.features.check_depth(len(model.config.encoder.layers))
    return with_rounding(
        with_task_head(model, settings.head.applied(task.head(model.config)), seed=seed), settings.quantisation
    )


def learning(objective: Supervised, settings: FinetuneSettings) -> Supervised | Adversarial:
    """A task's objective with the ways of learning that the settings ask for."""
    encoder = settings.encoder
    return settings.adversarial.applied(
        replace(objective, layer_decay=encoder.layer_decay, is_frozen=encoder.is_frozen)
    )


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


def _fingerprint(train: Features, encoding: Encoding, *, is_half: bool) -> str:
    """What a resumed run must share with its first part besides the settings: the examples and the precision."""
    digest = hashlib.sha256(encoding.tokenizer.hash.encode())
    arrays = [train.tokens.tokens, train.tokens.starts, train.items]
    for target in train.targets.values():
        arrays += [target.tokens, target.starts] if isinstance(target, Ragged) else [target]
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{digest.hexdigest()} {'bfloat16' if is_half else 'float32'}"
