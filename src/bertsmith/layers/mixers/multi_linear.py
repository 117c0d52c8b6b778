"""Multi-linear attention (Ma et al. 2019, Tensorized Transformer), for comparisons: no softmax, weights for all pairs.

docs/papers/lite.md lists its limits.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertsmith.errors import InputError
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.elementwise import first_units
from bertsmith.layers.linear import ElasticLinear
from bertsmith.layers.mixers.base import MixerConfig, QueryKeyValueMixer, State, append_token
from bertsmith.ops.dispatch import resolve_backend
from bertsmith.ops.dropout import drop_tokens
from bertsmith.ops.multi_linear import BACKENDS, multi_linear, multi_linear_map, multi_linear_step


class MultiLinearConfig(MixerConfig):
    """Settings of a multi-linear attention mixer.

    Its rank is heads · head_width: a head is a group of rank components, the unit that sub-networks remove. The mixer
    has 3 · width · rank + rank + max_length² · width weights, and biases.
    """

    kind: Literal["multi_linear"] = "multi_linear"
    max_length: int = Field(default=32, gt=0)
    """Maximum length of a sequence; the output has a row of weights for every pair of positions."""

    @property
    def length_limit(self) -> int:
        return self.max_length

    def build(self, width: int) -> "MultiLinear":
        return MultiLinear(
            width,
            self.heads,
            self.resolved_head_width(width),
            self.max_length,
            dropout=self.dropout,
            is_causal=self.is_causal,
        )

    def flops(self, width: int, length: int) -> int:
        rank = self.heads * self.resolved_head_width(width)
        # projections; the matrix of the sequence, shared by its tokens; a product with it
        return 2 * (3 * width * rank + length * rank * width + rank * width)


class RankCore(ElasticLinear):
    """The core tensor, one factor per rank component: query components are multiplied by its weights."""

    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Start with all factors 1."""
        nn.init.ones_(self.weight)

    def extract(self, *, keep_in: int | None = None, keep_out: int | None = None) -> "RankCore":
        plain = super().extract(keep_in=keep_in, keep_out=keep_out)
        small = RankCore(plain.inputs, plain.outputs, units_in=plain.units_in, bias=False)
        small.weight = plain.weight
        return small


class MultiLinear(QueryKeyValueMixer):
    """Query, key and value of the rank's size, the core, then a sum over all pairs of tokens."""

    backends = (BACKENDS,)

    def __init__(
        self, width: int, heads: int, head_width: int, max_length: int, *, dropout: float, is_causal: bool
    ) -> None:
        super().__init__(width, heads, head_width, head_width, dropout=dropout, is_causal=is_causal)
        self.max_length = max_length
        self.output = RankCore(heads * head_width, 1, units_in=heads, bias=False)
        self.pairs = nn.Parameter(torch.empty(max_length, max_length, width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        self.refuse_memory(context)
        self._check_length(context.layout.max_length)
        query, key, value = self._project(hidden, context)
        if self.training and self.dropout:
            query = drop_tokens(query, self.dropout, context.layout)
        mixed = multi_linear(
            query.flatten(-2),
            key.flatten(-2),
            value.flatten(-2),
            self.pairs,
            context.layout,
            is_causal=self.is_causal or context.is_causal,
            backend=resolve_backend(BACKENDS, context.backend),
        )
        return mixed + self.bias.to(mixed.dtype)

    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        """Return the tensor summed over its third index, by head."""
        query, key, value = self._project(hidden, context)
        is_causal = self.is_causal or context.is_causal
        return {"multi_linear": multi_linear_map(query, key, value, context.layout, is_causal=is_causal)}

    def start(self, context: ForwardContext) -> State:
        """Return no keys and values, and a zero matrix (rank, width) in at least float32."""
        key, value = super().start(context)
        rank, wide = key.shape[2] * key.shape[3], torch.promote_types(key.dtype, torch.float32)
        return key, value, key.new_zeros(context.layout.batch, rank, self.bias.shape[0], dtype=wide)

    def step(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        if not (self.is_causal or context.is_causal):
            return super().step(hidden, state, context)
        *cached, memory = state
        query, *key_and_value = self._project(hidden, context)
        key, value = append_token(cached, key_and_value)
        self._check_length(key.shape[1])
        mixed, memory = multi_linear_step(query.flatten(-2), key.flatten(-2), value.flatten(-2), memory, self.pairs)
        return mixed.to(query.dtype) + self.bias.to(query.dtype), (key, value, memory)

    def _project(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, ...]:
        """Return query, key and value, each (…, heads, head_width); the query times core and gates."""
        query, key, value = super()._project(hidden, context)
        core = self.output.prefix(context.keep_heads, None)[0].view(-1, self.head_width)  # (1, rank) -> (heads, …)
        if context.head_gate is not None:
            core = core * first_units(context.head_gate, context.keep_heads).to(core)[:, None]
        return query * core.to(query.dtype), key, value

    def _check_length(self, length: int) -> None:
        if length > self.max_length:
            raise InputError(
                f"a sequence may have {length} tokens; a multi_linear mixer with max_length {self.max_length} takes at "
                "most as many"
            )
