"""AdamW with the right groups, and the learning rate over time."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field

from bertsmith.objectives.base import Portion
from bertsmith.settings import Record

Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Record):
    """AdamW with decoupled weight decay."""

    learning_rate: float = Field(default=5e-4, gt=0, le=10)
    """The highest rate the schedule reaches."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    epsilon: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    """On matrices and embeddings; never on biases and norms."""
    clip: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient; 0 for no limit."""

    def build(self, portions: Sequence[Portion]) -> torch.optim.AdamW:
        """One AdamW over all portions: it treats every weight by itself, so each portion has an optimiser of its own.

        Two groups for each portion; `portion_rate` is what its learning rate is scaled by.
        """
        groups = []
        for portion in portions:
            matrices = [parameter for parameter in portion.parameters if parameter.dim() >= 2]
            others = [parameter for parameter in portion.parameters if parameter.dim() < 2]
            for parameters, decay in ((matrices, self.weight_decay), (others, 0.0)):
                if parameters:
                    groups.append({"params": parameters, "weight_decay": decay, "portion_rate": portion.rate})
        fused = all(parameter.is_cuda for portion in portions for parameter in portion.parameters)
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.epsilon, fused=fused)

    def set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """Sets the learning rate of the next step."""
        for group in optimizer.param_groups:
            group["lr"] = rate * group["portion_rate"]


class ScheduleConfig(Record):
    """The learning rate as a share of its peak, from the first step to the last."""

    kind: Literal["linear", "cosine", "noam", "wsd", "constant"] = "linear"
    """After the warm-up: straight to the floor, half a cosine, 1/√step, or constant with a 1-√ decay at the end."""
    warmup: float = Field(default=0.06, ge=0, le=1)
    """Share of the steps in which the rate rises in a straight line."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """For "wsd": share of the steps in which the rate falls."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """What the rate falls to, as a share of the peak."""

    def factor(self, step: int, steps: int) -> float:
        """The share of the peak rate in step `step` of `steps`, counted from 0."""
        warmup = round(self.warmup * steps)
        if step < warmup:
            return (step + 1) / warmup
        if self.kind == "constant":
            return 1.0
        if self.kind == "noam":
            return math.sqrt(max(1, warmup) / (step + 1))
        if self.kind == "wsd":
            begin = steps - round(self.decay * steps)
            gone = max(0.0, (step + 1 - begin) / max(1, steps - begin))
            return self.floor + (1 - self.floor) * (1 - math.sqrt(gone))
        gone = (step + 1 - warmup) / max(1, steps - warmup)
        fall = 0.5 * (1 + math.cos(math.pi * gone)) if self.kind == "cosine" else 1 - gone
        return self.floor + (1 - self.floor) * fall


class BatchConfig(Record):
    """How many tokens an optimiser step sees."""

    tokens: int = Field(default=32768, gt=0)
    """Tokens of one step, over all processes: a multiple of sequences.micro_tokens times the processes."""
    ramp_from: int | None = Field(default=None, gt=0)
    """Tokens of the first step; None for no ramp."""
    ramp: float = Field(default=0.6, ge=0, le=1)
    """Share of the steps in which the batch grows in a straight line to its full size."""

    def micro_batches(self, step: int, steps: int, micro_tokens: int, processes: int) -> int:
        """The micro-batches of one step on each process: whole ones, at least one."""
        tokens = float(self.tokens)
        if self.ramp_from is not None and step < self.ramp * steps:
            tokens = self.ramp_from + (self.tokens - self.ramp_from) * step / (self.ramp * steps)
        return max(1, round(tokens / (micro_tokens * processes)))
