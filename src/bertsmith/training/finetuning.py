"""Fine-tuning: settings, data, model, objective and trainer of a run."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from bertsmith.answers.sequences import Answer
from bertsmith.checkpoint.source import ModelSource, check_name
from bertsmith.checkpoint.store import load
from bertsmith.data.devices import device_type
from bertsmith.data.examples import ExampleConfig, ExamplePlan
from bertsmith.data.pairs import PairConfig
from bertsmith.errors import InputError
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import build, extract
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import parameters, training_flops
from bertsmith.models.heads import HeadConfig, Pooling, SequenceHeadConfig
from bertsmith.models.heads.base import FeaturesConfig, RecurrentConfig
from bertsmith.models.heads.task import ClassifierConfig, EmbedderConfig, HiddenLayerConfig, SpansConfig, TaggerConfig
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.objectives.adversarial import Adversarial, AdversarialConfig
from bertsmith.objectives.distillation.objective import Distillation, name_terms
from bertsmith.objectives.supervised import Frozen, Supervised
from bertsmith.objectives.translation import TranslationConfig
from bertsmith.settings import Record
from bertsmith.tasks import AnyTask
from bertsmith.tasks.base import Encoding, Evaluation
from bertsmith.tasks.notices import data_notices, drop_empty_rows, length_notices
from bertsmith.tasks.predictor import TaskRecord
from bertsmith.tasks.translation import PairTask, require_decoder
from bertsmith.text.rows import Table
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import sharding
from bertsmith.training.distillation import (
    DistillationConfig,
    check_task,
    check_tokenizer,
    evaluate_teacher,
    fit_student,
    read_teacher,
    teaching_cost,
)
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.head_start import fit_scores
from bertsmith.training.optimizer import BatchConfig, OptimizerConfig, ScheduleConfig
from bertsmith.training.phases import all_phases
from bertsmith.training.quantising import (
    QuantisedLearning,
    add_quantisation,
    calibrate_pair_ranges,
    calibrate_ranges,
)
from bertsmith.training.run_config import Method, RunConfig, process_state
from bertsmith.training.starting_model import TokenizerConfig, finetuning_encoder
from bertsmith.training.task_trainer import ExampleBatchConfig, FinetuneRunConfig, pair_trainer, task_trainer
from bertsmith.training.trainer import Trainer

# settings that only some heads have -> the config classes of those heads
_HEAD_OPTIONS: dict[str, tuple[type[HeadConfig], ...]] = {
    "pooling": (SequenceHeadConfig,),
    "hidden": (ClassifierConfig, TaggerConfig, SpansConfig),
    "projection": (EmbedderConfig,),
}


class HeadChoice(Record):
    """Changes to the family's default head for the task."""

    dropout: float | None = Field(default=None, ge=0, lt=1)
    """None for the model's."""
    pooling: Pooling | None = None
    """For heads on whole texts: the vector of a text. None for the family's default, in causal encoders the last
    token's."""
    hidden: HiddenLayerConfig | Literal["none"] | None = None
    """For all tasks but embeddings and trees: a layer before the scores, such as "gelu" as in transformers' ELECTRA and
    ConvBERT classes; a table also sets has_bias, norm and drops_input. "none" for no such layer, None for the family's
    default."""
    projection: int | None = Field(default=None, gt=0)
    """For embeddings: output size of a learned projection of that vector. None for no projection."""
    features: FeaturesConfig = FeaturesConfig()
    recurrent: RecurrentConfig | None = None
    start: Literal["random", "regression"] = "random"
    """Weights of the scores at the start: random, or fitted by a regression on the outputs of the frozen encoder."""

    def applied(self, head: HeadConfig) -> HeadConfig:
        """Return a task's head with the changes applied."""
        options = {name: getattr(self, name) for name in HeadChoice.model_fields if name != "start"}
        changes = {name: value for name, value in options.items() if value is not None}
        for name, owners in _HEAD_OPTIONS.items():
            if name in changes and not isinstance(head, owners):
                shown = self.plain()[name]
                raise InputError(
                    f"head.{name} is {shown!r}, but a head of kind {head.kind!r} has no {name}; leave it out"
                )
        if self.hidden == "none":
            changes["hidden"] = None
        if isinstance(head, SequenceHeadConfig) and head.pooling == "pooler" and self._has_other_width:
            # the pooler was trained on the last layer's hidden states and has their width
            if self.pooling == "pooler":
                raise InputError(
                    "head.pooling is 'pooler', but hidden states of several layers are concatenated or pass a BiLSTM; "
                    "use 'first', 'last' or 'mean'"
                )
            changes["pooling"] = self.pooling or "mean"
        return head.changed(**changes)

    @property
    def _has_other_width(self) -> bool:
        """Whether the head's input differs in width from the encoder's hidden states."""
        is_wider = self.features.combine == "concatenate" and self.features.layers > 1
        return is_wider or self.recurrent is not None


