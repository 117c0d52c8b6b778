"""Positions that decide themselves when they have been worked on enough (Graves 2016, per position).

A position enters step n with a chance p(n) = σ(w · h + b) to come to rest. Its chances are added up; the step N in
which the sum reaches the threshold, or else the last step, is its last one and gets what the steps before left over,
the remainder R = 1 - p(1) - … - p(N - 1). The output is the mixture of the states after each step, weighted p(1), …,
p(N - 1), R.
"""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn

from bertsmith.layers.linear import ElasticLinear
from bertsmith.settings import Record


class HaltingConfig(Record):
    """When a position comes to rest, and what a step costs."""

    threshold: float = Field(default=0.99, gt=0, lt=1)
    """The sum of chances at which a position comes to rest."""
    cost: float = Field(default=0.01, ge=0)
    """Weight of the mean of N + R, the ponder cost, in the loss."""
    bias: float = 1.0
    """What b starts from; at 1 a fresh network comes to rest after about two steps."""

    def build(self, width: int) -> "Halting":
        return Halting(width, self.threshold, self.bias)


@dataclass(frozen=True)
class Pondering:
    """How far each position has come.

    Shape: mixture (…, width); the others (…), one number for every position.
    """

    mixture: Tensor
    """The weighted states so far."""
    spent: Tensor
    """The sum of the weights so far; 1 at rest."""
    steps: Tensor
    """Steps taken: N at rest."""
    remainder: Tensor
    """R at rest, 0 before."""
    is_running: Tensor
    most: int = 0
    """Steps done so far."""

    @property
    def cost(self) -> Tensor:
        """N + R; its gradient is that of R, which shrinks as the chances grow."""
        return self.steps + self.remainder


class Halting(nn.Module):
    """Keeps count of the chances; nothing is written to the module, and shapes never depend on who is at rest."""

    def __init__(self, width: int, threshold: float, bias: float) -> None:
        super().__init__()
        self.threshold, self.first_bias = threshold, bias
        self.chance = ElasticLinear(width, 1)

    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Sets the bias, which is not 0 at first."""
        assert self.chance.bias is not None
        nn.init.constant_(self.chance.bias, self.first_bias)

    def start(self, hidden: Tensor) -> Pondering:
        """Every position before its first step."""
        # at least float32: half precision cannot tell 0.99 from 1
        zeros = torch.zeros_like(hidden[..., 0], dtype=torch.promote_types(hidden.dtype, torch.float32))
        return Pondering(torch.zeros_like(hidden, dtype=zeros.dtype), zeros, zeros, zeros, torch.ones_like(zeros) > 0)

    def forward(self, entering: Tensor, left: Tensor, before: Pondering, *, is_last: bool) -> Pondering:
        """The count after one more step.

        Shape: entering, left (…, width), the states before and after the step.
        """
        chance = self.chance(entering).squeeze(-1).to(before.spent.dtype).sigmoid()
        rest = 1 - before.spent
        is_full = torch.ones_like(before.is_running) if is_last else before.spent + chance >= self.threshold
        halts = before.is_running & is_full
        weight = torch.where(halts, rest, chance) * before.is_running
        return Pondering(
            mixture=before.mixture + weight[..., None] * left,
            spent=before.spent + weight,
            steps=before.steps + before.is_running,
            remainder=torch.where(halts, rest, before.remainder),
            is_running=before.is_running & ~halts,
            most=before.most + 1,
        )
