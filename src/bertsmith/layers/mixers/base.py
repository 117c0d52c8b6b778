"""The interface of mixers, the one part in which families differ, and the base of mixers with queries and keys."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.linear import ElasticLinear, WeightSlice
from bertsmith.layers.mixers.sparse import SparseWeights
from bertsmith.layers.positions import Rotary
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.dispatch import Implementations
from bertsmith.ops.sparse import SparseMap
from bertsmith.settings import Record

State = tuple[Tensor, ...]
"""Decoding state of a causal mixer, such as keys and values so far; the first axis of every tensor is the batch."""


@dataclass(frozen=True)
class MapKind:
    """Properties of a map's values; unless they are scores, they are non-negative and rows sum to at most 1."""

    is_score: bool = False
    """Values may have any sign and size."""
    is_convolution: bool = False
    """The map is a band matrix of convolution weights, one kernel per head."""


MAP_KINDS: dict[str, MapKind] = {
    "attention": MapKind(),
    "cross_attention": MapKind(),
    "convolution": MapKind(is_convolution=True),
    "depthwise_convolution": MapKind(is_score=True, is_convolution=True),
    "content_to_content": MapKind(is_score=True),
    "content_to_position": MapKind(is_score=True),
    "position_to_content": MapKind(is_score=True),
    "multi_linear": MapKind(is_score=True),
}
"""Every map that a mixer may return, by name."""


def append_tokens(state: Sequence[Tensor], tokens: Sequence[Tensor]) -> State:
    """Append tokens to each tensor of a state: (batch, length, …) and (batch, new, …) -> (batch, length + new, …)."""
    # an empty tensor has the weights' dtype, which may differ from autocast's
    return tuple(torch.cat([old.to(new), new], dim=1) for old, new in zip(state, tokens, strict=True))


def append_token(state: Sequence[Tensor], tokens: Sequence[Tensor]) -> State:
    """Append one token to each tensor of a state: (batch, length, …) and (batch, …) -> (batch, length + 1, …)."""
    return append_tokens(state, [token[:, None] for token in tokens])