class EncoderLearning(Record):
    """Learning rates and freezing of the encoder in fine-tuning."""

    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor on the learning rate from each layer to the one below; the top layer already has its square, as in
    ELECTRA's code (0.8 there)."""
    frozen: Frozen = "none"
    """Weights that are not trained: "none"; the "embedding", which a generator may share; or "all", so that only the
    head is trained."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and "is_frozen" in data:
            old, new = ("true", "all") if data["is_frozen"] else ("false", "none")
            raise ValueError(f"is_frozen is {old}, but the setting is called frozen now; write frozen = {new!r}")
        return data


MOVED_KEYS = {
    "source": "task.source",
    "target": "task.target",
    "generation": "task.generation",
    "objective": "task.smoothing in place of objective.smoothing",
}
"""New keys of settings of translation."""


class TaskSettings(Record):
    """Settings of every fine-tuning."""

    data: str | None = None
    """A folder with the splits of a task, a file, or a name on the hub."""
    dev: str | None = None
    """Source of the dev split; None for the dev split of data."""
    model: ModelSource
    tokenizer: TokenizerConfig = TokenizerConfig()
    task: AnyTask

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: str = "settings") -> Self:
        """Return the settings that plain data describes; raise InputError for unknown and moved keys."""
        moved = next((key for key in MOVED_KEYS if key in data), None)
        if moved is not None:
            raise InputError(f"{source}: {moved} has moved; write {MOVED_KEYS[moved]}")
        return super().parse(data, source)


class TranslationSettings(TaskSettings):
    """Settings of a fine-tuning of an encoder-decoder on pairs of texts."""

    quantisation: QuantisedLearning | None = None
    """Learn with weights and activations rounded as integers would be; None for as the model does already."""
    sequences: PairConfig = PairConfig()
    batch: BatchConfig = BatchConfig(tokens=4096)
    # the paper's: Adam without weight decay or clipping, a rate that falls with the root of the step
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, epsilon=1e-9, weight_decay=0.0, clip=0.0)
    schedule: ScheduleConfig = ScheduleConfig(kind="noam", warmup=0.1)
    run: RunConfig = RunConfig(steps=5000, evaluate_batches=1000)

    @property
    def pair_task(self) -> PairTask[Any]:
        """The task."""
        assert isinstance(self.task, PairTask)
        return self.task

    @property
    def task_record(self) -> TaskRecord:
        """Task record that is stored beside the model."""
        return TaskRecord(task=self.task, sequences=self.sequences)

    @property
    def objective(self) -> TranslationConfig:
        """Teacher forcing with the smoothing of the task."""
        return TranslationConfig(smoothing=self.pair_task.smoothing)

    @property
    def method(self) -> Method:
        """Optimiser, schedule and batch sizes."""
        sequences = self.sequences
        phases = all_phases(sequences.length, sequences.micro_tokens, self.batch, ())
        return Method(self.run, self.optimizer, self.schedule, phases)

    @model_validator(mode="after")
    def _check_shapes(self) -> "TranslationSettings":
        if self.run.compile in ("on", "graphs"):
            mode = self.run.compile
            raise ValueError(
                f'run.compile is "{mode}", which needs batches of one shape; allowed here: auto, off, whole'
            )
        return self


class FinetuneSettings(TaskSettings):
    """Settings of a fine-tuning of an encoder with a head."""

    head: HeadChoice = HeadChoice()
    encoder: EncoderLearning = EncoderLearning()
    adversarial: AdversarialConfig = AdversarialConfig()
    distillation: DistillationConfig | None = None
    """Distillation from a teacher; None to learn from the labels alone."""
    quantisation: QuantisedLearning | None = None
    """Quantisation-aware training: round weights and activations like integers; None keeps the model's setting."""
    sequences: ExampleConfig = ExampleConfig()
    batch: ExampleBatchConfig = ExampleBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-5, betas=(0.9, 0.999))
    schedule: ScheduleConfig = ScheduleConfig(warmup=0.1)
    run: FinetuneRunConfig = FinetuneRunConfig()

    @property
    def task_record(self) -> TaskRecord:
        """Task record that is stored beside the model."""
        return TaskRecord(task=self.task, sequences=self.sequences)

    @model_validator(mode="after")
    def _check_batch(self) -> "FinetuneSettings":
        micro = self.batch.micro_examples
        if micro is not None and self.batch.examples % micro:
            raise ValueError(
                f"batch.micro_examples is {micro}; allowed: a divisor of batch.examples {self.batch.examples}"
            )
        return self

    @model_validator(mode="after")
    def _check_adversarial(self) -> "FinetuneSettings":
        kind = self.adversarial.kind
        if kind != "none" and self.encoder.frozen == "all":
            raise ValueError(
                f"adversarial.kind is {kind!r} and encoder.frozen is 'all'; allowed with it: 'none', 'embedding'"
            )
        if kind != "none" and self.run.compile == "whole":
            raise ValueError(f"adversarial.kind is {kind!r} and run.compile is 'whole'; allowed: 'auto', 'off'")
        return self

    @model_validator(mode="after")
    def _check_distillation(self) -> "FinetuneSettings":
        if self.distillation is None:
            return self
        others = {
            "adversarial.kind": (self.adversarial.kind, "none"),
            "encoder.frozen": (self.encoder.frozen, "none"),
        }
        if self.run.compile == "whole":
            raise ValueError("distillation is given and run.compile is 'whole'; allowed with it: 'auto', 'off'")
        for name, (value, allowed) in others.items():
            if value != allowed:
                raise ValueError(f"distillation is given and {name} is {value!r}; allowed with it: {allowed!r}")
        return self


