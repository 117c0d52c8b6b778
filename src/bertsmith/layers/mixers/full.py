"""Multi-head softmax attention (Vaswani et al. 2017): over the own sequence, its past, or a memory."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.layers.call import ForwardPass
from bertsmith.layers.elastic import ElasticLinear
from bertsmith.layers.mixers.attending import Attending
from bertsmith.layers.mixers.base import MixerConfig, State
from bertsmith.ops.attention import FORMS, attention, attention_map
from bertsmith.ops.dispatch import own_backend


class FullConfig(MixerConfig):
    """Every token looks at every token of its sequence, or of the memory."""

    kind: Literal["full"] = "full"
    value_width: int | None = Field(default=None, gt=0)
    """Width of one head's values; None for head_width."""

    @property
    def reads_memory(self) -> bool:
        return True

    def build(self, width: int) -> "FullAttention":
        head_width = self.resolved_head_width(width)
        value_width = self.value_width or head_width
        return FullAttention(width, self.heads, head_width, value_width, dropout=self.dropout, is_causal=self.is_causal)

    def flops(self, width: int, length: int) -> int:
        head_width = self.resolved_head_width(width)
        inner = self.heads * (head_width + (self.value_width or head_width))  # of query or key, and of value
        return 2 * 2 * width * inner + 2 * length * inner


class FullAttention(Attending):
    """Query, key and value from one matrix product, attention, then the output projection."""

    forms = (FORMS,)

    def __init__(
        self, width: int, heads: int, head_width: int, value_width: int, *, dropout: float, is_causal: bool
    ) -> None:
        super().__init__(width, heads, head_width, value_width, dropout=dropout, is_causal=is_causal)
        self.output = ElasticLinear(heads * value_width, width, units_in=heads)

    def forward(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        query, key, value = self._project(hidden, call)
        mixed = attention(
            query,
            key,
            value,
            call.layout,
            key_layout=call.key_layout,
            is_causal=self.is_causal or call.is_causal,
            dropout=self.dropout if self.training else 0.0,
            backend=own_backend(FORMS, call.backend),
        )
        return self._output(mixed, call)

    def maps(self, hidden: Tensor, call: ForwardPass) -> dict[str, Tensor]:
        query, key, _ = self._project(hidden, call)
        is_causal = self.is_causal or call.is_causal
        shares = attention_map(query, key, call.layout, key_layout=call.key_layout, is_causal=is_causal)
        return {"attention": shares}

    def step(self, hidden: Tensor, state: State, call: ForwardPass) -> tuple[Tensor, State]:
        if call.memory is None and not (self.is_causal or call.is_causal):
            return super().step(hidden, state, call)
        query, (key, value), key_layout = self._look_back(hidden, state, call)
        one = SequenceLayout.full(hidden.shape[0], 1)
        mixed = attention(query, key, value, one, key_layout=key_layout, backend=own_backend(FORMS, call.backend))[:, 0]
        return self._output(mixed, call), (key, value)
