"""The mixer contract, the one place where families of encoders differ, and the base of mixers with queries and keys."""

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
from bertsmith.layers.positions import Rotary
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.dispatch import Implementations
from bertsmith.settings import Record

State = tuple[Tensor, ...]
"""What a causal mixer keeps of the tokens it has seen; the first axis of every tensor is the batch."""


@dataclass(frozen=True)
class MapKind:
    """What the cells of a map hold: weights, which are not negative and sum to at most 1 in a row, or else scores."""

    is_score: bool = False
    """Any sign, any size."""
    is_convolution: bool = False
    """A band of taps: every head has a kernel."""


MAP_KINDS: dict[str, MapKind] = {
    "attention": MapKind(),
    "cross_attention": MapKind(),
    "convolution": MapKind(is_convolution=True),
    "depthwise_convolution": MapKind(is_score=True, is_convolution=True),
    "content_to_content": MapKind(is_score=True),
    "content_to_position": MapKind(is_score=True),
    "position_to_content": MapKind(is_score=True),
}
"""Every map a mixer may give, by name."""


def grown(state: Sequence[Tensor], news: Sequence[Tensor]) -> State:
    """The tensors of a state with one more token each: (batch, seen, …) and (batch, …) -> (batch, seen + 1, …)."""
    # an empty tensor has the weights' dtype, which is not autocast's
    return tuple(torch.cat([old.to(new), new[:, None]], dim=1) for old, new in zip(state, news, strict=True))


