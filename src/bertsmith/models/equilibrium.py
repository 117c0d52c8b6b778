"""Deep equilibrium encoder (Bai et al. 2019): a stack of few layers, repeated until its output no longer changes.

    x = embedding,  f(z) = layers(z + x),  z* = f(z*),  result: f(z*), then the final norm

Forward, a solver finds z* without a graph, from z = 0. Backward, the implicit function theorem gives the gradients with
one evaluation of f at z*: (∂f/∂θ)ᵀg, where g = Jᵀg + ∂L/∂z* is a fixed point as well (J = ∂f/∂z at z*). Memory does
not depend on the number of steps. All evaluations of f drop the same values: otherwise f would change from one to the
next. The solver runs in the dtype of the weights, autocast off: rounding to bfloat16 would stop residuals from falling.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bertsmith.data.layout import SequenceLayout
from bertsmith.data.random import key
from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.embedding import Embedding
from bertsmith.layers.fixed_point import (
    Convergence,
    FixedPoint,
    Solver,
    find_fixed_point,
    relative_residual,
    sequence_sums,
)
from bertsmith.layers.positions import RelativeTable
from bertsmith.layers.replay import GeneratorStates
from bertsmith.layers.subnet import Subnet
from bertsmith.models.encoder import BlockCall, Encoder
from bertsmith.settings import Record


class EquilibriumConfig(Record):
    """Solver of the fixed point, start of training and Jacobian regularisation."""

    solver: Solver = "anderson"
    """"plain" repeats the layers; "anderson" needs fewer steps. Compiled and exported models need "plain"."""
    steps: int = Field(default=24, gt=0)
    """Most evaluations of the layers in the forward pass."""
    backward_steps: int = Field(default=24, gt=0)
    """Most vector-Jacobian products in the backward pass."""
    tolerance: float = Field(default=1e-3, ge=0)
    """Relative residual at which a sequence has converged."""
    history: int = Field(default=6, gt=0)
    """Number of earlier values that "anderson" combines."""
    ridge: float = Field(default=1e-8, ge=0)
    """Regularisation of "anderson", relative to the mean squared residual."""
    unrolled_until: int = Field(default=0, ge=0)
    """Optimiser steps at the start of training that repeat the layers `unrolled_steps` times, with ordinary gradients;
    10 to 20 % of the run make it more stable."""
    unrolled_steps: int = Field(default=4, gt=0)
    jacobian_weight: float = Field(default=0.0, ge=0)
    """Weight of the mean of ‖εᵀJ‖² in the loss (Bai et al. 2021), which keeps the number of steps small."""
    jacobian_share: float = Field(default=0.35, gt=0, le=1)
    """Share of optimiser steps that compute it."""


class EquilibriumEncoder(Encoder):
    """An encoder whose output is a fixed point of its layers.

    `all_hidden_states` come from the last evaluation of the layers, whose input is z* + x.
    """

    recomputes = True

    def __init__(
        self,
        embedding: Embedding,
        blocks: Sequence[Block],
        final_norm: nn.Module,
        relative: RelativeTable | None,
        *,
        settings: EquilibriumConfig,
    ) -> None:
        super().__init__(embedding, blocks, final_norm, relative)
        self.settings = settings
        self.is_unrolled = False
        self.computes_jacobian = False

    def redraw_features(self, step: int, seed: int) -> None:
        """Redraw random features where it is time, and choose what this optimiser step computes."""
        super().redraw_features(step, seed)
        settings = self.settings
        self.is_unrolled = step < settings.unrolled_until
        generator = torch.Generator().manual_seed(key(seed, step))
        is_drawn = float(torch.rand((), generator=generator)) < settings.jacobian_share
        self.computes_jacobian = settings.jacobian_weight > 0 and is_drawn

    def _check_last_block(self) -> NoReturn:
        raise InputError("an equilibrium encoder has no separate last layer; use another encoder")

    @torch.no_grad()
    def extract(self, subnet: Subnet) -> "EquilibriumEncoder":
        """Return a smaller encoder of its own that computes the same as this one with `subnet`."""
        plain = super().extract(subnet)
        return EquilibriumEncoder(
            plain.embedding, plain._blocks(), plain.final_norm, plain.relative, settings=self.settings
        )

    def _through(
        self, blocks: Sequence[BlockCall], hidden: Tensor, collected: list[Tensor] | None = None
    ) -> tuple[Tensor, Convergence]:
        self._check(blocks[0][1])
        weights = next(self.blocks.parameters()).dtype
        with torch.autocast(hidden.device.type, enabled=False):
            function = _Layers(blocks, hidden.to(weights), is_random=self.training)
            if self.training and self.is_unrolled:
                output, convergence = self._unrolled(function, collected)
            else:
                output, convergence = self._equilibrium(function, collected)
        if collected is not None:
            collected[:] = [state.to(hidden.dtype) for state in collected]
        return output.to(hidden.dtype), convergence

    def _unrolled(self, function: "_Layers", collected: list[Tensor] | None) -> tuple[Tensor, Convergence]:
        """Repeat the layers a few times, with ordinary gradients."""
        steps, point = self.settings.unrolled_steps, torch.zeros_like(function.injected)
        for _ in range(steps - 1):
            point = function(point)
        output = function.last(point, collected)
        residual = relative_residual(point.detach(), output.detach(), function.layout)
        return output, Convergence(residual, torch.full_like(residual, steps, dtype=torch.long))

    def _equilibrium(self, function: "_Layers", collected: list[Tensor] | None) -> tuple[Tensor, Convergence]:
        """Find the fixed point; with gradients enabled, attach the implicit ones to it."""
        start, layout, steps = torch.zeros_like(function.injected), function.layout, self.settings.steps
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            found = self._solve(function, start, layout, steps)
            is_known = collected is None and function.states is None
            return found.value if is_known else function.last(found.point, collected), found.convergence
        with torch.no_grad():
            found = self._solve(function, start, layout, steps)
        point = found.point.detach().requires_grad_()
        solve = partial(self._solve, layout=layout, steps=self.settings.backward_steps)
        if collected is None:
            value = function.last(point)
            output = _Implicit.apply(value, value, point, solve)
        else:
            # through a differentiable z*, which gives the gradients of intermediate hidden states, too
            output = function.last(_Implicit.apply(point.detach(), function(point), point, solve), collected)
        if not (self.training and self.computes_jacobian):
            return output, found.convergence
        return output, replace(found.convergence, jacobian=function.squared_jacobian(found.point))

    def _solve(
        self, function: Callable[[Tensor], Tensor], start: Tensor, layout: SequenceLayout, steps: int
    ) -> FixedPoint:
        settings = self.settings
        return find_fixed_point(
            function,
            start,
            layout,
            solver=settings.solver,
            steps=steps,
            tolerance=settings.tolerance,
            history=settings.history,
            ridge=settings.ridge,
            # reading the residuals would make every training step wait for the GPU
            stops_early=not torch.compiler.is_compiling() and (start.device.type == "cpu" or not self.training),
        )

    def _check(self, context: ForwardContext) -> None:
        """Raise InputError for a forward pass that is not supported."""
        if context.memory is not None:
            raise InputError("an equilibrium stack cannot attend to a memory; use it as an encoder only")
        if not torch.compiler.is_compiling():
            return
        if self.training or (torch.is_grad_enabled() and not torch.compiler.is_exporting()):
            raise InputError("an equilibrium encoder cannot be compiled with gradients; use run.compile = 'off'")
        if self.settings.solver != "plain":
            raise InputError(
                f"encoder.equilibrium.solver is {self.settings.solver!r}; compiled and exported models need 'plain'"
            )


class _Layers:
    """f of one forward pass: the layers on z + x. Every evaluation drops the same values."""

    def __init__(self, blocks: Sequence[BlockCall], injected: Tensor, *, is_random: bool) -> None:
        self.blocks = [(block, _in_dtype(context, injected.dtype)) for block, context in blocks]
        self.injected = injected
        self.layout = blocks[0][1].layout
        self.states = GeneratorStates.capture(injected.device) if is_random else None

    def __call__(self, point: Tensor) -> Tensor:
        """Return f(z), and leave the generators where they were."""
        with nullcontext() if self.states is None else self.states.replayed():
            return self.last(point)

    def last(self, point: Tensor, collected: list[Tensor] | None = None) -> Tensor:
        """Return f(z), after which the generators continue; `collected` gets the input of every layer and f(z)."""
        hidden = point + self.injected
        for block, context in self.blocks:
            if collected is not None:
                collected.append(hidden)
            hidden = block(hidden, context)
        if collected is not None:
            collected.append(hidden)
        return hidden

    def squared_jacobian(self, point: Tensor) -> Tensor:
        """Return ‖εᵀJ‖² / width at a point for one normal ε, summed over real tokens, with gradients."""
        leaf = point.detach().requires_grad_()
        noise = torch.randn_like(leaf)
        if self.layout.is_token is not None:
            noise = torch.where(self.layout.is_token[..., None], noise, 0)
        fast = self.blocks
        # the reference implementations are twice differentiable
        self.blocks = [(block, replace(context, backend="reference")) for block, context in fast]
        value = self(leaf)
        self.blocks = fast
        (product,) = torch.autograd.grad(value, leaf, noise, create_graph=True)
        return sequence_sums(product.square().mean(-1), self.layout).sum()


class _Implicit(torch.autograd.Function):
    """`shown` with the gradient of the fixed point: `value`, which is f(point), gets g = Jᵀg + the given gradient."""

    @staticmethod
    def forward(ctx: Any, shown: Tensor, value: Tensor, point: Tensor, solve: Callable[..., FixedPoint]) -> Tensor:
        ctx.value, ctx.point, ctx.solve = value, point, solve
        return shown.view_as(shown)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        def adjoint(vector: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(ctx.value, ctx.point, vector, retain_graph=True)
            return product + gradient

        return None, ctx.solve(adjoint, gradient).value, None, None


def _in_dtype(context: ForwardContext, dtype: torch.dtype) -> ForwardContext:
    """Return the context with relative position vectors in a dtype; autocast may have made them smaller."""
    relative = context.relative_positions
    if relative is None or relative.vectors.dtype == dtype:
        return context
    return replace(context, relative_positions=replace(relative, vectors=relative.vectors.to(dtype)))
