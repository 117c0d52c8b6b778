"""ConvBERT's mixed attention (Jiang et al. 2020): attention heads beside as many convolution heads.

docs/convbert.md draws it and says where paper, released code and `transformers` differ.
"""

from dataclasses import replace
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

KernelSource = Literal["span", "token", "fixed", "depthwise", "none"]
_KERNEL_KINDS = {"span": "predicted", "token": "predicted", "fixed": "fixed", "depthwise": "depthwise"}


class SpanConvConfig(MixerConfig):
    """Some heads attend to the whole sequence; as many convolve with taps made from the span around a token."""

    kind: Literal["span_conv"] = "span_conv"
    heads: int = Field(gt=0)
    """Attention heads, and as many convolution heads. ConvBERT's head ratio γ is data here: H // γ of its H heads."""
    head_width: int | None = Field(default=None, gt=0)
    """Width of one head; None for width / (2 · heads), so that both kinds together fill the width."""
    taps: Annotated[int, AfterValidator(conv.odd_taps)] = 9
    """Places a convolution head takes from, the token's own counted in; odd."""
    kernel_from: KernelSource = "span"
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
        head_width, options = self._head_width(width), self._options()
        kind = _KERNEL_KINDS.get(self.kernel_from)
        kernel = None if kind is None else KERNELS[kind](self.heads, head_width, self.taps, **options)
        span = SpanKey(width, self.heads, head_width, self.taps, **options) if self.kernel_from == "span" else None
        has_own_value = kernel is not None and not self.shares_value
        mixer = SpanConv(width, self.heads, head_width, span, kernel, has_own_value=has_own_value)
        mixer.dropout, mixer.is_causal = self.dropout, self.is_causal
        return mixer

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

    def _options(self) -> dict[str, bool]:
        return {"is_causal": self.is_causal, "legacy_padding": self.legacy_padding}

    def _head_width(self, width: int) -> int:
        if self.head_width is None and width % (2 * self.heads):
            raise ValueError(f"width {width} is not a multiple of twice the heads {self.heads}; give head_width")
        return self.head_width or width // (2 * self.heads)
