"""Magnitude pruning of single weights (Zhu & Gupta 2018; Gordon et al. 2020): masks that stay through training.

gradual:  train while masks grow to the target -> train with fixed masks
one_shot: prune at once                        -> train with fixed masks
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from rich.console import Console

from bertsmith.errors import InputError
from bertsmith.models.masks import (
    Matrix,
    Pattern,
    Scope,
    masked_weights,
    masks_of,
    prunable_weights,
    prune_weights,
    put_masks,
    sparsity_of,
)
from bertsmith.models.model import Model
from bertsmith.settings import Record
from bertsmith.shrinking.context import STAGE_FILES, ShrinkContext
from bertsmith.shrinking.recovery import RecoverySettings, recovery_trainer
from bertsmith.tasks.base import Evaluation
from bertsmith.training.task_trainer import FinetuneRunConfig
from bertsmith.training.trainer import Trainer

PRUNING, RECOVERY = "pruning", "recovery"
TEMPORARY = tuple(f"{stage}/{name}" for stage in (PRUNING, RECOVERY) for name in STAGE_FILES)
"""Intermediate models, which a finished run does not need; logs stay."""
SPEED_NOTE = (
    "Pruned weights are zeros in dense matrices: the model is not faster, and model.safetensors is not smaller. Only "
    "compressed or sparse files are smaller."
)
FOURS_NOTE = (
    "Pruned weights are zeros in dense matrices: model.safetensors is not smaller, and dense products are not faster. "
    "GPUs multiply 2:4 matrices faster in half precision and int8 after torch.sparse.to_sparse_semi_structured."
)


class WeightPruningConfig(Record):
    """How many weights to prune, which ones and when."""

    sparsity: float = Field(default=0.5, ge=0, lt=1)
    """Share of weights to prune."""
    pattern: Pattern = "free"
    """"free", or "2:4": the two smallest of every four inputs, which GPUs can multiply faster."""
    scope: Scope = "matrix"
    """Prune the same share of every matrix, or rank the weights of all matrices together ("global")."""
    token_table: bool = False
    """Prune the token table, too; every token keeps its largest weight."""
    schedule: Literal["gradual", "one_shot"] = "gradual"
    """Raise the sparsity during training (Zhu & Gupta), or prune at once before it."""
    epochs: float | None = Field(default=None, gt=0)
    """Epochs in which the sparsity rises, with schedule = "gradual"; None for run.epochs."""
    every: int = Field(default=10, gt=0)
    """Steps between two increases of the sparsity, with schedule = "gradual"."""

    @model_validator(mode="after")
    def _check_pattern(self) -> "WeightPruningConfig":
        if self.pattern == "free":
            return self
        fixed = {"sparsity": 0.5, "scope": "matrix", "schedule": "one_shot"}
        for name, allowed in fixed.items():
            if getattr(self, name) != allowed:
                raise ValueError(f"pattern is '2:4' and {name} is {getattr(self, name)!r}; allowed: {allowed!r}")
        return self


class WeightSettings(RecoverySettings):
    """All settings of weight pruning."""

    keeps_masks: ClassVar[bool] = True

    method: Literal["weights"] = "weights"
    weights: WeightPruningConfig = WeightPruningConfig()

    @property
    def pruning_run(self) -> FinetuneRunConfig:
        """The run in which the sparsity rises; its best evaluation is an early one, with few weights pruned."""
        epochs = self.run.epochs if self.weights.epochs is None else self.weights.epochs
        return self.run.changed(epochs=epochs, choose="last", patience=None)


@dataclass(frozen=True)
class CubicSchedule:
    """Rising sparsity (Zhu & Gupta 2018): s_t = s_f + (s_i - s_f)(1 - t / (n - 1))³ at the updates t = 0 … n - 1."""

    begin: float
    """s_i, the sparsity before the run."""
    end: float
    """s_f, the target."""
    steps: int
    every: int

    @property
    def updates(self) -> int:
        """n: every few steps, from the first step on."""
        return -(-self.steps // self.every)

    def sparsity(self, step: int) -> float:
        """Return the sparsity from a step on, counted from 0."""
        update = min(step // self.every, self.updates - 1)
        if update == self.updates - 1:
            return self.end
        return self.end + (self.begin - self.end) * (1 - update / (self.updates - 1)) ** 3


@dataclass(frozen=True)
class MatrixCount:
    """Weights of one matrix."""

    name: str
    weights: int
    kept: int


@dataclass(frozen=True)
class SparseStorage:
    """Bytes of the pruned matrices in float32, without biases and other dense weights."""

    dense_bytes: int
    """All weights, as in model.safetensors."""
    bitmask_bytes: int
    """One bit per weight and the kept values."""
    csr_bytes: int
    """Compressed rows: kept values, their columns in 16 bits, and 32 bits per row."""

    @classmethod
    def of(cls, matrices: list[Matrix]) -> "SparseStorage":
        """Compute the sizes of matrices."""
        weights, kept = sum(one.mask.numel() for one in matrices), sum(one.kept for one in matrices)
        rows = sum(one.mask.numel() // one.mask.shape[-1] + 1 for one in matrices)
        bits = sum(-(-one.mask.numel() // 8) for one in matrices)
        return cls(4 * weights, 4 * kept + bits, 6 * kept + 4 * rows)


@dataclass(frozen=True)
class WeightPrunedModel:
    """A model with masks, its scores and its storage."""

    model: Model
    evaluation: Evaluation
    teacher_score: float
    pruned_score: float
    """Score with the final masks, before training with them fixed."""
    sparsity: float
    matrices: tuple[MatrixCount, ...]
    storage: SparseStorage
    seconds: float
    """Time spent training."""


def shrink_weights(settings: WeightSettings, context: ShrinkContext) -> WeightPrunedModel | None:
    """Prune single weights and train the rest; None on processes other than the main one."""
    console, device = Console(quiet=not context.is_main), context.model.device
    model, seconds = prepare_masks(settings, context.model), 0.0
    if settings.weights.schedule == "gradual":
        console.rule("pruning")
        folder = context.out / PRUNING
        model, seconds = context.finished_stage(folder) or context.run_stage(
            make_pruning(settings, model, context, folder), folder
        )
        model = model.to(device)
    else:
        prune_to_target(settings, model)
    pruned_score = context.evaluate(model).score
    if settings.epochs_after:
        console.rule("training with fixed masks")
        folder, run = context.out / RECOVERY, settings.run.changed(epochs=settings.epochs_after)
        model, took = context.finished_stage(folder) or context.run_stage(
            recovery_trainer(settings, model, context, folder, run=run), folder
        )
        model, seconds = model.to(device), seconds + took
    if not context.is_main:
        return None
    matrices = [matrix for masked in masked_weights(model) for matrix in masked.matrices]
    return WeightPrunedModel(
        model=model,
        evaluation=context.evaluate(model),
        teacher_score=context.evaluate(context.model).score,
        pruned_score=pruned_score,
        sparsity=sparsity_of(matrices),
        matrices=tuple(MatrixCount(one.name, one.mask.numel(), one.kept) for one in matrices),
        storage=SparseStorage.of(matrices),
        seconds=seconds,
    )


def prepare_masks(settings: WeightSettings, model: Model) -> Model:
    """Return a copy in which every weight to prune has a mask; masks of an earlier pruning are kept.

    Raise InputError if the model is quantised or already sparser than the target.
    """
    if model.config.quantisation is not None:
        raise InputError("the model is quantised; prune its weights first, then quantise the result")
    config, earlier = settings.weights, masks_of(model)
    names = prunable_weights(model, token_table=config.token_table).items()
    copied = copy.deepcopy(model)
    put_masks(copied, {name: earlier.get(name, torch.ones_like(weight, dtype=torch.bool)) for name, weight in names})
    sparsity = current_sparsity(copied)
    if sparsity > config.sparsity:
        raise InputError(
            f"weights.sparsity is {config.sparsity:g}, but {sparsity:.3g} of the weights are pruned already; allowed: "
            "more, or model.keep_masks=false to start without the masks"
        )
    return copied


def current_sparsity(model: Model) -> float:
    """Return the share of masked weights that is pruned."""
    return sparsity_of([matrix for masked in masked_weights(model) for matrix in masked.matrices])


def prune_to_target(settings: WeightSettings, model: Model) -> None:
    """Prune the final share of weights at once, in place."""
    config = settings.weights
    prune_weights(model, config.sparsity, pattern=config.pattern, scope=config.scope)


def make_pruning(
    settings: WeightSettings, model: Model, context: ShrinkContext, out: Path, *, show: bool = True
) -> Trainer:
    """Return the trainer of a copy of a model whose masks grow to the target."""
    config, run = settings.weights, settings.pruning_run
    batches = -(-len(context.train.features) // settings.batch.examples)
    schedule = CubicSchedule(current_sparsity(model), config.sparsity, run.steps(batches), config.every)

    def prune(trained: Model, step: int) -> None:
        if step % config.every == 0:
            prune_weights(trained, schedule.sparsity(step), scope=config.scope)

    trainer = recovery_trainer(settings, model, context, out, run=run, show=show, before_step=prune)
    assert trainer.method.run.steps == schedule.steps, "the schedule must end with the run"
    return trainer


def speed_note(settings: WeightSettings) -> str:
    """Return the note about speed and size that result and console show."""
    return SPEED_NOTE if settings.weights.pattern == "free" else FOURS_NOTE


def explain_weights(settings: WeightSettings, model: Model, examples: int) -> dict[str, str]:
    """Describe the matrices to prune and the cost of training."""
    masked = prepare_masks(settings, model)
    matrices = [matrix for one in masked_weights(masked) for matrix in one.matrices]
    batches, config = -(-examples // settings.batch.examples), settings.weights
    total = sum(matrix.mask.numel() for matrix in matrices)
    facts = {"matrices": f"{len(matrices)} with {total:,} weights, {config.sparsity:.0%} of them pruned"}
    if config.schedule == "gradual":
        steps = settings.pruning_run.steps(batches)
        facts["pruning"] = f"{steps:,} steps, masks change every {config.every}"
    if settings.epochs_after:
        steps = settings.run.changed(epochs=settings.epochs_after).steps(batches)
        facts["training with fixed masks"] = f"{steps:,} steps"
    return {**facts, "speed": speed_note(settings)}
