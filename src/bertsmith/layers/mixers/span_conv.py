"""ConvBERT's mixed attention (Jiang et al. 2020): attention heads beside as many convolution heads.

docs/papers/convbert.md has a diagram and lists where paper, released code and `transformers` differ.
"""

import copy
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.linear import ElasticLinear, WeightSlice
from bertsmith.layers.mixers.base import (
    KEY_AND_VALUE,
    MixerConfig,
    QueryKeyValueMixer,
    State,
    append_token,
    append_tokens,
)
from bertsmith.layers.mixers.full import FullAttention
from bertsmith.layers.mixers.kernels import KERNELS, Kernel, initialise_depthwise
from bertsmith.layers.mixers.sparse import SparseConfig, SparseWeights
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops import conv
from bertsmith.ops.attention import BACKENDS, attention, attention_map, attention_scores
from bertsmith.ops.dispatch import resolve_backend


class SpanConvConfig(MixerConfig):
    """Settings of mixed attention: attention heads, and as many convolution heads with span-based kernels.

    `heads` counts the attention heads only. Both kinds together have the encoder's width unless `head_width` is set.
    With ConvBERT's head ratio γ, `heads` is H // γ of its H heads.
    """

    kind: Literal["span_conv"] = "span_conv"
    kernel_size: Annotated[int, AfterValidator(conv.odd_kernel_size)] = 9
    """Kernel size of the convolution heads; odd."""
    kernel_from: Literal["span", "token", "fixed", "depthwise", "none"] = "span"
    """Source of the kernels: predicted from the span around the token or from the token alone (dynamic convolution), or
    learned weights per head (lightweight) or per channel (depthwise); "none" removes the convolution heads."""
    shares_value: bool = False
    """Use one value projection for both kinds of heads, as in the paper's formulas; the released models have two."""
    legacy_padding: bool = False
    """Let padding into the convolutions, as the released code and `transformers` do; only for comparisons with them."""
    sparse: SparseConfig | None = None
    """Sparse weights of the attention heads; None for the softmax."""

    @property
    def reads_memory(self) -> bool:
        return self.kernel_from == "none"

    def resolved_head_width(self, width: int) -> int:
        if self.head_width is None and width % (2 * self.heads):
            raise ValueError(f"width {width} is not a multiple of twice the heads {self.heads}; set head_width")
        return self.head_width or width // (2 * self.heads)

    def build(self, width: int) -> "SpanConv | FullAttention":
        heads, head_width, is_causal = self.heads, self.resolved_head_width(width), self.is_causal
        sparse = None if self.sparse is None else self.sparse.build(heads)
        if self.kernel_from == "none":
            return FullAttention(
                width, heads, head_width, head_width, dropout=self.dropout, is_causal=is_causal, sparse=sparse
            )
        options = {"is_causal": is_causal, "legacy_padding": self.legacy_padding}
        return SpanConv(
            width,
            heads,
            head_width,
            SpanKey(width, heads, head_width, self.kernel_size, **options)
            if self.kernel_from == "span"
            else TapSource(),
            KERNELS[self.kernel_from](heads, head_width, self.kernel_size, **options),
            has_own_value=not self.shares_value,
            dropout=self.dropout,
            is_causal=is_causal,
            sparse=sparse,
        )

    def flops(self, width: int, length: int) -> int:
        inner = self.heads * self.resolved_head_width(width)
        attending = width * 3 * inner + 2 * length * inner + inner * width
        if self.kernel_from == "none":
            return 2 * attending
        convolving = inner * self.kernel_size + inner * width + (0 if self.shares_value else width * inner)
        predicting = inner * self.heads * self.kernel_size if self.kernel_from in ("span", "token") else 0
        spanning = width * self.kernel_size + width * inner if self.kernel_from == "span" else 0
        return 2 * (attending + convolving + predicting + spanning)


