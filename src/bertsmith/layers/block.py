"""One layer: mixer and feed-forward, each with residual sum and norm; a decoder has a cross mixer between them."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, TypeVar

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn
from torch.nn.functional import linear

from bertsmith.errors import InputError
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.elementwise import ACTIVATIONS, Activation, Norm, TokenDropout
from bertsmith.layers.feedforward import FeedForward
from bertsmith.layers.linear import ElasticLinear, GroupedLinear
from bertsmith.layers.mixers import Mixer
from bertsmith.layers.mixers.base import State
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.conv import odd_kernel_size, reach, shifted
from bertsmith.settings import Record


class BranchConfig(Record):
    """A convolution over neighbouring tokens beside a layer (DeBERTa v2)."""

    kernel_size: Annotated[int, AfterValidator(odd_kernel_size)] = 3
    activation: Activation = "gelu"
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Before the activation, as in the released code."""
    epsilon: float = Field(default=1e-7, gt=0)

    def build(self, width: int, *, is_causal: bool = False) -> "ConvolutionBranch":
        """Build the branch of a layer; causal if the layer's mixer is."""
        return ConvolutionBranch(
            width, self.kernel_size, self.activation, self.dropout, self.epsilon, is_causal=is_causal
        )

    def flops(self, width: int) -> int:
        """Floating-point operations of one token's forward pass."""
        return 2 * self.kernel_size * width * width


class ConvolutionBranch(nn.Module):
    """norm(layer(x) + activation(dropout(convolution(x)))), x being what enters the layer.

    The middle tap is the token itself; causal, the last one is, and the weights stay as they are.
    """

    def __init__(
        self, width: int, kernel_size: int, activation: Activation, dropout: float, epsilon: float, *, is_causal: bool
    ) -> None:
        super().__init__()
        self.kernel_size, self.activation, self.is_causal = kernel_size, activation, is_causal
        self.weight = nn.Parameter(torch.empty(width, kernel_size * width))
        self.bias = nn.Parameter(torch.empty(width))
        self.dropout = TokenDropout(dropout)
        self.norm = Norm(width, epsilon)

    def forward(self, entered: Tensor, left: Tensor, context: ForwardContext) -> Tensor:
        """Add the convolution of the layer's input to its output.

        Shape: entered, left (…, width), the hidden states before and after the layer.
        """
        before, _ = reach(self.kernel_size, self.is_causal or context.is_causal)
        span = torch.cat([shifted(entered, tap - before, context.layout) for tap in range(self.kernel_size)], dim=-1)
        added = self.dropout(linear(span, self.weight, self.bias), context.layout)  # (…, taps · width) -> (…, width)
        return self.norm(left + ACTIVATIONS[self.activation](added))


Part = TypeVar("Part", bound=nn.Module)


