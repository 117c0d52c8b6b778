"""Multi-head attention (Vaswani et al. 2017): self-attention, causal self-attention or cross-attention."""

from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.linear import ElasticLinear
from bertsmith.layers.mixers.base import KEY_AND_VALUE, MixerConfig, QueryKeyValueMixer, State, append_tokens
from bertsmith.layers.mixers.sparse import SparseConfig, SparseWeights
from bertsmith.layers.positions import Rotary
from bertsmith.layers.rounded import RoundedSoftmax
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.attention import BACKENDS, RelativeBias, attention, attention_map, attention_scores
from bertsmith.ops.dispatch import resolve_backend
from bertsmith.ops.rounded_softmax import SoftmaxRounding


class FullConfig(MixerConfig):
    """Settings of an attention mixer."""

    kind: Literal["full"] = "full"
    value_width: int | None = Field(default=None, gt=0)
    """Width of one head's values; None for head_width."""
    rotary: float | None = Field(default=None, gt=1)
    """Base θ of the rotary position embedding; 10000 as published. None for no rotary embedding."""
    window: int | None = Field(default=None, gt=0)
    """Attend to at most this many tokens on each side; None for all tokens."""
    has_bias: bool = True
    """Biases in all projections."""
    sparse: SparseConfig | None = None
    """Sparse attention weights; None for the softmax."""
    has_relative_bias: bool = False
    """Add the encoder's bias of each head and distance to the scores (T5, MPNet); set the encoder's `relative`, too."""

    @property
    def reads_memory(self) -> bool:
        """Whether the mixer can attend to a memory; rotation, window and bias need positions in one sequence."""
        return self.rotary is None and self.window is None and not self.has_relative_bias

    @property
    def reads_biases(self) -> bool:
        return self.has_relative_bias

    def check(self, width: int) -> None:
        head_width = self.resolved_head_width(width)
        if self.rotary is not None and head_width % 2:
            raise ValueError(f"head_width is {head_width}, but rotary rotates pairs of channels; allowed: even widths")

    def build(self, width: int) -> "FullAttention":
        head_width = self.resolved_head_width(width)
        value_width = self.value_width or head_width
        return FullAttention(
            width,
            self.heads,
            head_width,
            value_width,
            dropout=self.dropout,
            is_causal=self.is_causal,
            has_bias=self.has_bias,
            rotary=None if self.rotary is None else Rotary(self.rotary, head_width),
            window=self.window,
            sparse=None if self.sparse is None else self.sparse.build(self.heads),
            has_relative_bias=self.has_relative_bias,
        )

    def flops(self, width: int, length: int) -> int:
        head_width = self.resolved_head_width(width)
        inner = self.heads * (head_width + (self.value_width or head_width))  # of query or key, and of value
        keys = length
        if self.window is not None:
            keys = min(length, self.window * (1 if self.is_causal else 2) + 1)
        return 2 * 2 * width * inner + 2 * keys * inner


