"""How a run is carried out and how weights are moved, as settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field, model_validator

from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import parameters
from bertsmith.settings import Record
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


def device_type(device: str) -> str:
    """ "cuda" or "cpu" for what was asked for: "auto", "cpu" or "cuda"."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise InputError('device is "cuda" and this machine has no GPU that PyTorch can use; allowed: auto, cpu')
    return "cuda" if device != "cpu" and has_cuda else "cpu"


def peak_flops(device: torch.device) -> float | None:
    """The device's peak rate in bfloat16, or None where it is not known."""
    if device.type != "cuda":
        return None
    words = f" {torch.cuda.get_device_name(device).replace('-', ' ')} "
    return next((rate for mark, rate in _PEAKS.items() if f" {mark} " in words), None)


class RunConfig(Record):
    """How long a run takes and how it is carried out."""

    steps: int = Field(default=1000, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**62)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the matrix products; "auto" is bfloat16 on a GPU and float32 elsewhere. Weights stay float32."""
    compile: Literal["off", "on", "whole", "graphs"] = "off"
    """torch.compile: each layer by itself ("on", ready in seconds), or forward and backward pass as a whole ("whole",
    minutes); "graphs" also replays the whole as CUDA graphs, for GPUs."""
    workers: int = Field(default=0, ge=0)
    """Processes that read batches, at most as many as there are cores."""
    log_every: int = Field(default=10, gt=0)
    evaluate_every: int = Field(default=500, gt=0)
    evaluate_batches: int = Field(default=16, gt=0)
    """Micro-batches of the held-out part that an evaluation reads."""
    checkpoint_every: int = Field(default=500, gt=0)
    keep: int = Field(default=2, ge=0)
    """Checkpoints that are kept besides the best one, newest first; 0 for none at all, so that a run cannot go on."""
    choose: Literal["last", "best"] = "last"
    """Which weights the model has at the end: those of the last step, or of the best evaluation."""
    patience: int | None = Field(default=None, ge=1)
    """Evaluations without a better one after which the run ends early; None for never."""
    average_last: int = Field(default=1, ge=1)
    """The model at the end is the mean of the weights of the last so many checkpoints."""
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get the log, too."""

    def is_half(self, device: str) -> bool:
        """Whether the matrix products are in bfloat16 on a device asked for as "auto", "cpu" or "cuda"."""
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
    """How weights are moved, on how much data at a time."""

    run: RunConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    phases: tuple[Phase, ...]

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.optimizer.learning_rate * self.schedule.factor(step, self.run.steps)

    def with_steps(self, steps: int) -> "Method":
        """The method of a run of another length; all that is a share of the steps follows."""
        return replace(self, run=self.run.changed(steps=steps))

    def phase(self, step: int) -> int:
        """The index of the phase a step, counted from 0, belongs to."""
        return sum(begin <= step for begin in borders(self.phases, self.run.steps)[1:-1])

    def micro_batches(self, step: int, processes: int) -> int:
        """The micro-batches of one step on each process."""
        return self.phases[self.phase(step)].micro_batches(step, self.run.steps, processes)

    def tokens(self) -> tuple[int, ...]:
        """The tokens of each phase on one process, pads counted in."""
        phases = [phase for phase in self.phases if isinstance(phase, TokenPhase)]
        return tuple(
            sum(count * steps for count, steps in counts.items()) * phase.micro_tokens
            for phase, counts in zip(phases, timetable(phases, self.run.steps, 1), strict=True)
        )

    def costs(self, config: ModelConfig, flops_per_token: Sequence[float]) -> dict[str, str]:
        """What training a network takes on one device, as names and values to print."""
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
