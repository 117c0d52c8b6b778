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
from bertsmith.ops.conv import kernel_extent, odd_kernel_size, shift
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
    """norm(layer(x) + activation(dropout(convolution(x)))) for the input x of a layer.

    The middle tap reads the token itself; in a causal branch the last tap does. Both have the same weights.
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

    def forward(self, layer_input: Tensor, layer_output: Tensor, context: ForwardContext) -> Tensor:
        """Add the convolution of the layer's input to its output.

        Shape: layer_input, layer_output (…, width).
        """
        before, _ = kernel_extent(self.kernel_size, self.is_causal or context.is_causal)
        span = torch.cat([shift(layer_input, tap - before, context.layout) for tap in range(self.kernel_size)], dim=-1)
        convolved = linear(span, self.weight, self.bias)  # (…, kernel_size · width) -> (…, width)
        convolved = self.dropout(convolved, context.layout)
        return self.norm(layer_output + ACTIVATIONS[self.activation](convolved))


Module = TypeVar("Module", bound=nn.Module)


class Block(nn.Module):
    """mixer → (cross mixer →) feed-forward, normalised after each residual sum (post-norm) or before each sub-layer.

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
    def outputs(self) -> list[tuple[ElasticLinear | GroupedLinear, ...]]:
        """The linear layers whose outputs are added to the residual stream, by sub-layer."""
        mixers = [self.mixer] if self.cross is None else [self.mixer, self.cross]
        return [*(mixer.outputs for mixer in mixers), (self.feedforward.contract,)]

    @property
    def cross_sublayer(self) -> tuple[Mixer, Norm] | None:
        """The cross mixer of a decoder and its norm, or None."""
        return None if self.cross is None or self.cross_norm is None else (self.cross, self.cross_norm)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        layer_input, mixer_context, cross = hidden, self._mixer_context(context), self.cross_sublayer
        hidden = self._apply_sublayer(hidden, self.mixer, self.mixer_norm, mixer_context)
        if cross is not None:
            hidden = self._apply_sublayer(hidden, *cross, self._cross_context(context))
        hidden = self._apply_sublayer(hidden, self.feedforward, self.feedforward_norm, context)
        # queries that attend to a memory are not neighbours of each other
        if self.branch is None or mixer_context.memory is not None:
            return hidden
        return self.branch(layer_input, hidden, context)

    def mixer_output(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return the term that the mixer adds to the residual stream of a pre-norm block without a cross mixer."""
        return self.dropout(self.mixer(self._sublayer_input(hidden, self.mixer_norm), context), context.layout)

    def feedforward_output(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return the term that the feed-forward adds to the residual stream of a pre-norm block."""
        return self.dropout(
            self.feedforward(self._sublayer_input(hidden, self.feedforward_norm), context), context.layout
        )

    def start(self, context: ForwardContext) -> tuple[State, State]:
        """Return the decoding states of the two mixers before the first token."""
        return self.mixer.start(self._mixer_context(context)), () if self.cross is None else self.cross.start(context)

    def step(
        self, hidden: Tensor, states: tuple[State, State], context: ForwardContext
    ) -> tuple[Tensor, tuple[State, State]]:
        """Return the hidden states of the next token of each sequence, (batch, width), and the new decoding states."""
        if self.branch is not None:
            raise InputError(
                "a layer with a convolution branch cannot decode step by step; allowed: layers without a branch"
            )
        (state, cross_state), cross = states, self.cross_sublayer
        mixed, state = self.mixer.step(
            self._sublayer_input(hidden, self.mixer_norm), state, self._mixer_context(context)
        )
        hidden = self._add_residual(hidden, mixed, self.mixer_norm, context)
        if cross is not None:
            cross_mixer, norm = cross
            mixed, cross_state = cross_mixer.step(self._sublayer_input(hidden, norm), cross_state, context)
            hidden = self._add_residual(hidden, mixed, norm, context)
        return self._apply_sublayer(hidden, self.feedforward, self.feedforward_norm, context), (state, cross_state)

    def absorb(self, hidden: Tensor, states: tuple[State, State], context: ForwardContext) -> tuple[State, State]:
        """Return the decoding states after tokens that this block does not compute, from its input.

        Shape: hidden (batch, tokens, width).
        """
        (state, cross_state), mixer_context = states, self._mixer_context(context)
        return self.mixer.absorb(self.mixer_input(hidden), state, mixer_context), cross_state

    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        """Return the mixer's maps for the input of this block; names of a cross mixer's maps begin with "cross_"."""
        mixer_context, cross = self._mixer_context(context), self.cross_sublayer
        maps = self.mixer.maps(self._sublayer_input(hidden, self.mixer_norm), mixer_context)
        if cross is None:
            return maps
        cross_mixer, norm = cross
        hidden = self._apply_sublayer(hidden, self.mixer, self.mixer_norm, mixer_context)
        cross_maps = cross_mixer.maps(self._sublayer_input(hidden, norm), self._cross_context(context))
        return {**maps, **{f"cross_{name}": weights for name, weights in cross_maps.items()}}

    def mixer_input(self, hidden: Tensor) -> Tensor:
        """Return the input of the mixer for the input of this block: normalised first in a pre-norm block."""
        return self._sublayer_input(hidden, self.mixer_norm)

    def projections(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mixer's query, key and value for the input of this block, each (…, heads, head width)."""
        return self.mixer.projections(self._sublayer_input(hidden, self.mixer_norm), self._mixer_context(context))

    def scores(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return the mixer's attention scores for the input of this block, (batch, heads, max_length, max_length)."""
        return self.mixer.scores(self._sublayer_input(hidden, self.mixer_norm), self._mixer_context(context))

    def orders(self, heads: Tensor, neurons: Tensor) -> dict[Mixer | FeedForward, Tensor]:
        """Return the order of units of each sub-layer for these orders of heads and neurons."""
        orders: dict[Mixer | FeedForward, Tensor] = {self.mixer: heads, self.feedforward: neurons}
        return orders if self.cross is None else {**orders, self.cross: heads}

    def extract(self, cut: LayerCut, extracted: dict[nn.Module, nn.Module]) -> "Block":
        """Return a new block with the first units only.

        `extracted` maps modules to their extracted copies and is updated: a module that several layers share is
        extracted once. Layers with different cuts must not share this dictionary.
        """

        def once(module: Module, extract: Callable[[Module], Module]) -> Module:
            if module not in extracted:
                extracted[module] = extract(module)
            return extracted[module]  # type: ignore[return-value]

        cross, branch = self.cross_sublayer, self.branch
        if cross is not None:
            cross_mixer, norm = cross
            cross = once(cross_mixer, lambda mixer: mixer.extract(cut)), once(norm, copy.deepcopy)
        return Block(
            once(self.mixer, lambda mixer: mixer.extract(cut)),
            once(self.feedforward, lambda feedforward: feedforward.extract(cut)),
            once(self.mixer_norm, copy.deepcopy),
            once(self.feedforward_norm, copy.deepcopy),
            dropout=self.dropout.rate,
            is_pre_norm=self.is_pre_norm,
            cross=cross,
            branch=None if branch is None else once(branch, copy.deepcopy),
        )

    def _mixer_context(self, context: ForwardContext) -> ForwardContext:
        """Return the context of the mixer: without the memory, if a cross mixer attends to it."""
        return context if self.cross is None else context.with_memory(None)

    def _cross_context(self, context: ForwardContext) -> ForwardContext:
        """Return the context of the cross mixer, which sees the whole memory even if its own sequence is causal."""
        return replace(context, is_causal=False) if context.is_causal else context

    def _apply_sublayer(
        self, hidden: Tensor, sublayer: Mixer | FeedForward, norm: nn.Module, context: ForwardContext
    ) -> Tensor:
        """Return the residual sum of the hidden states and a sub-layer's output."""
        return self._add_residual(hidden, sublayer(self._sublayer_input(hidden, norm), context), norm, context)

    def _sublayer_input(self, hidden: Tensor, norm: nn.Module) -> Tensor:
        """Return the input of a sub-layer, normalised first in a pre-norm block."""
        return norm(hidden) if self.is_pre_norm else hidden

    def _add_residual(self, hidden: Tensor, output: Tensor, norm: nn.Module, context: ForwardContext) -> Tensor:
        """Add a sub-layer's output to the hidden states; normalise the sum in a post-norm block."""
        summed = hidden + self.dropout(output, context.layout)
        return summed if self.is_pre_norm else norm(summed)
