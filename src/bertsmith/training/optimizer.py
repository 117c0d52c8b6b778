"""AdamW with the right groups, and learning rate and batch over time."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch.distributed.tensor import DTensor

from bertsmith.objectives.base import Portion
from bertsmith.settings import Record
from bertsmith.training.adam import Adam

Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Record):
    """AdamW with decoupled weight decay."""

    kind: Literal["adamw", "stable_adamw"] = "adamw"
    """The second shortens the step of a tensor whose gradient jumps, which takes the place of clipping: clip = 0."""
    learning_rate: float = Field(default=5e-4, gt=0, le=10)
    """The highest rate the schedule reaches."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    epsilon: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    """On matrices and embeddings; never on biases and norms."""
    bias_correction: bool = True
    """Whether the first steps make up for moments that begin at 0; Google's code for BERT and ELECTRA does not."""
    clip: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient; 0 for no limit."""

    def build(self, portions: Sequence[Portion]) -> torch.optim.AdamW:
        """One AdamW over all portions: it treats every weight by itself, so each portion has an optimiser of its own.

        Each group of a portion is split in two, matrices and others; `rate` is what its learning rate is scaled by.
        """
        groups = []
        for given in (group for portion in portions for group in portion.groups):
            matrices = [parameter for parameter in given.parameters if parameter.dim() >= 2]
            others = [parameter for parameter in given.parameters if parameter.dim() < 2]
            for members, decay in ((matrices, self.weight_decay), (others, 0.0)):
                if members:
                    groups.append({"params": members, "weight_decay": decay, "rate": given.rate})
        parameters = [parameter for portion in portions for parameter in portion.parameters]
        # one kernel for all that a weight needs; on a CPU it does not know sharded tensors
        kinds = {parameter.device.type for parameter in parameters}
        is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        fused = kinds == {"cuda"} or (kinds == {"cpu"} and not is_sharded)
        settings: dict[str, Any] = {"lr": self.learning_rate, "betas": self.betas, "eps": self.epsilon, "fused": fused}
        is_steady = self.kind == "stable_adamw"
        if self.bias_correction and not is_steady:
            return torch.optim.AdamW(groups, **settings)
        return Adam(groups, bias_correction=self.bias_correction, steady=is_steady, **settings)

    def set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """Sets the learning rate of the next step."""
        for group in optimizer.param_groups:
            group["lr"] = rate * group["rate"]


class ScheduleConfig(Record):
    """The learning rate as a share of its peak, from the first step to the last."""

    kind: Literal["linear", "cosine", "noam", "wsd", "constant"] = "linear"
    """After the warm-up: straight to the floor, half a cosine, 1/√step, or constant with a 1-√ decay at the end."""
    warmup: float = Field(default=0.06, ge=0, le=1)
    """Share of the steps in which the rate rises in a straight line."""
    begin: float = Field(default=0.0, ge=0, le=1)
    """What it rises from, as a share of the peak. Cramming's triangle is "linear" with warmup 0.75 and begin 0.25."""
    fall: Literal["after_warmup", "from_start", "throughout"] = "after_warmup"
    """For "linear" and "cosine": from the peak on; from the first step on, unseen in the warm-up, so that the rate
    jumps at its end (BERT, DeBERTa); or from the first step on, times the warm-up (ELECTRA)."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """For "wsd": share of the steps in which the rate falls."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """What the rate falls to, as a share of the peak."""

    @model_validator(mode="after")
    def _check_fall(self) -> "ScheduleConfig":
        if self.fall != "after_warmup" and self.kind not in ("linear", "cosine"):
            raise ValueError(f"fall is {self.fall!r} with kind {self.kind!r}; allowed: 'after_warmup'")
        return self

    def factor(self, step: int, steps: int) -> float:
        """The share of the peak rate in step `step` of `steps`, counted from 0; no step has the rate 0 but the last."""
        warmup = round(self.warmup * steps)
        rise = self.begin + (1 - self.begin) * min(1.0, (step + 1) / max(1, warmup))
        if step < warmup and self.fall != "throughout":
            return rise
        if self.kind == "constant":
            return 1.0
        if self.kind == "noam":
            return math.sqrt(max(1, warmup) / (step + 1))
        if self.kind == "wsd":
            begin = steps - round(self.decay * steps)
            gone = max(0.0, (step + 1 - begin) / max(1, steps - begin))
            return self.floor + (1 - self.floor) * (1 - math.sqrt(gone))
        begin = warmup if self.fall == "after_warmup" else 0
        gone = (step + 1 - begin) / max(1, steps - begin)
        fall = 0.5 * (1 + math.cos(math.pi * gone)) if self.kind == "cosine" else 1 - gone
        return rise * (self.floor + (1 - self.floor) * fall)


class BatchConfig(Record):
    """How many tokens an optimiser step sees."""

    tokens: int = Field(default=32768, gt=0)
    """Tokens of one step, over all processes: a multiple of sequences.micro_tokens times the processes."""
    ramp_from: int | None = Field(default=None, gt=0)
    """Tokens of the first step; None for no ramp."""
    ramp: float = Field(default=0.6, ge=0, le=1)
    """Share of the steps in which the batch grows in a straight line to its full size."""

    @model_validator(mode="after")
    def _check_ramp(self) -> "BatchConfig":
        if self.ramp_from is not None and self.ramp and self.ramp_from > self.tokens:
            raise ValueError(f"ramp_from is {self.ramp_from}; allowed: up to tokens, {self.tokens}")
        return self

    def micro_batches(self, step: int, steps: int, micro_tokens: int, processes: int) -> int:
        """The micro-batches of one step on each process: whole ones, at least one."""
        tokens = float(self.tokens)
        if self.ramp_from is not None and step < self.ramp * steps:
            tokens = self.ramp_from + (self.tokens - self.ramp_from) * step / (self.ramp * steps)
        return max(1, round(tokens / (micro_tokens * processes)))