AnySettings = FinetuneSettings | TranslationSettings


@dataclass(frozen=True)
class TaskData:
    """The examples of a task, read and checked, and the settings with values that depend on them."""

    settings: AnySettings
    train: Sequence[Any]
    dev: Sequence[Any]
    notices: tuple[str, ...] = ()
    """Notices about the rows."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """Row counts by split and label."""


@dataclass
class Finetuning:
    """A run that is ready to start."""

    trainer: Trainer
    data: TaskData
    notices: list[str]
    """Notices about the data."""
    counts: dict[str, Any]
    """Rows, labels and truncated sequences by split."""
    evaluator: Evaluator | None = None
    """Evaluator of a task with a head on an encoder."""
    teacher: Evaluation | None = None
    """Evaluation of the teacher on dev, if there is one."""

    def evaluate(self) -> tuple[Evaluation, Sequence[Answer]]:
        """Evaluate the model on dev; return its answers as well."""
        settings, model = self.data.settings, self.trainer.model
        if self.evaluator is None:
            return settings.task.evaluate_model(model, self.data.dev, settings.sequences)
        evaluation = self.evaluator.evaluate(model)
        return evaluation, self.evaluator.answers


def read_data(settings: AnySettings, train: Table, dev: Table, notices: Sequence[str] = ()) -> TaskData:
    """Read and check the examples of both splits; `notices` come before those about the rows."""
    train, left_out = drop_empty_rows(settings.task, train)
    settings = settings.changed(task=settings.task.resolve(train))
    tables = {"train": train, "dev": dev}
    examples = {split: settings.task.examples(table) for split, table in tables.items()}
    found, counts = data_notices(settings.task, tables, examples)
    return TaskData(settings, examples["train"], examples["dev"], (*notices, *left_out, *found), counts)


def make_finetuning(
    data: TaskData, out: Path, *, start: Model | None = None, device: str = "auto", show: bool = True
) -> Finetuning:
    """Build the run; `start` is a model given in Python, which is copied."""
    if isinstance(data.settings, TranslationSettings):
        return _make_translation(data, data.settings, out, start=start, device=device, show=show)
    return _make_encoder_task(data, data.settings, out, start=start, device=device, show=show)


def _make_encoder_task(
    data: TaskData, settings: FinetuneSettings, out: Path, *, start: Model | None, device: str, show: bool
) -> Finetuning:
    task, sequences = settings.task, settings.sequences
    processes = processes_of(device)
    model, teacher = starting_pair(settings, data.train, start)
    encoding = Encoding.of(model, sequences.length)
    if teacher is not None:
        encoding = _joint_encoding(encoding, model, teacher, sequences.length)
    train = task.features(task.augment(data.train), encoding)
    dev = task.features(data.dev, encoding)
    cut, lost = length_notices({"train": train, "dev": dev}, sequences.length)
    notices = [*_preset_notices(settings, start), *data.notices, *cut]
    counts = {split: {**count, **lost.get(split, {})} for split, count in data.counts.items()}
    if settings.quantisation is not None:
        plan = ExamplePlan(train, sequences, settings.batch.examples, settings.run.seed)
        calibrate_ranges(model, plan, settings.quantisation.calibration)
    if settings.head.start == "regression":
        model = model.to(device_type(device))
        fit_scores(model, task.objective(data.train), train, sequences, settings.run.seed)
    objective = training_objective(task.objective(data.train), settings, teacher)
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
    return Finetuning(trainer, data, notices, {**counts, "notices": notices}, evaluator, teacher_evaluation)


def _make_translation(
    data: TaskData, settings: TranslationSettings, out: Path, *, start: Model | None, device: str, show: bool
) -> Finetuning:
    model = translation_model(settings, data.train, start)
    config = settings.sequences
    train, dev = (settings.pair_task.pairs(examples, model, config) for examples in (data.train, data.dev))
    if settings.quantisation is not None:
        calibrate_pair_ranges(model, train, config, settings.quantisation.calibration, settings.run.seed)
    notices = [*data.notices]
    counts: dict[str, Any] = {}
    for split, pairs in (("train", train), ("dev", dev)):
        counts[split] = {**data.counts[split], "dropped": pairs.dropped, "cut": pairs.cut}
        if pairs.dropped or pairs.cut:
            lost = f"{pairs.dropped:,} left out, {pairs.cut:,} cut"
            notices.append(f"{split}: {lost} of the pairs with a text of more than {config.length} tokens")
    trainer = pair_trainer(
        settings.method,
        model,
        settings.objective.build(),
        train,
        dev,
        config,
        out,
        settings=settings.plain(),
        targets_per_token=settings.objective.targets_per_token,
        device=device,
        show=show,
        notices=notices,
    )
    return Finetuning(trainer, data, notices, {**counts, "notices": notices})


def translation_model(
    settings: TranslationSettings, train: Sequence[Any] | None, start: Model | None = None
) -> Seq2Seq:
    """Return the encoder-decoder to train; fresh weights get a tokenizer learned from the training pairs."""
    source = settings.model
    if start is not None:
        model = require_decoder(copy.deepcopy(start).cpu().float())
        settings.pair_task.check_tokenizer(model.require_tokenizer())
    elif source.folder is not None:
        check_name(source.folder)
        model = require_decoder(source.with_overrides(load(source.folder)))
        settings.pair_task.check_tokenizer(model.require_tokenizer())
    else:
        config = translation_config(source, settings.tokenizer.vocabulary)  # raises before a tokenizer is learned
        learned = settings.tokenizer.learn(settings.task.texts(train or ()))
        tokenizer = settings.pair_task.complete_tokenizer(learned)
        config = translation_config(source, tokenizer.size)
        if config.encoder.vocabulary < tokenizer.size:
            raise InputError(
                f"model.overrides.vocabulary is {config.encoder.vocabulary}; the tokenizer has {tokenizer.size} "
                "tokens: leave it out"
            )
        model = require_decoder(build(config, seed=settings.run.seed))
        model.tokenizer = tokenizer
    for stack in (model.encoder, model.decoder):
        if stack.embedding.position is not None and settings.sequences.length > stack.embedding.max_length:
            raise InputError(
                f"sequences.length is {settings.sequences.length}; the model takes at most {stack.embedding.max_length}"
            )
    return require_decoder(add_quantisation(model, settings.quantisation))


def translation_config(source: ModelSource, vocabulary: int) -> ModelConfig:
    """Return the config of fresh weights; raise InputError if it has no decoder."""
    config = source.config(vocabulary)
    if config is None or config.decoder is None:
        raise InputError(
            f"MODEL {source.name!r} has no decoder, which translation needs; the preset transformer-small has one"
        )
    return config


def _joint_encoding(encoding: Encoding, student: Model, teacher: Model, length: int) -> Encoding:
    """Return an encoding for both models: with token types if either uses them and the other ignores them."""
    theirs = Encoding.of(teacher, length)
    ignores_types = student.config.encoder.embedding.types == 0
    return replace(encoding, has_types=encoding.has_types or (theirs.has_types and ignores_types))


def _preset_notices(settings: FinetuneSettings, start: Model | None) -> list[str]:
    """Return a notice if the model is a preset, which has the name of a published model but not its weights."""
    if start is not None or not settings.model.is_preset:
        return []
    name = settings.model.name
    return [f"{name} is a preset: its weights are fresh; to start from pre-trained ones, give the folder of a model"]


def starting_pair(
    settings: FinetuneSettings, train: Sequence[Any], start: Model | None = None
) -> tuple[Model, Model | None]:
    """Return the untrained model with the head of its task, and its teacher, if it has one."""
    task, seed, distillation = settings.task, settings.run.seed, settings.distillation
    if distillation is None:
        return starting_model(settings, train, start), None
    teacher = read_teacher(distillation.teacher)
    model = starting_model(settings, train, start, teacher.require_tokenizer())
    check_task(distillation, task, model, teacher)
    check_tokenizer(model.require_tokenizer(), teacher, distillation.teacher)
    return fit_student(model, teacher.config, distillation.terms, distillation.layers, seed=seed), teacher


def starting_model(
    settings: FinetuneSettings, train: Sequence[Any], start: Model | None = None, tokenizer: Tokenizer | None = None
) -> Model:
    """Return the model with the head of its task; fresh weights use the given tokenizer or learn one."""
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
    head = settings.head.applied(task.head(model.config))
    if isinstance(head, EmbedderConfig):
        head = head.changed(texts=head.texts.changed(max_length=settings.sequences.length))
    return add_quantisation(with_task_head(model, head, seed=seed), settings.quantisation)


def training_objective(
    objective: Supervised, settings: FinetuneSettings, teacher: Model | None = None
) -> Supervised | Adversarial | Distillation:
    """Add adversarial training or distillation to the objective of a task."""
    encoder = settings.encoder
    task = replace(objective, layer_decay=encoder.layer_decay, frozen=encoder.frozen)
    if settings.distillation is None:
        return settings.adversarial.wrap(task)
    terms, layers = name_terms(settings.distillation.terms), settings.distillation.layers
    return Distillation(task, terms, teacher=teacher, layer_map=layers)


def processes_of(device: str) -> int:
    """Return the number of processes; raise InputError if accelerate's config shards the weights."""
    processes = process_state(device).num_processes
    if processes > 1 and sharding.is_requested():
        raise InputError(
            "accelerate's config requests sharded weights (FSDP); allowed in fine-tuning: whole copies (DDP), since "
            "every process evaluates dev, such as configs/accelerate/one-machine-ddp.yaml"
        )
    return processes


