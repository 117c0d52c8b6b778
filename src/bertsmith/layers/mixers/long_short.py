"""Long-short range attention (Wu et al. 2020, Lite Transformer): half of the channels attend, half are convolved.

docs/papers/lite.md says when not to choose it.
"""

from typing import Annotated, Literal

import torch
from pydantic import AfterValidator
from torch import Tensor

from bertsmith.layers.context import ForwardContext
from bertsmith.layers.linear import ElasticLinear
from bertsmith.layers.mixers.base import Mixer, MixerConfig, State
from bertsmith.layers.mixers.dynamic_conv import DynamicConv, DynamicConvConfig
from bertsmith.layers.mixers.full import FullAttention, FullConfig
from bertsmith.layers.mixers.sparse import SparseConfig
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.conv import odd_kernel_size


class LongShortConfig(MixerConfig):
    """Settings of long-short range attention: attention heads, and as many convolution heads.

    `heads` counts the attention heads only. By default the heads of each kind fill half of the encoder's width.
    """

    kind: Literal["long_short"] = "long_short"
    kernel_size: Annotated[int, AfterValidator(odd_kernel_size)] = 7
    """Kernel size of the convolution heads; odd."""
    kernel_from: Literal["token", "fixed", "depthwise"] = "token"
    """Source of the kernels: predicted from each token (dynamic convolution), or learned weights per head (lightweight)
    or per channel (depthwise)."""
    is_gated: bool = True
    """Project the input of the convolution with a gated linear unit instead of a linear layer."""
    sparse: SparseConfig | None = None
    """Sparse weights of the attention heads; None for the softmax."""

    def resolved_head_width(self, width: int) -> int:
        if self.head_width is None and width % (2 * self.heads):
            raise ValueError(f"width {width} is not a multiple of twice the heads {self.heads}; set head_width")
        return self.head_width or width // (2 * self.heads)

    def check(self, width: int) -> None:
        super().check(width)
        if width % 2:
            raise ValueError(f"width {width} is odd, but half of the channels attend; allowed: even widths")

    def build(self, width: int) -> "LongShort":
        attention, convolution = self._halves(width)
        return LongShort(attention.build(width // 2), convolution.build(width // 2))

    def flops(self, width: int, length: int) -> int:
        return sum(half.flops(width // 2, length) for half in self._halves(width))

    def _halves(self, width: int) -> tuple[FullConfig, DynamicConvConfig]:
        """Return the settings of the attention and of the convolution, each over half of the channels."""
        heads, head_width, dropout = self.heads, self.resolved_head_width(width), self.dropout
        attention = FullConfig(
            heads=heads, head_width=head_width, dropout=dropout, is_causal=self.is_causal, sparse=self.sparse
        )
        convolution = DynamicConvConfig(
            heads=heads,
            head_width=head_width,
            dropout=dropout,
            is_causal=self.is_causal,
            kernel_size=self.kernel_size,
            kernel_from=self.kernel_from,
            is_gated=self.is_gated,
        )
        return attention, convolution


class LongShort(Mixer):
    """Attention on the first half of the channels beside a convolution on the second half.

    The halves never mix here: each reads and writes its own channels, and only the feed-forward combines them. Head h
    is the h-th attention head together with the h-th convolution head.
    """

    backends = (*FullAttention.backends, *DynamicConv.backends)

    def __init__(self, attention: FullAttention, convolution: DynamicConv) -> None:
        super().__init__()
        self.heads = attention.heads
        self.attention, self.convolution = attention, convolution

    @property
    def outputs(self) -> tuple[ElasticLinear, ...]:
        return *self.attention.outputs, *self.convolution.outputs

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        self.refuse_memory(context)
        far, near = hidden.chunk(2, dim=-1)  # (…, width) -> two of (…, width / 2)
        return torch.cat([self.attention(far, context), self.convolution(near, context)], dim=-1)

    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        far, near = hidden.chunk(2, dim=-1)
        return {**self.attention.maps(far, context), **self.convolution.maps(near, context)}

    def projections(self, hidden: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of the attention heads."""
        return self.attention.projections(hidden.chunk(2, dim=-1)[0], context)

    def scores(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return the scores of the attention heads."""
        return self.attention.scores(hidden.chunk(2, dim=-1)[0], context)

    def start(self, context: ForwardContext) -> State:
        """Return no keys and values, and zeros for the kernel_size − 1 tokens before the first."""
        return *self.attention.start(context), *self.convolution.start(context)

    def step(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        if not (self.attention.is_causal or context.is_causal):
            return super().step(hidden, state, context)
        far, near = hidden.chunk(2, dim=-1)  # (batch, width) -> two of (batch, width / 2)
        attended, keys_and_values = self.attention.step(far, state[:2], context)
        convolved, window = self.convolution.step(near, state[2:], context)
        return torch.cat([attended, convolved], dim=-1), (*keys_and_values, *window)

    def reorder(self, heads: Tensor) -> None:
        self.attention.reorder(heads)
        self.convolution.reorder(heads)

    def extract(self, cut: LayerCut) -> "LongShort":
        return LongShort(self.attention.extract(cut), self.convolution.extract(cut))
