"""What all kinds of attention have in common: projections by head, the output, and keys and values that grow."""

import copy
from typing import Self

from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.elastic import ElasticLinear
from bertsmith.layers.mixers.base import Mixer, State, grown
from bertsmith.layers.subnet import LayerCut

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
            return self._parts(context.memory.states, context, KEY_AND_VALUE)
        new, batch, heads = self.output.weight.new_zeros, context.layout.batch, context.keep_heads or self.heads
        return new(batch, 0, heads, self.head_width), new(batch, 0, heads, self.value_width)

    def projected(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
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
        return *self._parts(hidden, context, QUERY), *self._parts(context.memory.states, context, KEY_AND_VALUE)

    def _parts(self, states: Tensor, context: ForwardContext, parts: slice | None = None) -> tuple[Tensor, ...]:
        """Some of query, key and value, each (…, heads, head_width)."""
        heads = context.keep_heads or self.heads
        projected = self.project(states, keep_out=context.keep_heads, parts=parts)
        # (…, parts · heads · head_width) -> parts of (…, heads, head_width)
        found = projected.unflatten(-1, (-1, heads, self.head_width)).unbind(-3)
        if self.project_value is None or parts == QUERY:
            return found
        value = self.project_value(states, keep_out=context.keep_heads)
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
        return self.output(mixed, keep_in=context.keep_heads, gate=context.head_gate)

    def _layers_by_head(self) -> dict[str, ElasticLinear]:
        """The layers whose outputs are heads."""
        layers = {name: part for name, part in self.named_children() if isinstance(part, ElasticLinear)}
        return {name: layer for name, layer in layers.items() if layer.units_out is not None}
