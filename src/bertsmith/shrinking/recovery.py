"""Recovery training of a pruned model, which learns from the unpruned model or the labels."""

import copy
from pathlib import Path

from pydantic import Field

from bertsmith.models.model import Model
from bertsmith.objectives.distillation import AnyTerm
from bertsmith.objectives.distillation.objective import Distillation, name_terms
from bertsmith.objectives.distillation.terms import HiddenStateTerm, OutputTerm
from bertsmith.settings import Record
from bertsmith.shrinking.context import ShrinkContext, ShrinkSettings
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.task_trainer import ExampleBatchConfig, FinetuneRunConfig, task_trainer
from bertsmith.training.trainer import BeforeStep, Trainer


class RecoveryConfig(Record):
    """Recovery training of a pruned model."""

    terms: tuple[AnyTerm, ...] = Field(default=(OutputTerm(), HiddenStateTerm(weight=0.1)), min_length=1)
    """Losses between the pruned model and the unpruned one or the labels."""
    after: float | None = Field(default=None, ge=0)
    """Epochs after the last pruning; None for run.epochs, 0 for no training."""


class RecoverySettings(ShrinkSettings):
    """Settings of a method that trains the pruned model to recover."""

    recovery: RecoveryConfig = RecoveryConfig()
    batch: ExampleBatchConfig = ExampleBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5, betas=(0.9, 0.999), weight_decay=0.0)
    schedule: ScheduleConfig = ScheduleConfig(warmup=0.0)
    run: FinetuneRunConfig = FinetuneRunConfig()

    @property
    def epochs_after(self) -> float:
        """Epochs of training after the last pruning."""
        return self.run.epochs if self.recovery.after is None else self.recovery.after


def recovery_trainer(
    settings: RecoverySettings,
    model: Model,
    context: ShrinkContext,
    out: Path,
    *,
    run: FinetuneRunConfig,
    show: bool = True,
    before_step: BeforeStep | None = None,
) -> Trainer:
    """Return the trainer of a copy of a pruned model; the context's model is the teacher."""
    task, terms = settings.task.objective(context.train.examples), settings.recovery.terms
    needs_teacher = any(term.needs_teacher for term in terms)
    objective = Distillation(task, name_terms(terms), teacher=copy.deepcopy(context.model) if needs_teacher else None)
    return task_trainer(
        settings.changed(run=run),
        copy.deepcopy(model),
        objective,
        context.train.features,
        Evaluator(settings.task, *context.dev, settings.sequences, task.for_evaluation()),
        out,
        processes=context.processes,
        cost=4 / 3 if needs_teacher else 1.0,
        device=context.device,
        show=show,
        before_step=before_step,
    )
