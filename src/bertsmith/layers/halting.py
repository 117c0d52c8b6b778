"""Adaptive computation time per position (Graves 2016).

Before step n a position has the halting probability p(n) = σ(w · h + b). It halts after step N, the first step in which
the cumulative probability reaches the threshold, or the last step. The weight of step N is the remainder
R = 1 - p(1) - … - p(N - 1). The output is the sum of the hidden states after each step, weighted p(1), …, p(N - 1), R.
"""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn

from bertsmith.layers.linear import ElasticLinear
from bertsmith.settings import Record


class HaltingConfig(Record):
    """Halting threshold and ponder cost."""

    threshold: float = Field(default=0.99, gt=0, lt=1)
    """Cumulative halting probability at which a position halts."""
    cost: float = Field(default=0.01, ge=0)
    """Weight of the mean of N + R, the ponder cost, in the loss."""
    bias: float = 1.0
    """Initial value of b; with 1, positions of an untrained network halt after about two steps."""

    def build(self, width: int) -> "Halting":
        return Halting(width, self.threshold, self.bias)


@dataclass(frozen=True)
class Pondering:
    """State of adaptive computation time.

    Shape: mixture (…, width); the others (…), one number per position.
    """

    mixture: Tensor
    """Weighted sum of hidden states so far."""
    spent: Tensor
    """Sum of weights so far; 1 for halted positions."""
    steps: Tensor
    """Steps taken so far; N for halted positions."""
    remainder: Tensor
    """R for halted positions, 0 for others."""
    is_running: Tensor
    """True for positions that have not halted."""
    steps_run: int = 0
    """Number of steps computed so far."""

    @property
    def cost(self) -> Tensor:
        """N + R; only R has a gradient, and it decreases as the halting probabilities grow."""
        return self.steps + self.remainder


class Halting(nn.Module):
    """Halting probabilities and their accumulation; shapes never depend on which positions have halted."""

    def __init__(self, width: int, threshold: float, bias: float) -> None:
        super().__init__()
        self.threshold, self.first_bias = threshold, bias
        self.chance = ElasticLinear(width, 1)

    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Set the bias to its initial value, which is not 0."""
        assert self.chance.bias is not None
        nn.init.constant_(self.chance.bias, self.first_bias)

    def start(self, hidden: Tensor) -> Pondering:
        """Return the state before the first step."""
        # at least float32: half precision is too coarse near 1
        zeros = torch.zeros_like(hidden[..., 0], dtype=torch.promote_types(hidden.dtype, torch.float32))
        return Pondering(torch.zeros_like(hidden, dtype=zeros.dtype), zeros, zeros, zeros, torch.ones_like(zeros) > 0)

    def forward(self, step_input: Tensor, step_output: Tensor, before: Pondering, *, is_last: bool) -> Pondering:
        """Return the state after one more step.

        Shape: step_input, step_output (…, width).
        """
        probability = self.chance(step_input).squeeze(-1).to(before.spent.dtype).sigmoid()
        rest = 1 - before.spent
        is_full = torch.ones_like(before.is_running) if is_last else before.spent + probability >= self.threshold
        halts = before.is_running & is_full
        weight = torch.where(halts, rest, probability) * before.is_running
        return Pondering(
            mixture=before.mixture + weight[..., None] * step_output,
            spent=before.spent + weight,
            steps=before.steps + before.is_running,
            remainder=torch.where(halts, rest, before.remainder),
            is_running=before.is_running & ~halts,
            steps_run=before.steps_run + 1,
        )
