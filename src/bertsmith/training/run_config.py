"""Settings of a run: length, precision, logging and checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from accelerate import PartialState
from pydantic import Field, model_validator

from bertsmith.data.devices import device_type
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import parameters
from bertsmith.settings import Record
from bertsmith.training.compilation import Compile, TrainingLoad
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.phases import Phase, TokenPhase, borders, timetable

# dense bfloat16 multiply-add rates from the vendors' data sheets, in operations a second
_PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


def process_state(device: str) -> PartialState:
    """Join the processes that `accelerate launch` started, by NCCL for GPUs and by Gloo for CPUs.

    Without a GPU accelerate has to be told so: with its config for GPUs, every process would believe to be alone.
    """
    return PartialState(cpu=device_type(device) == "cpu" or None)


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak FLOPs per second in bfloat16; None if unknown."""
    if device.type != "cuda":
        return None
    words = f" {torch.cuda.get_device_name(device).replace('-', ' ')} "
    return next((rate for mark, rate in _PEAKS.items() if f" {mark} " in words), None)


class RunConfig(Record):
    """Length, precision, logging and checkpoints of a run."""

    steps: int = Field(default=1000, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**62)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix products; "auto" is bfloat16 on a GPU and float32 elsewhere. Weights stay float32."""
    compile: Compile = "auto"
    """torch.compile: each layer by itself ("on", ready in seconds), or forward and backward pass as a whole ("whole",
    minutes). "graphs" compiles each layer and replays whole passes as CUDA graphs, for one GPU. "auto" chooses by
    device, network and length of the run and reports its choice, and a safer one if that fails."""
    deterministic: bool = False
    """Bit-equal runs of one seed on the same hardware, software and number of processes: only deterministic operations
    are used, and one without a deterministic implementation raises an error. Slower on a GPU."""
    workers: int = Field(default=0, ge=0)
    """Data loader processes, at most the number of cores."""
    log_every: int = Field(default=10, gt=0)
    evaluate_every: int = Field(default=500, gt=0)
    evaluate_batches: int = Field(default=16, gt=0)
    """Micro-batches of the held-out split per evaluation."""
    checkpoint_every: int = Field(default=500, gt=0)
    keep: int = Field(default=2, ge=0)
    """Newest checkpoints to keep, besides the best one; 0 writes none, and the run cannot be resumed."""
    choose: Literal["last", "best"] = "last"
    """Weights of the final model: after the last step, or at the best evaluation."""
    patience: int | None = Field(default=None, ge=1)
    """Evaluations without improvement after which the run stops early; None for never."""
    average_last: int = Field(default=1, ge=1)
    """Number of last checkpoints whose weights are averaged for the final model."""
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that receive the log as well."""

    def is_half(self, device: str) -> bool:
        """Return whether matrix products are in bfloat16 on a requested device."""
        if self.precision == "auto":
            return device_type(device) == "cuda"
        return self.precision == "bfloat16"

    @model_validator(mode="after")
    def _check_end(self) -> "RunConfig":
        if self.choose == "best" and self.average_last > 1:
            raise ValueError(f"choose is 'best' and average_last {self.average_last}; allowed: one of the two")
        if self.keep == 0 and (self.choose == "best" or self.average_last > 1):
            raise ValueError("keep is 0, and choose 'best' and average_last read checkpoints; allowed: 1 or more")
        return self


@dataclass(frozen=True)
class Method:
    """Optimiser, schedule, phases and length of a training."""

    run: RunConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    phases: tuple[Phase, ...]

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.optimizer.learning_rate * self.schedule.factor(step, self.run.steps)

    def with_steps(self, steps: int) -> "Method":
        """Return the method for another number of steps; everything given as a share of the steps follows."""
        return replace(self, run=self.run.changed(steps=steps))

    def phase(self, step: int) -> int:
        """Return the index of the phase that a step, counted from 0, belongs to."""
        return sum(begin <= step for begin in borders(self.phases, self.run.steps)[1:-1])

    def micro_batches(self, step: int, processes: int) -> int:
        """Return the number of micro-batches of one step on each process."""
        return self.phases[self.phase(step)].micro_batches(step, self.run.steps, processes)

    def training_load(
        self, flops_per_token: Sequence[float], *, has_one_shape: bool, keeps_shapes: bool
    ) -> TrainingLoad:
        """Return the number and size of the run's forward and backward passes."""
        passes = self.run.steps * self.micro_batches(self.run.steps - 1, 1)
        sizes = [phase.micro_tokens if isinstance(phase, TokenPhase) else 0 for phase in self.phases]
        flops = max(each * tokens for each, tokens in zip(flops_per_token, sizes, strict=True))
        return TrainingLoad(has_one_shape, keeps_shapes, passes, flops)

    def tokens(self) -> tuple[int, ...]:
        """Return the tokens of each phase on one process, padding included."""
        phases = [phase for phase in self.phases if isinstance(phase, TokenPhase)]
        return tuple(
            sum(count * steps for count, steps in counts.items()) * phase.micro_tokens
            for phase, counts in zip(phases, timetable(phases, self.run.steps, 1), strict=True)
        )

    def costs(self, config: ModelConfig, flops_per_token: Sequence[float]) -> dict[str, str]:
        """Return the costs of training a network on one device, as names and values to print."""
        tokens, steps = self.tokens(), self.run.steps
        flops = [each * count for each, count in zip(flops_per_token, tokens, strict=True)]
        facts = {"parameters": f"{parameters(config):,}", "training FLOPs per token": f"{flops_per_token[0]:.3e}"}
        facts |= {"tokens": f"{sum(tokens):,} in {steps:,} steps", "training FLOPs in all": f"{sum(flops):.3e}"}
        if len(self.phases) == 1:
            return facts
        for number, (begin, end) in enumerate(pairwise(borders(self.phases, steps))):
            facts[f"phase {number + 1}, length {self.phases[number].length}"] = (
                f"steps {begin:,} to {end:,}: {tokens[number]:,} tokens, {flops[number]:.3e} FLOPs "
                f"({flops_per_token[number]:.3e} a token)"
            )
        return facts
