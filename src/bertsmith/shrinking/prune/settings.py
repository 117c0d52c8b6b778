"""The settings of a pruning."""

from typing import Literal

from pydantic import Field, model_validator

from bertsmith.objectives.distillation import AnyTerm
from bertsmith.objectives.distillation.terms import OutputTerm, StateTerm
from bertsmith.settings import Record
from bertsmith.shrinking.importance import ImportanceConfig
from bertsmith.shrinking.settings import ShrinkSettings
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.task_trainer import ExampleBatchConfig, FinetuneRunConfig


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
