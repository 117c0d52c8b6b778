"""The settings of a pruning."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import Tensor

from bertsmith.answers.sequences import Features
from bertsmith.data.examples import TaskBatch
from bertsmith.models.heads import GatesConfig
from bertsmith.models.model import Model
from bertsmith.objectives.distillation import AnyTerm
from bertsmith.objectives.distillation.objective import Distillation, named
from bertsmith.objectives.distillation.terms import OutputTerm, StateTerm
from bertsmith.objectives.gating import Gating, unit_gates
from bertsmith.settings import Record
from bertsmith.shrinking.importance import Importance, ImportanceConfig
from bertsmith.shrinking.prune.units import Kept, closed, cut_down, fold
from bertsmith.shrinking.settings import ShrinkSettings
from bertsmith.tasks.base import Evaluation
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.task_trainer import ExampleBatchConfig, FinetuneRunConfig, task_trainer
from bertsmith.training.trainer import Trainer


class PruneConfig(Record):
    """Which units go, and how many."""

    by: Literal["importance", "magnitude", "l0"] = "importance"
    """What a unit is worth: what the loss would change by without it, the norm of its weights, or a gate that was
    learned under pressure to close."""
    scope: Literal["global", "layer"] = "global"
    """Whether units are ranked across layers, so that layers end up uneven, or every layer keeps the same share."""
    keep: float = Field(default=0.5, gt=0, le=1)
    """The share that stays; at least one head and one `multiple` of neurons stay in every layer."""
    keep_heads: float | None = Field(default=None, gt=0, le=1)
    """Of the heads; None for as many as `keep` says."""
    keep_neurons: float | None = Field(default=None, gt=0, le=1)
    """Of the neurons; None for as many as `keep` says."""
    counts: Literal["units", "parameters"] = "units"
    """What `keep` is a share of: the heads and the neurons, each, or the weights of all mixers and feed-forwards, with
    as large a share of the heads as of the neurons."""
    step: float = Field(default=0.1, gt=0, le=1)
    """The share that is taken away at a time, before worth is measured anew; 1 for all at once."""
    multiple: int = Field(default=8, gt=0)
    """Every layer keeps a multiple of so many neurons, which matrix products like, or all it has."""

    @model_validator(mode="after")
    def _check_counts(self) -> "PruneConfig":
        if self.counts == "parameters" and (self.keep_heads is not None or self.keep_neurons is not None):
            raise ValueError("counts is 'parameters' with keep_heads or keep_neurons; allowed: keep alone")
        return self


class GateLearning(Record):
    """How gates are learned, by = "l0"."""

    epochs: float | None = Field(default=None, gt=0)
    """Of learning weights and gates together; None for run.epochs."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Of the gates."""
    strength: float = Field(default=0.01, gt=0)
    """How hard gates are pressed to close while too many are open."""


class RecoveryConfig(Record):
    """What a pruned model learns to make up for what it lost."""

    terms: tuple[AnyTerm, ...] = Field(default=(OutputTerm(), StateTerm(weight=0.1)), min_length=1)
    """Losses between it and the unpruned model, or the labels."""
    after: float | None = Field(default=None, ge=0)
    """Epochs after the last cut; None for run.epochs, 0 for none."""
    between: float = Field(default=0.0, ge=0)
    """Epochs after every other cut."""


class PruneSettings(ShrinkSettings):
    """All that a pruning depends on."""

    method: Literal["prune"] = "prune"
    prune: PruneConfig = PruneConfig()
    importance: ImportanceConfig = ImportanceConfig()
    gates: GateLearning = GateLearning()
    recovery: RecoveryConfig = RecoveryConfig()
    batch: ExampleBatchConfig = ExampleBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5, betas=(0.9, 0.999), weight_decay=0.0)
    schedule: ScheduleConfig = ScheduleConfig(warmup=0.0)
    run: FinetuneRunConfig = FinetuneRunConfig()

    @property
    def epochs_after(self) -> float:
        """Epochs of learning after the last cut."""
        return self.run.epochs if self.recovery.after is None else self.recovery.after


Part = tuple[Sequence[Any], Features]
"""The examples of a part of the data, and what is made of them."""


