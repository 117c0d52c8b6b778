"""Attention whose scores tell content and relative position apart (He et al. 2021, DeBERTa)."""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import dropout

from bertsmith.batches.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.call import ForwardPass
from bertsmith.layers.elastic import ElasticLinear
from bertsmith.layers.mixers.base import Mixer, MixerConfig, State
from bertsmith.layers.remember import Remembered, autocast_dtype
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.disentangled import FORMS, RelativePositions, disentangled, disentangled_terms
from bertsmith.ops.dispatch import own_backend

Pair = tuple[Tensor | None, Tensor | None]
QUERY, KEY, KEY_AND_VALUE = slice(0, 1), slice(1, 2), slice(1, 3)


class DisentangledConfig(MixerConfig):
    """Content looks at content, content at relative position, and relative position at content."""

    reads_memory: ClassVar[bool] = True

    kind: Literal["disentangled"] = "disentangled"
    heads: int = Field(gt=0)
    head_width: int | None = Field(default=None, gt=0)
    """Width of one head; None for width / heads."""
    content_to_position: bool = True
    """Score the query's content against the relative position of the key."""
    position_to_content: bool = True
    """Score the relative position of the query against the key's content."""
    shares_projections: bool = True
    """Positions go through the projections of the content (v2, v3) instead of their own (v1)."""
    has_key_bias: bool = True
    """v1 has none, neither for the keys of the content nor for those of the positions."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """On the attention probabilities."""
    position_dropout: float = Field(default=0.1, ge=0, lt=1)
    """On the relative table, drawn anew in every layer."""
    is_causal: bool = False
    """A token looks only at itself and what stands before it."""

    @property
    def reads_positions(self) -> bool:
        """Whether the encoder must have a relative table."""
        return self.content_to_position or self.position_to_content

    def check(self, width: int) -> None:
        self._head_width(width)

    def build(self, width: int) -> "DisentangledAttention":
        return DisentangledAttention(width, self.model_copy(update={"head_width": self._head_width(width)}))

    def cut(self, cut: LayerCut, width: int) -> "DisentangledConfig":
        return self.model_copy(update={"heads": cut.heads, "head_width": self._head_width(width)})

    def flops(self, width: int, length: int) -> int:
        inner = self.heads * self._head_width(width)
        terms = 2 + self.content_to_position + self.position_to_content  # content, values, and what positions add
        return 2 * 4 * width * inner + 2 * terms * length * inner

    def _head_width(self, width: int) -> int:
        if self.head_width is None and width % self.heads:
            raise ValueError(f"width {width} is not a multiple of heads {self.heads}; give head_width")
        return self.head_width or width // self.heads


class DisentangledAttention(Mixer):
    """Query, key and value of the content, key and query of the relative positions, attention, output projection."""

    forms = (FORMS,)

    def __init__(self, width: int, config: DisentangledConfig) -> None:
        super().__init__()
        assert config.head_width is not None
        self.config, self.heads, self.head_width = config, config.heads, config.head_width
        inner, units, key_bias = self.heads * self.head_width, self.heads, config.has_key_bias
        self.project = ElasticLinear(width, 3 * inner, units_out=units, parts=3, bias=(True, key_bias, True))
        own = not config.shares_projections
        self.position_key = (
            ElasticLinear(width, inner, units_out=units, bias=key_bias) if own and config.content_to_position else None
        )
        self.position_query = (
            ElasticLinear(width, inner, units_out=units) if own and config.position_to_content else None
        )
        self.output = ElasticLinear(inner, width, units_in=units)
        self.remembered: Remembered[Pair] = Remembered()

    def forward(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        query, key, value = self._project(hidden, call)
        relative = call.relative_positions
        key_layout = call.layout if call.memory is None else call.memory.layout
        return self._mix(query, key, value, call, call.layout, key_layout, relative, is_causal=self.config.is_causal)

    def maps(self, hidden: Tensor, call: ForwardPass) -> dict[str, Tensor]:
        """The probabilities ("attention") and the terms of the scores, apart."""
        query, key, _ = self._project(hidden, call)
        return disentangled_terms(
            query,
            key,
            *self._positions(call),
            call.layout,
            call.relative_positions,
            key_layout=None if call.memory is None else call.memory.layout,
            is_causal=self.config.is_causal,
        )

    def start(self, call: ForwardPass) -> State:
        if call.memory is None:
            return ()
        key, value = self._key_and_value(call.memory.states, call)
        # queries have places, so a step must know how many came before it
        return key, value, torch.zeros(call.memory.layout.batch, dtype=torch.long, device=key.device)

    def step(self, hidden: Tensor, state: State, call: ForwardPass) -> tuple[Tensor, State]:
        if call.memory is None and not self.config.is_causal:
            return super().step(hidden, state, call)
        query = self._by_head(self.project(hidden, keep_out=call.keep_heads, parts=QUERY))
        if call.memory is None:
            news = [tensor[:, None] for tensor in self._key_and_value(hidden, call)]  # (batch, 1, heads, head_width)
            state = tuple(torch.cat(pair, dim=1) for pair in zip(state, news, strict=True)) if state else tuple(news)
            key, value = state
            key_layout = SequenceLayout.full(*key.shape[:2])
            place = torch.full((hidden.shape[0],), key.shape[1] - 1, device=key.device)
        else:
            key, value, place = state
            key_layout, state = call.memory.layout, (key, value, place + 1)
        one = SequenceLayout.full(hidden.shape[0], 1)
        relative = call.relative_positions
        if relative is not None:
            relative = replace(relative, query_positions=place[:, None])
        mixed = self._mix(query[:, None], key, value, call, one, key_layout, relative, is_causal=False)
        return mixed[:, 0], state

    def reorder(self, heads: Tensor) -> None:
        for layer in (self.project, self.position_key, self.position_query):
            if layer is not None:
                layer.reorder(units_out=heads)
        self.output.reorder(units_in=heads)

    def extract(self, cut: LayerCut) -> "DisentangledAttention":
        width = self.project.inputs
        small = DisentangledAttention(width, self.config.cut(cut, width))
        small.project = self.project.extract(keep_out=cut.heads)
        if self.position_key is not None:
            small.position_key = self.position_key.extract(keep_out=cut.heads)
        if self.position_query is not None:
            small.position_query = self.position_query.extract(keep_out=cut.heads)
        small.output = self.output.extract(keep_in=cut.heads)
        return small

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: ForwardPass,
        layout: SequenceLayout,
        key_layout: SequenceLayout,
        relative: RelativePositions | None,
        *,
        is_causal: bool,
    ) -> Tensor:
        mixed = disentangled(
            query,
            key,
            value,
            *self._positions(call),
            layout,
            relative,
            key_layout=key_layout,
            is_causal=is_causal,
            dropout=self.config.dropout if self.training else 0.0,
            backend=own_backend(FORMS, call.backend),
        )
        mixed = mixed.flatten(-2)  # (..., heads, head_width) -> (..., heads · head_width)
        return self.output(mixed, keep_in=call.keep_heads)

    def _project(self, hidden: Tensor, call: ForwardPass) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the content, each (…, heads, head_width)."""
        if call.memory is not None:
            query = self._by_head(self.project(hidden, keep_out=call.keep_heads, parts=QUERY))
            return query, *self._key_and_value(call.memory.states, call)
        query, key, value = self._by_head(self.project(hidden, keep_out=call.keep_heads)).chunk(3, dim=-2)
        return query, key, value

    def _key_and_value(self, states: Tensor, call: ForwardPass) -> tuple[Tensor, Tensor]:
        key, value = self._by_head(self.project(states, keep_out=call.keep_heads, parts=KEY_AND_VALUE)).chunk(2, dim=-2)
        return key, value

    def _positions(self, call: ForwardPass) -> Pair:
        """Key and query of every row of the relative table, None for a term that is left out.

        They depend on weights alone, so they are remembered between calls in eval mode.
        Shape: each (rows, heads, head_width).
        """
        if not self.config.reads_positions:
            return None, None
        if call.relative_positions is None:
            raise InputError("a disentangled mixer needs a table of relative positions; give encoder.relative")
        vectors = call.relative_positions.vectors
        layers = [layer for layer in (self.project, self.position_key, self.position_query) if layer is not None]
        weights = [parameter for layer in layers for parameter in layer.parameters()]
        settings = (call.keep_heads, autocast_dtype(vectors))
        return self.remembered([vectors, *weights], settings, lambda: self._project_positions(vectors, call.keep_heads))

    def _project_positions(self, vectors: Tensor, keep: int | None) -> Pair:
        vectors = dropout(vectors, self.config.position_dropout, self.training)
        key: Tensor | None = None
        query: Tensor | None = None
        if self.config.content_to_position:
            layer, part = (self.project, KEY) if self.position_key is None else (self.position_key, None)
            key = self._by_head(layer(vectors, keep_out=keep, parts=part))
        if self.config.position_to_content:
            layer, part = (self.project, QUERY) if self.position_query is None else (self.position_query, None)
            query = self._by_head(layer(vectors, keep_out=keep, parts=part))
        return key, query

    def _by_head(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_width))  # (..., heads · head_width) -> (..., heads, head_width)