SAMPLE_EXAMPLES = 2000
"""Number of examples to measure lengths on."""


def explain_costs(data: TaskData, start: Model | None = None) -> dict[str, str]:
    """Return steps, tokens and FLOPs as names and values to print."""
    settings, train = data.settings, data.train
    if isinstance(settings, TranslationSettings):
        return _explain_translation(settings, start)
    chosen = np.linspace(0, len(train) - 1, min(len(train), SAMPLE_EXAMPLES)).astype(int)
    sample = [train[index] for index in chosen.tolist()]
    model, teacher = starting_pair(settings, sample, start)
    features = settings.task.features(settings.task.augment(sample), Encoding.of(model, settings.sequences.length))
    scale = len(train) / len(sample)
    batches = -(-round(len(features) * scale) // settings.batch.examples)
    run = settings.run.run(batches)
    length = float(features.tokens.lengths.mean())
    tokens = settings.run.epochs * scale * len(features.tokens.tokens)
    cost = settings.adversarial.cost
    if teacher is not None:
        cost = teaching_cost(model.config, teacher.config, max(1, int(length)))
    flops = cost * training_flops(model.config, max(1, int(length)), 0.0)
    return {
        "parameters": f"{parameters(model.config):,}",
        "examples": f"{len(train):,} in train, {len(data.dev):,} in dev",
        "length": f"{length:.1f} tokens on average, {features.cut / len(features.tokens):.1%} at the limit",
        "steps": f"{run.steps:,}, {batches:,} an epoch, {round(settings.schedule.warmup * run.steps):,} of warm-up",
        "evaluations": f"every {run.evaluate_every:,} steps",
        "tokens": f"{tokens:,.0f}",
        "training FLOPs per token": f"{flops:.3e}",
        "training FLOPs in all": f"{flops * tokens:.3e}",
    }


def _explain_translation(settings: TranslationSettings, start: Model | None) -> dict[str, str]:
    """Return the costs of a run; sequences count as full, the vocabulary as large as requested."""
    source, method = settings.model, settings.method
    if start is None and source.folder is None:
        config = translation_config(source, settings.tokenizer.vocabulary)
    else:
        config = translation_model(settings, None, start).config
    assert config.decoder is not None
    flops = training_flops(config, method.phases[0].length, settings.objective.targets_per_token)
    return {"vocabulary": f"{config.decoder.vocabulary:,}", **method.costs(config, [flops])}