class Mixer(nn.Module, ABC):
    """Exchanges information between the positions of each sequence. The contract tests run over every mixer."""

    heads: int
    output: ElasticLinear
    """The output projection of a mixer that has one only."""
    backends: tuple[Implementations[Any, Tensor], ...]
    """Backends of every op that the mixer uses."""
    rotary: Rotary | None = None
    """The rotary embedding that the mixer reads from the context, if any."""

    @property
    def outputs(self) -> tuple[ElasticLinear, ...]:
        """The linear layers whose outputs, side by side, are added to the residual stream."""
        return (self.output,)

    @abstractmethod
    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Mix the hidden states, or let them attend to `context.memory` if there is one; the shape does not change.

        A causal context makes every mixer causal; a mixer that cannot be causal raises InputError.
        """

    @abstractmethod
    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        """Return the mixing weights (and scores) by their names in MAP_KINDS; rows are queries, columns are keys.

        Shape: each map (batch, heads, max_length, max_length of the keys).
        """

    def projections(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of the hidden states, for distillation.

        Shape: (…, heads, head_width).
        """
        raise InputError(
            f"{type(self).__name__} has no query, key and value; allowed: mixers of kind full, disentangled, "
            "span_conv, long_short, favor and multi_linear"
        )

    def scores(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return the scores before the softmax of the map "attention"; -inf for masked keys and at padding.

        Shape: (batch, heads, max_length, max_length of the keys).
        """
        raise InputError(
            f"{type(self).__name__} has no attention scores; allowed: mixers of kind full, disentangled, span_conv "
            "and long_short"
        )

    @abstractmethod
    def reorder(self, heads: Tensor) -> None:
        """Sort the heads in place by the given order, most important first; the output does not change."""

    @abstractmethod
    def extract(self, cut: LayerCut) -> "Mixer":
        """Return a new mixer with the first heads only."""

    def start(self, context: ForwardContext) -> State:
        """Return the decoding state before the first token, including the projections of a memory."""
        return ()

    def step(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        """Mix the next token of each sequence, as the causal forward pass does, and return the new state, too.

        Shape: hidden (batch, width).
        """
        raise InputError(f"{type(self).__name__} cannot decode step by step; allowed: mixers with is_causal")

    def absorb(self, hidden: Tensor, state: State, context: ForwardContext) -> State:
        """Return the state after steps with some tokens, without their outputs: later tokens see them.

        Shape: hidden (batch, tokens, width).
        """
        for token in hidden.unbind(1):
            _, state = self.step(token, state, context)
        return state

    def redraw_features(self, step: int, seed: int, number: int) -> None:
        """Hook called by the trainer before every optimiser step: redraw random features if it is time.

        `number` is the index of the mixer in its stack.
        """

    def refuse_memory(self, context: ForwardContext) -> None:
        """Raise InputError if the context has a memory, for mixers that cannot attend to one."""
        if context.memory is not None:
            raise InputError(
                f"{type(self).__name__} cannot attend to a memory; allowed: mixers that read one, such as a full "
                "mixer without rotary, window and relative bias"
            )


class MixerConfig(Record, ABC):
    """The settings that every mixer has; `kind` is its name in the table."""

    kind: str
    heads: int = Field(gt=0)
    """Attention heads, or groups of channels that share a convolution kernel."""
    head_width: int | None = Field(default=None, gt=0)
    """Width of one head; None for the encoder's width divided by the number of heads."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout on attention probabilities or convolution weights; favor, which has neither, applies it to its output."""
    is_causal: bool = False
    """Tokens attend only to themselves and to earlier tokens."""

    @property
    def reads_memory(self) -> bool:
        """Whether the mixer can attend to a memory."""
        return False

    @property
    def reads_positions(self) -> bool:
        """Whether the encoder must have a table of relative position vectors."""
        return False

    @property
    def reads_biases(self) -> bool:
        """Whether the encoder must have a table of relative position biases."""
        return False

    @property
    def length_limit(self) -> int | None:
        """Maximum length of a sequence; None for any length."""
        return None

    def resolved_head_width(self, width: int) -> int:
        """Return the width of one head in an encoder of this width; raise ValueError if heads do not divide it."""
        if self.head_width is None and width % self.heads:
            raise ValueError(f"width {width} is not a multiple of heads {self.heads}; set head_width")
        return self.head_width or width // self.heads

    def check(self, width: int) -> None:
        """Raise ValueError if the settings do not fit an encoder of this width."""
        self.resolved_head_width(width)

    def cut(self, cut: LayerCut, width: int) -> Self:
        """Return the config of the extracted mixer."""
        return self.model_copy(update={"heads": cut.heads, "head_width": self.resolved_head_width(width)})

    @abstractmethod
    def build(self, width: int) -> Mixer: ...

    @abstractmethod
    def flops(self, width: int, length: int) -> int:
        """Floating-point operations of one token's forward pass in a sequence of `length` tokens."""


QUERY, KEY, KEY_AND_VALUE = slice(0, 1), slice(1, 2), slice(1, None)


class QueryKeyValueMixer(Mixer):
    """Base of mixers that project query, key and value with one matrix product and end with an output projection.

    `biased` has one flag per part of the product. Values whose width differs from the keys' have their own matrix.
    Subclasses create `output` after their other modules, because weights are initialised in that order.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        value_width: int,
        *,
        dropout: float,
        is_causal: bool,
        biased: tuple[bool, ...] = (True, True, True),
    ) -> None:
        super().__init__()
        self.heads, self.head_width, self.value_width = heads, head_width, value_width
        self.dropout, self.is_causal = dropout, is_causal
        self.sparse: SparseWeights | None = None  # for mixers that can have sparse weights instead of the softmax
        *_, has_value_bias = biased
        if value_width != head_width:
            biased = biased[:2]
        parts = len(biased)
        self.project = ElasticLinear(width, parts * heads * head_width, units_out=heads, parts=parts, bias=biased)
        self.project_value = (
            None
            if value_width == head_width
            else ElasticLinear(width, heads * value_width, units_out=heads, bias=has_value_bias)
        )

    def start(self, context: ForwardContext) -> State:
        """Return the keys and values of the memory, or empty ones."""
        if context.memory is not None:
            return self._parts(context.memory.hidden_states, context, KEY_AND_VALUE)
        new, batch, heads = self.output.new_zeros, context.layout.batch, context.keep_heads or self.heads
        return new(batch, 0, heads, self.head_width), new(batch, 0, heads, self.value_width)

    def projections(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = self._project(hidden, context)
        return query, key, value

    def reorder(self, heads: Tensor) -> None:
        for layer in self._layers_by_head().values():
            layer.reorder(units_out=heads)
        self.output.reorder(units_in=heads)
        if self.sparse is not None:
            self.sparse.reorder(heads)

    def extract(self, cut: LayerCut) -> Self:
        small = copy.deepcopy(self)
        small.heads = cut.heads
        for name, layer in self._layers_by_head().items():
            setattr(small, name, layer.extract(keep_out=cut.heads))
        small.output = self.output.extract(keep_in=cut.heads)
        if self.sparse is not None:
            small.sparse = self.sparse.extract(cut.heads)
        return small

    def _sparse_map(self, context: ForwardContext) -> SparseMap | None:
        """Return the function from scores to weights of the kept heads; None for the softmax."""
        return None if self.sparse is None else self.sparse(context.keep_heads)

    def _project(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, ...]:
        """Return query, key and value, each (…, heads, head_width); key and value are the memory's if there is one."""
        if context.memory is None:
            return self._parts(hidden, context)
        return *self._parts(hidden, context, QUERY), *self._parts(context.memory.hidden_states, context, KEY_AND_VALUE)

    def _parts(self, hidden_states: Tensor, context: ForwardContext, parts: slice | None = None) -> tuple[Tensor, ...]:
        """Return some of query, key and value, each (…, heads, head_width)."""
        by_part = self._joint(hidden_states, context, parts).unbind(-3)
        if self.project_value is None or parts == QUERY:
            return by_part
        value = self.project_value(hidden_states, WeightSlice(keep_out=context.keep_heads))
        return *by_part, value.unflatten(-1, (-1, self.value_width))

    def _joint(self, hidden_states: Tensor, context: ForwardContext, parts: slice | None = None) -> Tensor:
        """Return the parts of the joint product, (…, parts, heads, head_width)."""
        projected = self.project(hidden_states, WeightSlice(keep_out=context.keep_heads, parts=parts))
        # (…, parts · heads · head_width) -> (…, parts, heads, head_width)
        return projected.unflatten(-1, (-1, context.keep_heads or self.heads, self.head_width))

    def _look_back(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State, SequenceLayout]:
        """Return a step's query, the keys and values it attends to (the memory's, or all so far), and their layout.

        Shape: query (batch, 1, heads, head_width).
        """
        if context.memory is not None:
            (query,) = self._parts(hidden, context, QUERY)
            return query[:, None], state, context.memory.layout
        query, *key_and_value = self._project(hidden, context)
        state = append_token(state, key_and_value)
        return query[:, None], state, SequenceLayout.full(*state[0].shape[:2])

    def _output(self, mixed: Tensor, context: ForwardContext) -> Tensor:
        mixed = mixed.flatten(-2)  # (…, heads, value_width) -> (…, heads · value_width)
        return self.output(mixed, WeightSlice(keep_in=context.keep_heads, gate=context.head_gate))

    def _layers_by_head(self) -> dict[str, ElasticLinear]:
        """Return the linear layers whose outputs are divided into heads, by name."""
        layers = {name: child for name, child in self.named_children() if isinstance(child, ElasticLinear)}
        return {name: layer for name, layer in layers.items() if layer.units_out is not None}