class Block(nn.Module):
    """mixer → (cross mixer →) feed-forward, normalised after each residual sum (post-norm) or before each part.

    The last mixer attends to the context's memory: in a decoder the cross mixer, elsewhere the only mixer.
    """

    def __init__(
        self,
        mixer: Mixer,
        feedforward: FeedForward,
        mixer_norm: nn.Module,
        feedforward_norm: Norm,
        *,
        dropout: float,
        is_pre_norm: bool,
        cross: tuple[Mixer, Norm] | None = None,
        branch: ConvolutionBranch | None = None,
    ) -> None:
        super().__init__()
        self.mixer, self.feedforward = mixer, feedforward
        self.mixer_norm, self.feedforward_norm = mixer_norm, feedforward_norm
        self.cross = None if cross is None else cross[0]
        self.cross_norm = None if cross is None else cross[1]
        self.branch = branch
        self.dropout = TokenDropout(dropout)
        self.is_pre_norm = is_pre_norm

    @property
    def units(self) -> LayerCut:
        """Number of units of this layer."""
        return LayerCut(self.mixer.heads, self.feedforward.neurons, self.feedforward.groups)

    @property
    def outputs(self) -> list[ElasticLinear | GroupedLinear]:
        """The linear layers whose outputs are added to the residual stream."""
        mixers = [self.mixer] if self.cross is None else [self.mixer, self.cross]
        return [*(mixer.output for mixer in mixers), self.feedforward.contract]

    @property
    def crossing(self) -> tuple[Mixer, Norm] | None:
        """The cross mixer of a decoder and its norm, or None."""
        return None if self.cross is None or self.cross_norm is None else (self.cross, self.cross_norm)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        entered, own, crossing = hidden, self._own_context(context), self.crossing
        hidden = self._added(hidden, self.mixer, self.mixer_norm, own)
        if crossing is not None:
            hidden = self._added(hidden, *crossing, self._cross_context(context))
        hidden = self._added(hidden, self.feedforward, self.feedforward_norm, context)
        # queries that attend to a memory are not neighbours of each other
        if self.branch is None or own.memory is not None:
            return hidden
        return self.branch(entered, hidden, context)

    def start(self, context: ForwardContext) -> tuple[State, State]:
        """Return the decoding states of the two mixers before the first token."""
        return self.mixer.start(self._own_context(context)), () if self.cross is None else self.cross.start(context)

    def step(
        self, hidden: Tensor, states: tuple[State, State], context: ForwardContext
    ) -> tuple[Tensor, tuple[State, State]]:
        """Return the hidden state of one more token of each sequence, (batch, width), and the mixers' next states."""
        if self.branch is not None:
            raise InputError(
                "a layer with a branch keeps no tokens between steps; allowed in steps: layers without one"
            )
        (state, cross_state), crossing = states, self.crossing
        mixed, state = self.mixer.step(self._entering(hidden, self.mixer_norm), state, self._own_context(context))
        hidden = self._joined(hidden, mixed, self.mixer_norm, context)
        if crossing is not None:
            cross, norm = crossing
            mixed, cross_state = cross.step(self._entering(hidden, norm), cross_state, context)
            hidden = self._joined(hidden, mixed, norm, context)
        return self._added(hidden, self.feedforward, self.feedforward_norm, context), (state, cross_state)

    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        """Return the mixer's maps for the input of this block; names of a cross mixer's maps begin with "cross_"."""
        own, crossing = self._own_context(context), self.crossing
        maps = self.mixer.maps(self._entering(hidden, self.mixer_norm), own)
        if crossing is None:
            return maps
        mixer, norm = crossing
        hidden = self._added(hidden, self.mixer, self.mixer_norm, own)
        crossed = mixer.maps(self._entering(hidden, norm), self._cross_context(context))
        return {**maps, **{f"cross_{name}": shares for name, shares in crossed.items()}}

    def mixer_input(self, hidden: Tensor) -> Tensor:
        """Return the input of the mixer for the input of this block: normalised first in a pre-norm block."""
        return self._entering(hidden, self.mixer_norm)

    def projections(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mixer's query, key and value for the input of this block, each (…, heads, head width)."""
        return self.mixer.projections(self._entering(hidden, self.mixer_norm), self._own_context(context))

    def scores(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return the mixer's attention scores for the input of this block, (batch, heads, longest, longest)."""
        return self.mixer.scores(self._entering(hidden, self.mixer_norm), self._own_context(context))

    def orders(self, heads: Tensor, neurons: Tensor) -> dict[Mixer | FeedForward, Tensor]:
        """Return the order of units of each sub-layer for these orders of heads and neurons."""
        orders: dict[Mixer | FeedForward, Tensor] = {self.mixer: heads, self.feedforward: neurons}
        return orders if self.cross is None else {**orders, self.cross: heads}

    def extract(self, cut: LayerCut, made: dict[nn.Module, nn.Module]) -> "Block":
        """Return a block of its own with the first units only.

        `made` maps modules to their extracted copies and is added to: a module that several layers share is extracted
        once. Layers with different cuts must not share it.
        """

        def once(part: Part, make: Callable[[Part], Part]) -> Part:
            if part not in made:
                made[part] = make(part)
            return made[part]  # type: ignore[return-value]

        crossing, branch = self.crossing, self.branch
        if crossing is not None:
            cross, norm = crossing
            crossing = once(cross, lambda mixer: mixer.extract(cut)), once(norm, copy.deepcopy)
        return Block(
            once(self.mixer, lambda mixer: mixer.extract(cut)),
            once(self.feedforward, lambda feedforward: feedforward.extract(cut)),
            once(self.mixer_norm, copy.deepcopy),
            once(self.feedforward_norm, copy.deepcopy),
            dropout=self.dropout.rate,
            is_pre_norm=self.is_pre_norm,
            cross=crossing,
            branch=None if branch is None else once(branch, copy.deepcopy),
        )

    def _own_context(self, context: ForwardContext) -> ForwardContext:
        """Return the context of the mixer: without the memory, if a cross mixer attends to it."""
        return context if self.cross is None else context.with_memory(None)

    def _cross_context(self, context: ForwardContext) -> ForwardContext:
        """Return the context of the cross mixer, which sees the whole memory even if its own sequence is causal."""
        return replace(context, is_causal=False) if context.is_causal else context

    def _added(self, hidden: Tensor, part: Mixer | FeedForward, norm: nn.Module, context: ForwardContext) -> Tensor:
        """Return the residual sum of the hidden states and a sub-layer's output."""
        return self._joined(hidden, part(self._entering(hidden, norm), context), norm, context)

    def _entering(self, hidden: Tensor, norm: nn.Module) -> Tensor:
        """Return the input of a sub-layer, normalised first in a pre-norm block."""
        return norm(hidden) if self.is_pre_norm else hidden

    def _joined(self, hidden: Tensor, news: Tensor, norm: nn.Module, context: ForwardContext) -> Tensor:
        """Return the residual sum after a sub-layer, normalised in a post-norm block."""
        summed = hidden + self.dropout(news, context.layout)
        return summed if self.is_pre_norm else norm(summed)
