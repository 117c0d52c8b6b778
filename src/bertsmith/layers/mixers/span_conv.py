"""ConvBERT's mixed attention (Jiang et al. 2020): attention heads beside as many convolution heads.

docs/convbert.md draws it and says where paper, released code and `transformers` differ.
"""

import copy
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from bertsmith.batches.layout import SequenceLayout
from bertsmith.layers.call import ForwardPass
from bertsmith.layers.elastic import ElasticLinear
from bertsmith.layers.mixers.base import Mixer, MixerConfig, State
from bertsmith.layers.mixers.kernels import KERNELS, Kernel, initialise_depthwise
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops import conv
from bertsmith.ops.attention import attention, attention_map

_KERNEL_KINDS = {
    "span": "predicted",
    "token": "predicted",
    "fixed": "fixed",
    "depthwise": "depthwise",
    "none": None,
}


class SpanConvConfig(MixerConfig):
    """Some heads attend to the whole sequence; as many convolve with taps made from the span around a token."""

    kind: Literal["span_conv"] = "span_conv"
    heads: int = Field(gt=0)
    """Attention heads, and as many convolution heads. ConvBERT's head ratio γ is data here: H // γ of its H heads."""
    head_width: int | None = Field(default=None, gt=0)
    """Width of one head; None for width / (2 · heads), so that both kinds together fill the width."""
    taps: Annotated[int, AfterValidator(conv.odd_taps)] = 9
    """Places a convolution head takes from, the token's own counted in; odd."""
    kernel_from: Literal["span", "token", "fixed", "depthwise", "none"] = "span"
    """What makes the taps: the span around the token, the token alone (dynamic convolution), nothing but weights per
    head (light-weight) or per channel (depthwise); "none" leaves the convolution heads out."""
    shares_value: bool = False
    """Both kinds of heads take the same values, as in the paper's formulas; the released models have two."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """On the attention probabilities."""
    is_causal: bool = False
    """A token takes only from itself and what stands before it."""
    legacy_padding: bool = False
    """Let pads into the convolutions, as the released code and `transformers` do: for comparisons with them only."""

    def check(self, width: int) -> None:
        self._head_width(width)

    def build(self, width: int) -> "SpanConv":
        head_width = self._head_width(width)
        options = {"is_causal": self.is_causal, "legacy_padding": self.legacy_padding}
        span = SpanKey(width, self.heads, head_width, self.taps, **options) if self.kernel_from == "span" else None
        kind = _KERNEL_KINDS[self.kernel_from]
        kernel = None if kind is None else KERNELS[kind](self.heads, head_width, self.taps, **options)
        return SpanConv(
            width,
            self.heads,
            head_width,
            span,
            kernel,
            has_own_value=kernel is not None and not self.shares_value,
            dropout=self.dropout,
            is_causal=self.is_causal,
        )

    def cut(self, cut: LayerCut, width: int) -> "SpanConvConfig":
        return self.model_copy(update={"heads": cut.heads, "head_width": self._head_width(width)})

    def flops(self, width: int, length: int) -> int:
        inner = self.heads * self._head_width(width)
        attending = width * 3 * inner + 2 * length * inner + inner * width
        if self.kernel_from == "none":
            return 2 * attending
        convolving = inner * self.taps + inner * width + (0 if self.shares_value else width * inner)
        predicting = inner * self.heads * self.taps if self.kernel_from in ("span", "token") else 0
        spanning = width * self.taps + width * inner if self.kernel_from == "span" else 0
        return 2 * (attending + convolving + predicting + spanning)

    def _head_width(self, width: int) -> int:
        if self.head_width is None and width % (2 * self.heads):
            raise ValueError(f"width {width} is not a multiple of twice the heads {self.heads}; give head_width")
        return self.head_width or width // (2 * self.heads)


class SpanKey(nn.Module):
    """A key that knows the span around its token: a depthwise convolution of the states, then a linear layer."""

    def __init__(
        self, width: int, heads: int, head_width: int, taps: int, *, is_causal: bool, legacy_padding: bool
    ) -> None:
        super().__init__()
        self.is_causal, self.legacy_padding = is_causal, legacy_padding
        self.depthwise = nn.Parameter(torch.empty(width, taps))  # over the whole width, so it never shrinks
        self.pointwise = ElasticLinear(width, heads * head_width, units_out=heads)

    def initialise(self, deviation: float, generator: torch.Generator | None) -> None:
        """Fresh weights of the depthwise kernel; the model's deviation is for matrices."""
        initialise_depthwise(self.depthwise, generator)

    def forward(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        """The span keys: (…, width) -> (…, heads · head_width)."""
        options = {"is_causal": self.is_causal, "legacy_padding": self.legacy_padding}
        spans = conv.depthwise(hidden, self.depthwise, call.layout, **options, backend=call.backend)
        return self.pointwise(spans, keep_out=call.keep_heads)

    def step(self, window: Tensor, call: ForwardPass) -> Tensor:
        """The span keys of the last of (batch, taps, width) states: (batch, heads · head_width)."""
        return self.pointwise(conv.depthwise_step(window, self.depthwise), keep_out=call.keep_heads)

    def extract(self, heads: int) -> "SpanKey":
        """A part of its own with the first heads only."""
        small = copy.deepcopy(self)
        small.pointwise = self.pointwise.extract(keep_out=heads)
        return small


class SpanConv(Mixer):
    """One matrix product for all projections, attention and convolution side by side, one output projection."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        span: SpanKey | None,
        kernel: Kernel | None,
        *,
        has_own_value: bool,
        dropout: float,
        is_causal: bool,
    ) -> None:
        super().__init__()
        self.heads, self.head_width, self.has_own_value = heads, head_width, has_own_value
        self.dropout, self.is_causal = dropout, is_causal
        inner, parts, branches = heads * head_width, 4 if has_own_value else 3, 1 if kernel is None else 2
        self.project = ElasticLinear(width, parts * inner, units_out=heads, parts=parts)
        self.span, self.kernel = span, kernel
        # attention heads stand first, then convolution heads: two stretches of the input, cut alike
        self.output = ElasticLinear(branches * inner, width, units_in=heads, parts_in=branches)

    def forward(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        self.refuse_memory(call)
        query, key, value, *own = self._project(hidden, call)
        mixed = attention(
            query,
            key,
            value,
            call.layout,
            is_causal=self.is_causal,
            dropout=self.dropout if self.training else 0.0,
            backend=call.backend,
        )
        if self.kernel is None:
            return self._output(call, mixed)
        source = self._source(query, None if self.span is None else self.span(hidden, call))
        return self._output(call, mixed, self.kernel.mix(own[0] if own else value, source, call))

    def maps(self, hidden: Tensor, call: ForwardPass) -> dict[str, Tensor]:
        query, key, *_ = self._project(hidden, call)
        maps = {"attention": attention_map(query, key, call.layout, is_causal=self.is_causal)}
        if self.kernel is not None:
            source = self._source(query, None if self.span is None else self.span(hidden, call))
            maps[self.kernel.map_name] = self.kernel.map(source, call)
        return maps

    def start(self, call: ForwardPass) -> State:
        """No keys and values yet; zeros for the states and values of the taps − 1 tokens before the first."""
        new, batch, heads = self.output.weight.new_zeros, call.layout.batch, call.keep_heads or self.heads
        cache = new(batch, 0, heads, self.head_width)
        if self.kernel is None:
            return cache, cache
        before = self.kernel.taps - 1
        spans = () if self.span is None else (new(batch, before, self.project.inputs),)
        return cache, cache, new(batch, before, heads, self.head_width), *spans

    def step(self, hidden: Tensor, state: State, call: ForwardPass) -> tuple[Tensor, State]:
        if not self.is_causal:
            return super().step(hidden, state, call)
        query, key, value, *own = self._project(hidden, call)
        news = [key, value] if self.kernel is None else [key, value, own[0] if own else value]
        news += [] if self.span is None else [hidden]
        keys, values, *windows = (torch.cat([old, new[:, None]], dim=1) for old, new in zip(state, news, strict=True))
        one, seen = SequenceLayout.full(hidden.shape[0], 1), SequenceLayout.full(*keys.shape[:2])
        mixed = attention(query[:, None], keys, values, one, key_layout=seen, backend=call.backend)[:, 0]
        state = (keys, values, *(window[:, 1:] for window in windows))
        if self.kernel is None:
            return self._output(call, mixed), state
        source = self._source(query, None if self.span is None else self.span.step(windows[1], call))
        return self._output(call, mixed, self.kernel.step(windows[0], source, call)), state

    def reorder(self, heads: Tensor) -> None:
        self.project.reorder(units_out=heads)
        if self.span is not None:
            self.span.pointwise.reorder(units_out=heads)
        if self.kernel is not None:
            self.kernel.reorder(heads)
        self.output.reorder(units_in=heads)

    def extract(self, cut: LayerCut) -> "SpanConv":
        small = SpanConv(
            self.project.inputs,
            cut.heads,
            self.head_width,
            None if self.span is None else self.span.extract(cut.heads),
            None if self.kernel is None else self.kernel.extract(cut.heads),
            has_own_value=self.has_own_value,
            dropout=self.dropout,
            is_causal=self.is_causal,
        )
        small.project = self.project.extract(keep_out=cut.heads)
        small.output = self.output.extract(keep_in=cut.heads)
        return small

    def _project(self, hidden: Tensor, call: ForwardPass) -> tuple[Tensor, ...]:
        """Query, key, value and, if it has its own, the convolution's value: each (…, heads, head_width)."""
        projected = self.project(hidden, keep_out=call.keep_heads)
        # (…, parts · heads · head_width) -> parts of (…, heads, head_width)
        return projected.unflatten(-1, (self.project.parts, -1, self.head_width)).unbind(-3)

    def _source(self, query: Tensor, span_key: Tensor | None) -> Tensor:
        """What the taps are made from: the token's query, times its span key (Jiang et al. 2020, section 3.2)."""
        query = query.flatten(-2)  # (…, heads, head_width) -> (…, heads · head_width)
        return query if span_key is None else query * span_key

    def _output(self, call: ForwardPass, *mixed: Tensor) -> Tensor:
        together = torch.cat(mixed, dim=-2).flatten(-2)  # branches of (…, heads, head_width) -> (…, branches · inner)
        return self.output(together, keep_in=call.keep_heads)
