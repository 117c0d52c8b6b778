"""Fixed points of functions of hidden states, found separately for every sequence of a batch.

Norms and inner products are sums over the real tokens of one sequence, and a converged sequence no longer changes. The
result of a sequence does not depend on padding or on the other sequences of its batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout

Solver = Literal["anderson", "plain"]


@dataclass(frozen=True)
class Convergence:
    """Residual and number of iterations of every sequence of a batch.

    Shape: residual and iterations (batch,).
    """

    residual: Tensor
    """‖f(z) - z‖ / ‖f(z)‖ of every sequence; 0 for empty sequences."""
    iterations: Tensor
    """Evaluations of f until the residual was below the tolerance, at most the number of steps."""
    jacobian: Tensor | None = None
    """‖εᵀJ‖² / width for one normal ε, summed over real tokens, if it was requested (Bai et al. 2021)."""


@dataclass(frozen=True)
class FixedPoint:
    """The iterate of lowest residual of every sequence.

    Shape: point and value like the hidden states.
    """

    point: Tensor
    value: Tensor
    """f(point)"""
    convergence: Convergence


def find_fixed_point(
    function: Callable[[Tensor], Tensor],
    start: Tensor,
    layout: SequenceLayout,
    *,
    solver: Solver = "anderson",
    steps: int,
    tolerance: float,
    history: int = 6,
    ridge: float = 1e-8,
    stops_early: bool = False,
) -> FixedPoint:
    """Iterate from `start` until the relative residual of every sequence is at most `tolerance`, or `steps` times.

    "plain" repeats z = f(z). "anderson" (Anderson 1965) continues from the combination of the last `history` values of
    f whose residuals, combined in the same way, are smallest; `ridge` regularises it relative to the mean squared
    residual. With `stops_early` the iteration ends once all sequences have converged, which synchronises on a GPU and
    does not change the result.
    """
    point = best = best_value = start
    best_residual = torch.full((layout.batch,), torch.inf, dtype=start.dtype, device=start.device)
    iterations = torch.zeros(layout.batch, dtype=torch.long, device=start.device)
    mixing = _Anderson(layout, history, ridge) if solver == "anderson" else None
    for _ in range(steps):
        value = function(point)
        residual = relative_residual(point, value, layout)
        is_running = best_residual > tolerance
        iterations = iterations + is_running
        is_better = is_running & (residual < best_residual)
        best_residual = torch.where(is_better, residual, best_residual)
        is_better_token = _by_token(is_better, start, layout)
        best, best_value = torch.where(is_better_token, point, best), torch.where(is_better_token, value, best_value)
        is_running = best_residual > tolerance
        if stops_early and not bool(is_running.any()):
            break
        proposed = value if mixing is None else mixing.propose(point, value)
        point = torch.where(_by_token(is_running, start, layout), proposed, best)
    return FixedPoint(best, best_value, Convergence(best_residual, iterations))


class _Anderson:
    """The last pairs of points and values, and the inner products of their residuals."""

    def __init__(self, layout: SequenceLayout, history: int, ridge: float) -> None:
        self.layout, self.history, self.ridge = layout, history, ridge
        self.values: list[Tensor] = []
        self.residuals: list[Tensor] = []
        self.gram: Tensor | None = None

    def propose(self, point: Tensor, value: Tensor) -> Tensor:
        """Add a pair and return the next point."""
        self.values = [*self.values, value][-self.history :]
        self.residuals = [*self.residuals, value - point][-self.history :]
        weights = self._weights(value.dtype)  # (batch, pairs)
        return torch.stack(
            [
                _by_token(own, value, self.layout) * past
                for own, past in zip(weights.unbind(-1), self.values, strict=True)
            ]
        ).sum(0)

    def _weights(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of every sequence, (batch, pairs), that add up to 1."""
        newest, pairs = self.residuals[-1], len(self.residuals)
        products = torch.stack([(newest * past).sum(-1) for past in self.residuals], dim=-1)  # (…, pairs)
        row = sequence_sums(products, self.layout).double()  # (batch, pairs)
        if self.gram is None:
            self.gram = row[:, :, None]
        else:
            kept = self.gram[:, 1 - pairs :, 1 - pairs :]
            column = row[:, :-1, None]
            self.gram = torch.cat([torch.cat([kept, column], dim=-1), row[:, None]], dim=-2)  # (batch, pairs, pairs)
        scale = self.gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
        scaled = self.gram / scale[:, None, None]
        scaled = scaled + self.ridge * torch.eye(pairs, dtype=scaled.dtype, device=scaled.device)
        # solve_ex does not check for singular matrices, which would synchronise
        weights = torch.linalg.solve_ex(scaled, torch.ones_like(row)[..., None])[0].squeeze(-1)
        weights = weights / weights.sum(-1, keepdim=True)
        plain = torch.zeros_like(weights)
        plain[:, -1] = 1
        return torch.where(weights.isfinite().all(-1, keepdim=True), weights, plain).to(dtype)


def sequence_sums(values: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the sum over the real tokens of each sequence: (batch, length, …) or (tokens, …) -> (batch, …)."""
    if layout.starts is None:
        if layout.is_token is not None:
            is_token = layout.is_token.view(*layout.is_token.shape, *[1] * (values.dim() - 2))
            values = torch.where(is_token, values, 0)
        return values.sum(1)
    sums = values.new_zeros(layout.batch, *values.shape[1:])
    return sums.index_add(0, layout.sequence_index(values), values)


def relative_residual(point: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
    """Return ‖value - point‖ / ‖value‖ of every sequence, (batch,)."""
    squares = torch.stack([(value - point).square().sum(-1), value.square().sum(-1)], dim=-1)
    difference, size = sequence_sums(squares, layout).sqrt().unbind(-1)
    return difference / size.clamp_min(torch.finfo(size.dtype).tiny)


def _by_token(values: Tensor, hidden: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the value of every token's sequence: (batch,) -> (batch, 1, 1) or (tokens, 1)."""
    return values[:, None, None] if layout.starts is None else values[layout.sequence_index(hidden)][:, None]