class Mixer(nn.Module, ABC):
    """Lets the positions of each sequence exchange what they know. The contract tests run over every kind."""

    heads: int
    output: ElasticLinear
    """The last layer."""
    backends: tuple[Implementations[Any], ...]
    """Of every op the mixer uses."""
    rotary: Rotary | None = None
    """The kind of turns it reads from the call; None for none."""

    @abstractmethod
    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """The mixed states, in the shape of `hidden`; they look at `call.memory` if there is one.

        A causal call makes every kind causal; one that cannot be raises InputError.
        """

    @abstractmethod
    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        """How much each position takes from each other one, by a name of MAP_KINDS; rows are receivers.

        Shape: each map (batch, heads, longest, longest of what is looked at).
        """

    def projections(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the states that come in, for those who compare mixers; each lies as they do.

        Shape: (…, heads, head width).
        """
        raise InputError(
            f"{type(self).__name__} has no query, key and value; allowed: mixers of the kinds full, disentangled, "
            "span_conv and favor"
        )

    def scores(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """What the softmax of the map "attention" is taken of; -inf where a position does not look, and at pads.

        Shape: (batch, heads, longest, longest of what is looked at).
        """
        raise InputError(
            f"{type(self).__name__} has no scores of attention; allowed: mixers of the kinds full, disentangled and "
            "span_conv"
        )

    @abstractmethod
    def reorder(self, heads: Tensor) -> None:
        """Puts the heads in the given order, most important first; the output does not change."""

    @abstractmethod
    def extract(self, cut: LayerCut) -> "Mixer":
        """A part of its own with the first heads only."""

    def start(self, context: ForwardContext) -> State:
        """The state before the first token; what can be computed of the memory once is computed here."""
        return ()

    def step(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        """The mixed states of one more token of each sequence, and the next state: the causal pass, token by token.

        Shape: hidden (batch, width).
        """
        raise InputError(f"{type(self).__name__} has no step-by-step form; allowed: mixers with is_causal")

    def redraw_features(self, step: int, seed: int, number: int) -> None:
        """The trainer's moment before a step: kinds that draw random features draw them anew when it is time.

        `number` tells the mixers of a stack apart.
        """

    def refuse_memory(self, context: ForwardContext) -> None:
        """Raises InputError if the call has a memory, for kinds that cannot look at one."""
        if context.memory is not None:
            raise InputError(
                f"{type(self).__name__} cannot look at a memory; allowed: kinds that read one, as a full mixer "
                "without rotary and window"
            )


class MixerConfig(Record, ABC):
    """The settings that every kind of mixer has; `kind` is its name in the table."""

    kind: str
    heads: int = Field(gt=0)
    """The units of the mixer; of a convolution, groups of channels that share a kernel."""
    head_width: int | None = Field(default=None, gt=0)
    """Width of one head; None for heads that together fill the encoder's width."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """On the shares a token takes of others: probabilities or taps; favor, which has none, drops mixed values."""
    is_causal: bool = False
    """A token takes only from itself and what stands before it."""

    @property
    def reads_memory(self) -> bool:
        """Whether the mixer can look at states other than those that come in."""
        return False

    @property
    def reads_positions(self) -> bool:
        """Whether the encoder must have a table of relative positions."""
        return False

    def resolved_head_width(self, width: int) -> int:
        """The width of one head in an encoder of this width; raises ValueError if there is none."""
        if self.head_width is None and width % self.heads:
            raise ValueError(f"width {width} is not a multiple of heads {self.heads}; give head_width")
        return self.head_width or width // self.heads

    def check(self, width: int) -> None:
        """Raises ValueError if the mixer cannot stand in an encoder of this width."""
        self.resolved_head_width(width)

    def cut(self, cut: LayerCut, width: int) -> Self:
        """The config of the extracted part."""
        return self.model_copy(update={"heads": cut.heads, "head_width": self.resolved_head_width(width)})

    @abstractmethod
    def build(self, width: int) -> Mixer: ...

    @abstractmethod
    def flops(self, width: int, length: int) -> int:
        """Floating-point operations of one token's forward pass in a sequence of `length` tokens."""


QUERY, KEY, KEY_AND_VALUE = slice(0, 1), slice(1, 2), slice(1, None)


class Attending(Mixer):
    """Query, key and value from one matrix product, what a kind makes of them, then the output projection.

    `biased` says which parts of the product have a bias. Values of another width than the keys have a matrix of their
    own. A kind makes its `output` after its other parts: fresh weights are drawn in that order.
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
        """The keys and values of the memory, or none yet."""
        if context.memory is not None:
            return self._parts(context.memory.hidden_states, context, KEY_AND_VALUE)
        new, batch, heads = self.output.weight.new_zeros, context.layout.batch, context.keep_heads or self.heads
        return new(batch, 0, heads, self.head_width), new(batch, 0, heads, self.value_width)

    def projections(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = self._project(hidden, context)
        return query, key, value

    def reorder(self, heads: Tensor) -> None:
        for layer in self._layers_by_head().values():
            layer.reorder(units_out=heads)
        self.output.reorder(units_in=heads)

    def extract(self, cut: LayerCut) -> Self:
        small = copy.deepcopy(self)
        small.heads = cut.heads
        for name, layer in self._layers_by_head().items():
            setattr(small, name, layer.extract(keep_out=cut.heads))
        small.output = self.output.extract(keep_in=cut.heads)
        return small

    def _project(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, ...]:
        """Query, key and value, each (…, heads, head_width); key and value are the memory's if there is one."""
        if context.memory is None:
            return self._parts(hidden, context)
        return *self._parts(hidden, context, QUERY), *self._parts(context.memory.hidden_states, context, KEY_AND_VALUE)

    def _parts(self, hidden_states: Tensor, context: ForwardContext, parts: slice | None = None) -> tuple[Tensor, ...]:
        """Some of query, key and value, each (…, heads, head_width)."""
        heads = context.keep_heads or self.heads
        projected = self.project(hidden_states, WeightSlice(keep_out=context.keep_heads, parts=parts))
        # (…, parts · heads · head_width) -> parts of (…, heads, head_width)
        found = projected.unflatten(-1, (-1, heads, self.head_width)).unbind(-3)
        if self.project_value is None or parts == QUERY:
            return found
        value = self.project_value(hidden_states, WeightSlice(keep_out=context.keep_heads))
        return *found, value.unflatten(-1, (heads, self.value_width))

    def _look_back(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State, SequenceLayout]:
        """A step's query, the keys and values it looks at (the memory's, or all so far), and how they lie.

        Shape: query (batch, 1, heads, head_width).
        """
        if context.memory is not None:
            (query,) = self._parts(hidden, context, QUERY)
            return query[:, None], state, context.memory.layout
        query, *news = self._project(hidden, context)
        state = grown(state, news)
        return query[:, None], state, SequenceLayout.full(*state[0].shape[:2])

    def _output(self, mixed: Tensor, context: ForwardContext) -> Tensor:
        mixed = mixed.flatten(-2)  # (…, heads, value_width) -> (…, heads · value_width)
        return self.output(mixed, WeightSlice(keep_in=context.keep_heads, gate=context.head_gate))

    def _layers_by_head(self) -> dict[str, ElasticLinear]:
        """The layers whose outputs are heads."""
        layers = {name: part for name, part in self.named_children() if isinstance(part, ElasticLinear)}
        return {name: layer for name, layer in layers.items() if layer.units_out is not None}