class TapSource(nn.Module):
    """The vectors that kernels are predicted from: the queries."""

    def forward(self, query: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return the source vectors: (…, heads, head_width) -> (…, heads · head_width).

        Shape: hidden (…, width), the input of the mixer.
        """
        return query.flatten(-2)

    def start(self, batch: int) -> State:
        """Return the decoding state before the first token."""
        return ()

    def step(self, query: Tensor, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        """Return the source vectors of the next token, (batch, heads · head_width), and the new state."""
        return query.flatten(-2), state

    def absorb(self, hidden: Tensor, state: State) -> State:
        """Return the state after steps with some tokens, (batch, tokens, width), without their outputs."""
        return state

    def reorder(self, heads: Tensor) -> None:
        """Sort the heads in place by the given order."""

    def extract(self, heads: int) -> "TapSource":
        """Return a new module with the first heads only."""
        return copy.deepcopy(self)


class SpanKey(TapSource):
    """The query times the span key of its token (Jiang et al. 2020, section 3.2).

    The span key is a depthwise convolution of the hidden states, followed by a linear layer.
    """

    def __init__(
        self, width: int, heads: int, head_width: int, kernel_size: int, *, is_causal: bool, legacy_padding: bool
    ) -> None:
        super().__init__()
        self.is_causal, self.legacy_padding = is_causal, legacy_padding
        self.depthwise = nn.Parameter(torch.empty(width, kernel_size))  # over the whole width, so it never shrinks
        self.pointwise = ElasticLinear(width, heads * head_width, units_out=heads)

    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Initialise the depthwise kernel; init_std is for matrices only."""
        initialise_depthwise(self.depthwise, generator)

    def forward(self, query: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        options = {"is_causal": self.is_causal or context.is_causal, "legacy_padding": self.legacy_padding}
        spans = conv.depthwise(
            hidden,
            self.depthwise,
            context.layout,
            **options,
            backend=resolve_backend(conv.DEPTHWISE_BACKENDS, context.backend),
        )
        return query.flatten(-2) * self.pointwise(spans, WeightSlice(keep_out=context.keep_heads))

    def start(self, batch: int) -> State:
        width, kernel_size = self.depthwise.shape
        return (self.depthwise.new_zeros(batch, kernel_size - 1, width),)

    def step(self, query: Tensor, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        (window,) = append_token(state, [hidden])  # (batch, kernel_size, width)
        key = self.pointwise(conv.depthwise_step(window, self.depthwise), WeightSlice(keep_out=context.keep_heads))
        return query.flatten(-2) * key, (window[:, 1:],)

    def absorb(self, hidden: Tensor, state: State) -> State:
        (window,) = append_tokens(state, [hidden])
        return (window[:, hidden.shape[1] :],)

    def reorder(self, heads: Tensor) -> None:
        self.pointwise.reorder(units_out=heads)

    def extract(self, heads: int) -> "SpanKey":
        small = copy.deepcopy(self)
        small.pointwise = self.pointwise.extract(keep_out=heads)
        return small


class SpanConv(QueryKeyValueMixer):
    """One product for all projections, attention beside convolution, one output projection."""

    backends = (BACKENDS, conv.BACKENDS, conv.DEPTHWISE_BACKENDS)

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        span: TapSource,
        kernel: Kernel,
        *,
        has_own_value: bool,
        dropout: float,
        is_causal: bool,
        sparse: SparseWeights | None = None,
    ) -> None:
        biased = (True,) * (4 if has_own_value else 3)
        super().__init__(width, heads, head_width, head_width, dropout=dropout, is_causal=is_causal, biased=biased)
        self.span, self.kernel, self.has_own_value, self.sparse = span, kernel, has_own_value, sparse
        # the input has two parts with the same units: attention heads, then convolution heads
        self.output = ElasticLinear(2 * heads * head_width, width, units_in=heads, parts_in=2)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        self.refuse_memory(context)
        joint = self._joint(hidden, context)
        query, key, value, *_ = parts = joint.unbind(-3)
        attended = attention(
            query,
            key,
            value,
            context.layout,
            is_causal=self.is_causal or context.is_causal,
            sparse=self._sparse_map(context),
            dropout=self.dropout if self.training else 0.0,
            joint=joint[..., :3, :, :],
            backend=resolve_backend(BACKENDS, context.backend),
        )
        convolved = self.kernel.mix(parts[-1], self.span(query, hidden, context), context)
        return self._output(torch.cat([attended, convolved], dim=-2), context)

    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        query, key, *_ = self._project(hidden, context)
        is_causal = self.is_causal or context.is_causal
        return {
            "attention": attention_map(
                query, key, context.layout, is_causal=is_causal, sparse=self._sparse_map(context)
            ),
            self.kernel.map_name: self.kernel.map(self.span(query, hidden, context), context),
        }

    def scores(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return the scores of the attention heads."""
        query, key, *_ = self._project(hidden, context)
        return attention_scores(query, key, context.layout, is_causal=self.is_causal or context.is_causal)

    def start(self, context: ForwardContext) -> State:
        """Return no keys and values, and zeros for the kernel_size − 1 tokens before the first."""
        key, value = super().start(context)
        batch, _, *by_head = value.shape
        return key, value, value.new_zeros(batch, self.kernel.kernel_size - 1, *by_head), *self.span.start(batch)

    def step(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        if not (self.is_causal or context.is_causal):
            return super().step(hidden, state, context)
        query, (key, value, window), key_layout = self._look_back(hidden, state[:3], context)
        one = SequenceLayout.full(hidden.shape[0], 1)
        backend, sparse = resolve_backend(BACKENDS, context.backend), self._sparse_map(context)
        attended = attention(query, key, value, one, key_layout=key_layout, sparse=sparse, backend=backend)[:, 0]
        source, spans = self.span.step(query[:, 0], hidden, state[3:], context)
        convolved = self.kernel.step(window, source, context)
        mixed = self._output(torch.cat([attended, convolved], dim=-2), context)
        return mixed, (key, value, window[:, 1:], *spans)

    def absorb(self, hidden: Tensor, state: State, context: ForwardContext) -> State:
        if not (self.is_causal or context.is_causal):
            return super().absorb(hidden, state, context)
        parts = self._parts(hidden, context, KEY_AND_VALUE)
        convolved = parts[-1]  # the attention's values where both kinds of heads share them
        key, value, window = append_tokens(state[:3], (*parts[:2], convolved))
        return key, value, window[:, hidden.shape[1] :], *self.span.absorb(hidden, state[3:])

    def reorder(self, heads: Tensor) -> None:
        super().reorder(heads)
        self.span.reorder(heads)
        self.kernel.reorder(heads)

    def extract(self, cut: LayerCut) -> "SpanConv":
        small = super().extract(cut)
        small.span, small.kernel = self.span.extract(cut.heads), self.kernel.extract(cut.heads)
        return small

    def _project(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, ...]:
        """Return query, key, value and the convolution's value, each (…, heads, head_width)."""
        parts = super()._project(hidden, context)
        return parts if self.has_own_value else (*parts, parts[-1])
