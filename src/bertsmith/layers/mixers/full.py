"""Multi-head softmax attention over the whole sequence (Vaswani et al. 2017)."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from bertsmith.layers.call import ForwardPass
from bertsmith.layers.elastic import ElasticLinear
from bertsmith.layers.mixers.base import Mixer, MixerConfig
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.attention import attention, attention_map


class FullConfig(MixerConfig):
    """Every token looks at every token of its sequence."""

    kind: Literal["full"] = "full"
    heads: int = Field(gt=0)
    head_width: int | None = Field(default=None, gt=0)
    """Width of one head; None for width / heads."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """On the attention probabilities."""
    is_causal: bool = False
    """A token looks only at itself and what stands before it."""

    def check(self, width: int) -> None:
        self._head_width(width)

    def build(self, width: int) -> "FullAttention":
        return FullAttention(width, self.heads, self._head_width(width), self.dropout, self.is_causal)

    def cut(self, cut: LayerCut, width: int) -> "FullConfig":
        return self.model_copy(update={"heads": cut.heads, "head_width": self._head_width(width)})

    def flops(self, width: int, length: int) -> int:
        inner = self.heads * self._head_width(width)
        return 2 * 4 * width * inner + 2 * 2 * length * inner

    def _head_width(self, width: int) -> int:
        if self.head_width is None and width % self.heads:
            raise ValueError(f"width {width} is not a multiple of heads {self.heads}; give head_width")
        return self.head_width or width // self.heads


class FullAttention(Mixer):
    """Query, key and value from one matrix product, attention, then the output projection."""

    def __init__(self, width: int, heads: int, head_width: int, dropout: float, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.dropout, self.is_causal = dropout, is_causal
        inner = heads * head_width
        self.project = ElasticLinear(width, 3 * inner, units_out=heads, parts=3)
        self.output = ElasticLinear(inner, width, units_in=heads)

    def forward(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        query, key, value = self._project(hidden, call)
        mixed = attention(
            query,
            key,
            value,
            call.layout,
            is_causal=self.is_causal,
            dropout=self.dropout if self.training else 0.0,
            backend=call.backend,
        )
        mixed = mixed.flatten(-2)  # (..., heads, head_width) -> (..., heads · head_width)
        return self.output(mixed, keep_in=None if call.cut is None else call.cut.heads)

    def maps(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        query, key, _ = self._project(hidden, call)
        return attention_map(query, key, call.layout, is_causal=self.is_causal)

    def reorder(self, heads: Tensor) -> None:
        self.project.reorder(units_out=heads)
        self.output.reorder(units_in=heads)

    def extract(self, cut: LayerCut) -> "FullAttention":
        small = FullAttention(self.project.inputs, cut.heads, self.head_width, self.dropout, self.is_causal)
        small.project = self.project.extract(keep_out=cut.heads)
        small.output = self.output.extract(keep_in=cut.heads)
        return small

    def _project(self, hidden: Tensor, call: ForwardPass) -> tuple[Tensor, Tensor, Tensor]:
        projected = self.project(hidden, keep_out=None if call.cut is None else call.cut.heads)
        # (..., 3 · heads · head_width) -> three of (..., heads, head_width)
        query, key, value = projected.unflatten(-1, (3, -1, self.head_width)).unbind(-3)
        return query, key, value
