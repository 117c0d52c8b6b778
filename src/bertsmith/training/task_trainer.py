"""The trainer of a task: epochs over its examples, evaluation on dev."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field, model_validator

from bertsmith.answers.sequences import Features, Ragged
from bertsmith.data.examples import ExampleConfig, ExamplePlan, ExampleReader
from bertsmith.data.loader import SpecialTokens
from bertsmith.data.pairs import PairConfig, PairPlan, PairReader, Pairs
from bertsmith.models.cost import training_flops
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective
from bertsmith.settings import Plain, Record
from bertsmith.training.feed import PhaseData, TrainingData
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.phases import ExamplePhase
from bertsmith.training.run_config import Method, RunConfig
from bertsmith.training.trainer import BeforeStep, EvaluateStep, Trainer


class ExampleBatchConfig(Record):
    """Examples per optimiser step."""

    examples: int = Field(default=32, gt=0)
    """Examples of one step, over all processes."""
    micro_examples: int | None = Field(default=None, gt=0)
    """Examples of a micro-batch; None for a process's whole share of the batch."""


class FinetuneRunConfig(Record):
    """Length, precision, evaluation and checkpoints of a fine-tuning."""

    epochs: float = Field(default=3.0, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**62)
    evaluations: int = Field(default=1, ge=0)
    """Evaluations on dev per epoch; 0 for a single one at the end."""
    choose: Literal["last", "best"] = "best"
    """Weights of the final model: after the last step, or at the best evaluation."""
    patience: int | None = Field(default=None, ge=1)
    """Evaluations without improvement after which the run stops early; None for never."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix products; "auto" is bfloat16 on a GPU and float32 elsewhere. Weights stay float32."""
    compile: Literal["auto", "off", "whole"] = "auto"
    """torch.compile of the whole step ("whole"); "auto" is "off", since the shapes of batches vary."""
    deterministic: bool = False
    """Bit-equal runs of one seed on the same hardware, software and number of processes; slower on a GPU."""
    workers: int = Field(default=0, ge=0)
    """Data loader processes."""
    log_every: int = Field(default=10, gt=0)
    keep: int = Field(default=1, ge=0)
    """Newest checkpoints to keep during the run, besides the best one; 0 writes none: this requires choose = "last",
    and an interrupted run cannot be resumed."""
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that receive the log as well."""

    @model_validator(mode="after")
    def _check_keep(self) -> "FinetuneRunConfig":
        if self.keep == 0 and self.choose == "best":
            raise ValueError("keep is 0 and choose 'best', which reads a checkpoint; allowed: choose 'last'")
        return self

    def steps(self, batches: int) -> int:
        """Return the total number of steps for a number of batches per epoch."""
        return max(1, round(self.epochs * batches))

    def run(self, batches: int) -> RunConfig:
        """Return the run's settings in steps, for a number of batches per epoch."""
        steps = self.steps(batches)
        every = max(1, -(-batches // self.evaluations)) if self.evaluations else steps
        return RunConfig(
            steps=steps,
            seed=self.seed,
            precision=self.precision,
            compile=self.compile,
            deterministic=self.deterministic,
            workers=self.workers,
            log_every=self.log_every,
            evaluate_every=every,
            checkpoint_every=min(every, 500),
            keep=self.keep,
            choose=self.choose,
            patience=self.patience,
            track=self.track,
        )


class TaskLearning(Protocol):
    """The settings of a run over the examples of a task."""

    @property
    def sequences(self) -> ExampleConfig: ...
    @property
    def batch(self) -> ExampleBatchConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def schedule(self) -> ScheduleConfig: ...
    @property
    def run(self) -> FinetuneRunConfig: ...
    def plain(self) -> Plain: ...


def task_trainer(
    settings: TaskLearning,
    model: Model,
    objective: Objective[Any, Any],
    train: Features,
    evaluator: EvaluateStep,
    out: Path,
    *,
    processes: int,
    cost: float = 1.0,
    device: str = "auto",
    show: bool = True,
    notices: Sequence[str] = (),
    before_step: BeforeStep | None = None,
) -> Trainer:
    """Build the trainer of a model on the features of its training split; `cost` is relative to a plain step."""
    run, sequences, batch = settings.run, settings.sequences, settings.batch
    micro = batch.micro_examples or max(1, batch.examples // processes)
    plan = ExamplePlan(train, sequences, batch.examples, run.seed, parts=max(1, batch.examples // micro))
    tokenizer = model.require_tokenizer()
    flops = training_flops(model.config, max(1, int(train.tokens.lengths.mean())), 0.0)
    phase = PhaseData(plan, ExampleReader(train, sequences, tokenizer.pad), flops * cost, run.seed)
    method = Method(
        run.run(plan.batches),
        settings.optimizer,
        settings.schedule,
        (ExamplePhase(0.0, sequences.length, batch.examples, micro),),
    )
    return Trainer(
        model,
        objective,
        TrainingData((phase,), None, None),
        method,
        out,
        fingerprint=_fingerprint(train, tokenizer.hash, is_half=run.run(1).is_half(device)),
        settings=settings.plain(),
        evaluator=evaluator,
        device=device,
        show=show,
        notices=notices,
        before_step=before_step,
    )


def pair_trainer(
    method: Method,
    model: Model,
    objective: Objective[Any, Any],
    train: Pairs,
    dev: Pairs,
    sequences: PairConfig,
    out: Path,
    *,
    settings: Plain,
    targets_per_token: float,
    device: str = "auto",
    show: bool = True,
    notices: Sequence[str] = (),
) -> Trainer:
    """Return the trainer of an encoder-decoder over pairs of texts."""
    tokenizer, run = model.require_tokenizer(), method.run
    special = SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)
    length = int(max(side.mean() for side in train.lengths))
    flops = training_flops(model.config, length, targets_per_token)
    phase = PhaseData(PairPlan(train, sequences, run.seed), PairReader(train, sequences, special), flops, run.seed)
    return Trainer(
        model,
        objective,
        TrainingData((phase,), PairPlan(dev, sequences, 0), PairReader(dev, sequences, special)),
        method,
        out,
        fingerprint=pairs_fingerprint(train, tokenizer.hash, is_half=run.is_half(device)),
        settings=settings,
        device=device,
        show=show,
        notices=notices,
    )


def _fingerprint(train: Features, tokenizer: str, *, is_half: bool) -> str:
    """Hash the examples and the precision: a resumed run must have the same."""
    arrays = [train.tokens.tokens, train.tokens.starts, train.items]
    for target in train.targets.values():
        arrays += [target.tokens, target.starts] if isinstance(target, Ragged) else [target]
    return _digest(arrays, tokenizer, is_half=is_half)


def pairs_fingerprint(train: Pairs, tokenizer: str, *, is_half: bool) -> str:
    """Hash the pairs and the precision: a resumed run must have the same."""
    sides = (train.source, train.target)
    return _digest([array for side in sides for array in (side.tokens, side.starts)], tokenizer, is_half=is_half)


def _digest(arrays: Sequence[np.ndarray], tokenizer: str, *, is_half: bool) -> str:
    digest = hashlib.sha256(tokenizer.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{digest.hexdigest()} {'bfloat16' if is_half else 'float32'}"
