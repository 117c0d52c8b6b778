"""Multi-head softmax attention (Vaswani et al. 2017): over the own sequence, its past, or a memory."""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.layers.call import ForwardPass
from bertsmith.layers.elastic import ElasticLinear
from bertsmith.layers.mixers.base import Mixer, MixerConfig, State
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.attention import FORMS, attention, attention_map
from bertsmith.ops.dispatch import Forms, own_backend


class FullConfig(MixerConfig):
    """Every token looks at every token of its sequence, or of the memory."""

    reads_memory: ClassVar[bool] = True

    kind: Literal["full"] = "full"
    heads: int = Field(gt=0)
    head_width: int | None = Field(default=None, gt=0)
    """Width of one head's queries, keys and values; None for width / heads."""
    value_width: int | None = Field(default=None, gt=0)
    """Width of one head's values; None for head_width."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """On the attention probabilities."""
    is_causal: bool = False
    """A token looks only at itself and what stands before it."""

    def check(self, width: int) -> None:
        self._head_width(width)

    def build(self, width: int) -> "FullAttention":
        head_width = self._head_width(width)
        value_width = self.value_width or head_width
        return FullAttention(width, self.heads, head_width, value_width, dropout=self.dropout, is_causal=self.is_causal)

    def cut(self, cut: LayerCut, width: int) -> "FullConfig":
        return self.model_copy(update={"heads": cut.heads, "head_width": self._head_width(width)})

    def flops(self, width: int, length: int) -> int:
        head_width = self._head_width(width)
        inner = self.heads * (head_width + (self.value_width or head_width))  # of query or key, and of value
        return 2 * 2 * width * inner + 2 * length * inner

    def _head_width(self, width: int) -> int:
        if self.head_width is None and width % self.heads:
            raise ValueError(f"width {width} is not a multiple of heads {self.heads}; give head_width")
        return self.head_width or width // self.heads


class FullAttention(Mixer):
    """Query, key and value from one matrix product, attention, then the output projection.

    Values of another width than the keys have a matrix of their own.
    """

    forms: tuple[Forms[Any], ...] = (FORMS,)

    def __init__(
        self, width: int, heads: int, head_width: int, value_width: int, *, dropout: float, is_causal: bool
    ) -> None:
        super().__init__()
        self.heads, self.head_width, self.value_width = heads, head_width, value_width
        self.dropout, self.is_causal = dropout, is_causal
        parts = 3 if value_width == head_width else 2
        self.project = ElasticLinear(width, parts * heads * head_width, units_out=heads, parts=parts)
        self.project_value = ElasticLinear(width, heads * value_width, units_out=heads) if parts == 2 else None
        self.output = ElasticLinear(heads * value_width, width, units_in=heads)

    def forward(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        query, key, value = self._project(hidden, call)
        mixed = attention(
            query,
            key,
            value,
            call.layout,
            key_layout=None if call.memory is None else call.memory.layout,
            is_causal=self.is_causal,
            dropout=self.dropout if self.training else 0.0,
            backend=own_backend(FORMS, call.backend),
        )
        return self._output(mixed, call)

    def maps(self, hidden: Tensor, call: ForwardPass) -> dict[str, Tensor]:
        query, key, _ = self._project(hidden, call)
        key_layout = None if call.memory is None else call.memory.layout
        shares = attention_map(query, key, call.layout, key_layout=key_layout, is_causal=self.is_causal)
        return {"attention": shares}

    def start(self, call: ForwardPass) -> State:
        return () if call.memory is None else self._key_and_value(call.memory.states, call)

    def step(self, hidden: Tensor, state: State, call: ForwardPass) -> tuple[Tensor, State]:
        if call.memory is None and not self.is_causal:
            return super().step(hidden, state, call)
        query = self._by_head(self.project(hidden, keep_out=call.keep_heads, parts=slice(0, 1)), self.head_width)
        if call.memory is None:
            news = [tensor[:, None] for tensor in self._key_and_value(hidden, call)]  # (batch, 1, heads, head_width)
            state = tuple(torch.cat(pair, dim=1) for pair in zip(state, news, strict=True)) if state else tuple(news)
            key_layout = SequenceLayout.full(*state[0].shape[:2])
        else:
            key_layout = call.memory.layout
        key, value = state
        one = SequenceLayout.full(hidden.shape[0], 1)
        mixed = attention(
            query[:, None], key, value, one, key_layout=key_layout, backend=own_backend(FORMS, call.backend)
        )[:, 0]
        return self._output(mixed, call), state

    def reorder(self, heads: Tensor) -> None:
        self.project.reorder(units_out=heads)
        if self.project_value is not None:
            self.project_value.reorder(units_out=heads)
        self.output.reorder(units_in=heads)

    def extract(self, cut: LayerCut) -> "FullAttention":
        widths = (self.head_width, self.value_width)
        small = FullAttention(self.project.inputs, cut.heads, *widths, dropout=self.dropout, is_causal=self.is_causal)
        small.take_units(self, cut.heads)
        return small

    def take_units(self, whole: "FullAttention", heads: int) -> None:
        """Takes over the weights of another one's first heads."""
        self.project = whole.project.extract(keep_out=heads)
        if whole.project_value is not None:
            self.project_value = whole.project_value.extract(keep_out=heads)
        self.output = whole.output.extract(keep_in=heads)

    def _project(self, hidden: Tensor, call: ForwardPass) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (…, heads, head_width)."""
        if call.memory is not None:
            query = self._by_head(self.project(hidden, keep_out=call.keep_heads, parts=slice(0, 1)), self.head_width)
            return query, *self._key_and_value(call.memory.states, call)
        if self.project_value is not None:
            query, key = self._parts(self.project(hidden, keep_out=call.keep_heads), 2)
            return query, key, self._by_head(self.project_value(hidden, keep_out=call.keep_heads), self.value_width)
        query, key, value = self._parts(self.project(hidden, keep_out=call.keep_heads), 3)
        return query, key, value

    def _key_and_value(self, states: Tensor, call: ForwardPass) -> tuple[Tensor, Tensor]:
        projected = self.project(states, keep_out=call.keep_heads, parts=slice(1, None))
        if self.project_value is not None:
            value = self._by_head(self.project_value(states, keep_out=call.keep_heads), self.value_width)
            return self._by_head(projected, self.head_width), value
        key, value = self._parts(projected, 2)
        return key, value

    def _output(self, mixed: Tensor, call: ForwardPass) -> Tensor:
        mixed = mixed.flatten(-2)  # (..., heads, value_width) -> (..., heads · value_width)
        return self.output(mixed, keep_in=call.keep_heads)

    def _parts(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        # (..., parts · heads · head_width) -> parts of (..., heads, head_width)
        return projected.unflatten(-1, (parts, -1, self.head_width)).unbind(-3)

    @staticmethod
    def _by_head(projected: Tensor, head_width: int) -> Tensor:
        return projected.unflatten(-1, (-1, head_width))  # (..., heads · head_width) -> (..., heads, head_width)