class FullAttention(QueryKeyValueMixer):
    """Query, key and value from one matrix product, attention, then the output projection."""

    backends = (BACKENDS,)
    bias_heads: Tensor
    """The column of the encoder's bias table that each head reads, since heads are reordered layer by layer."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        value_width: int,
        *,
        dropout: float,
        is_causal: bool,
        has_bias: bool = True,
        rotary: Rotary | None = None,
        window: int | None = None,
        sparse: SparseWeights | None = None,
        has_relative_bias: bool = False,
    ) -> None:
        biased = (has_bias,) * 3
        super().__init__(width, heads, head_width, value_width, dropout=dropout, is_causal=is_causal, biased=biased)
        self.output = ElasticLinear(heads * value_width, width, units_in=heads, bias=has_bias)
        self.rotary, self.window, self.sparse = rotary, window, sparse
        self.softmax: RoundedSoftmax | None = None  # of a model that rounds all tensors
        self.has_relative_bias = has_relative_bias
        if has_relative_bias:
            self.register_buffer("bias_heads", torch.arange(heads))

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        joint = None
        if context.memory is None and self.rotary is None and self.project_value is None:
            joint = self._joint(hidden, context)
        query, key, value = self._project(hidden, context) if joint is None else joint.unbind(-3)
        mixed = attention(
            query,
            key,
            value,
            context.layout,
            key_layout=context.key_layout,
            is_causal=self.is_causal or context.is_causal,
            window=self.window,
            sparse=self._sparse_map(context),
            rounding=self._softmax_rounding(context),
            bias=self._bias(context),
            dropout=self.dropout if self.training else 0.0,
            joint=joint,
            backend=resolve_backend(BACKENDS, context.backend),
        )
        return self._output(mixed, context)

    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        query, key, _ = self._project(hidden, context)
        is_causal = self.is_causal or context.is_causal
        weights = attention_map(
            query,
            key,
            context.layout,
            key_layout=context.key_layout,
            is_causal=is_causal,
            window=self.window,
            sparse=self._sparse_map(context),
            rounding=self._softmax_rounding(context),
            bias=self._bias(context),
        )
        return {"attention": weights}

    def scores(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        query, key, _ = self._project(hidden, context)
        is_causal = self.is_causal or context.is_causal
        return attention_scores(
            query,
            key,
            context.layout,
            key_layout=context.key_layout,
            is_causal=is_causal,
            window=self.window,
            bias=self._bias(context),
        )

    def step(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        if context.memory is None and not (self.is_causal or context.is_causal):
            return super().step(hidden, state, context)
        if self.rotary is not None:
            position = torch.tensor(state[0].shape[1], device=hidden.device)
            context = replace(context, rotations={self.rotary: self.rotary.rotations(position)})
        query, state, key_layout = self._look_back(hidden, state, context)
        key, value = state
        if self.window is not None:
            key, value = key[:, -1 - self.window :], value[:, -1 - self.window :]
            key_layout = SequenceLayout.full(*key.shape[:2])
        one = SequenceLayout.full(hidden.shape[0], 1)
        mixed = attention(
            query,
            key,
            value,
            one,
            key_layout=key_layout,
            sparse=self._sparse_map(context),
            rounding=self._softmax_rounding(context),
            bias=self._bias(context, first_query=key.shape[1] - 1),
            backend=resolve_backend(BACKENDS, context.backend),
        )[:, 0]
        return self._output(mixed, context), state

    def absorb(self, hidden: Tensor, state: State, context: ForwardContext) -> State:
        if not (self.is_causal or context.is_causal):
            return super().absorb(hidden, state, context)
        key, value = self._parts(hidden, context, KEY_AND_VALUE)
        if self.rotary is not None:
            positions = state[0].shape[1] + torch.arange(hidden.shape[1], device=hidden.device)
            key = self.rotary.rotations(positions)(key)
        return append_tokens(state, (key, value))

    @torch.no_grad()
    def reorder(self, heads: Tensor) -> None:
        super().reorder(heads)
        if self.has_relative_bias:
            self.bias_heads.copy_(self.bias_heads[heads])

    def extract(self, cut: LayerCut) -> Self:
        small = super().extract(cut)
        if self.has_relative_bias:
            small.bias_heads = self.bias_heads[: cut.heads].clone()
        small.softmax = None if self.softmax is None else self.softmax.extract(cut.heads)
        return small

    def _softmax_rounding(self, context: ForwardContext) -> SoftmaxRounding | None:
        """Return the rounding of the softmax of the kept heads; None for none."""
        return None if self.softmax is None else self.softmax(context.keep_heads)

    def _bias(self, context: ForwardContext, first_query: int = 0) -> RelativeBias | None:
        """Return the bias of the kept heads; None for none."""
        relative = context.relative_positions
        if not self.has_relative_bias or relative is None:
            return None
        # (rows, heads of the table) -> (heads, offsets)
        by_head = relative.vectors.T[self.bias_heads[: context.keep_heads]]
        return RelativeBias(by_head[:, relative.slots], first_query)

    def _project(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, ...]:
        if self.rotary is None and self.window is None and not self.has_relative_bias:
            return super()._project(hidden, context)
        self.refuse_memory(context)
        query, key, value = super()._project(hidden, context)
        if self.rotary is None:
            return query, key, value
        rotate = context.rotations[self.rotary]
        return rotate(query), rotate(key), value