def make_recovery(
    settings: PruneSettings,
    model: Model,
    teacher: Model,
    train: Part,
    dev: Part,
    out: Path,
    *,
    epochs: float,
    processes: int = 1,
    device: str = "auto",
    show: bool = True,
) -> Trainer:
    """The run in which a pruned model learns from the unpruned one or from the labels; both stay as they are."""
    task, terms = settings.task.objective(train[0]), settings.recovery.terms
    needs_teacher = any(term.needs_teacher for term in terms)
    objective = Distillation(task, named(terms), teacher=copy.deepcopy(teacher) if needs_teacher else None)
    return task_trainer(
        settings.changed(run=settings.run.changed(epochs=epochs)),
        copy.deepcopy(model),
        objective,
        train[1],
        Evaluator(settings.task, *dev, settings.sequences, task.for_evaluation()),
        out,
        processes=processes,
        cost=4 / 3 if needs_teacher else 1.0,
        device=device,
        show=show,
    )


def make_gating(
    settings: PruneSettings,
    model: Model,
    shares: tuple[float, float],
    train: Part,
    dev: Part,
    out: Path,
    *,
    processes: int = 1,
    device: str = "auto",
    show: bool = True,
) -> Trainer:
    """The run in which a copy of a model learns gates, until these shares of heads and of neurons are open."""
    task, gates = settings.task.objective(train[0]), settings.gates
    rate = gates.learning_rate / settings.optimizer.learning_rate
    objective = Gating(task, *shares, rate=rate, strength=gates.strength)
    epochs = settings.run.epochs if gates.epochs is None else gates.epochs
    # the best evaluation is an early one, before anything was given up
    run = settings.run.changed(epochs=epochs, choose="last", patience=None)
    return task_trainer(
        settings.changed(run=run),
        with_gates(model),
        objective,
        train[1],
        GatedJudge(settings.task, *dev, settings.sequences, task.for_evaluation()),
        out,
        processes=processes,
        device=device,
        show=show,
    )


class GatedJudge(Evaluator):
    """Judges a model that learns gates as it would be if they stayed what they are."""

    def evaluate(self, model: Model, watch: Callable[[TaskBatch, Tensor], None] | None = None) -> Evaluation:
        """How good it is with its gates in its weights."""
        return super().evaluate(settled(model), watch)


def with_gates(model: Model) -> Model:
    """A copy of a model with a gate on every head and neuron, all of them open."""
    encoder, units = model.config.encoder, model.encoder.units
    heads, neurons = tuple(layer.heads for layer in units), tuple(layer.neurons for layer in units)
    config = GatesConfig(
        heads=heads[:1] if encoder.shares_mixer else heads,
        neurons=neurons[:1] if encoder.shares_feedforward else neurons,
        layers=len(units),
    )
    gated = copy.deepcopy(model)
    gated.config = model.config.changed(heads=(*model.config.heads, config))
    gated.heads["gates"] = config.build(encoder.width, encoder.embedding_width, encoder.vocabulary).to(model.device)
    return gated


def without_gates(model: Model) -> Model:
    """A copy of a model that has learned gates, without them: its weights as they are."""
    plain = copy.deepcopy(model)
    del plain.heads["gates"]
    plain.config = model.config.changed(heads=tuple(head for head in model.config.heads if head.kind != "gates"))
    return plain


def settled(model: Model) -> Model:
    """A model of the same size with its gates in its weights."""
    plain = without_gates(model)
    fold(plain, unit_gates(model).settled())
    return plain


def locations(model: Model) -> Importance:
    """What units are worth by the gates that were learned: where each is."""
    heads, neurons = unit_gates(model).locations()
    # shared gates are listed for every use, and summed over uses they rank as before
    return Importance(tuple(own.detach().cpu() for own in heads), tuple(own.detach().cpu() for own in neurons))


def cut_gated(model: Model, kept: Kept) -> Model:
    """An ordinary model with the kept units alone, what their gates let through being part of the weights."""
    plain = without_gates(model)
    fold(plain, closed(kept, model.encoder.units, unit_gates(model).settled()))
    return cut_down(plain, kept)
