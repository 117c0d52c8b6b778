"""Lightweight and dynamic convolution (Wu et al. 2019): a short kernel per head instead of attention."""

from typing import Annotated, Literal

from pydantic import AfterValidator
from torch import Tensor
from torch.nn.functional import glu

from bertsmith.layers.context import ForwardContext
from bertsmith.layers.linear import ElasticLinear, WeightSlice
from bertsmith.layers.mixers.base import Mixer, MixerConfig, State, append_token, append_tokens
from bertsmith.layers.mixers.kernels import KERNELS, Kernel
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.conv import BACKENDS, DEPTHWISE_BACKENDS, odd_kernel_size


class DynamicConvConfig(MixerConfig):
    """Settings of a lightweight, dynamic or depthwise convolution mixer."""

    kind: Literal["dynamic_conv"] = "dynamic_conv"
    kernel_size: Annotated[int, AfterValidator(odd_kernel_size)] = 7
    """Kernel size; odd."""
    kernel_from: Literal["token", "fixed", "depthwise"] = "token"
    """Source of the kernels: predicted from each token (dynamic convolution), or learned weights per head (lightweight)
    or per channel (depthwise)."""
    is_gated: bool = True
    """Project the input of the convolution with a gated linear unit instead of a linear layer."""

    def build(self, width: int) -> "DynamicConv":
        kernel = KERNELS[self.kernel_from](
            self.heads,
            self.resolved_head_width(width),
            self.kernel_size,
            is_causal=self.is_causal,
            dropout=self.dropout,
            has_bias=False,  # as in the paper
        )
        return DynamicConv(width, self.heads, self.resolved_head_width(width), kernel, is_gated=self.is_gated)

    def flops(self, width: int, length: int) -> int:
        inner = self.heads * self.resolved_head_width(width)
        predicting = inner * self.heads * self.kernel_size if self.kernel_from == "token" else 0
        return 2 * (width * inner * (3 if self.is_gated else 2) + predicting + inner * self.kernel_size)


class DynamicConv(Mixer):
    """linear → gate → convolution → linear."""

    backends = (BACKENDS, DEPTHWISE_BACKENDS)

    def __init__(self, width: int, heads: int, head_width: int, kernel: Kernel, *, is_gated: bool) -> None:
        super().__init__()
        self.heads, self.head_width, self.is_gated = heads, head_width, is_gated
        parts = 2 if is_gated else 1
        self.project = ElasticLinear(width, parts * heads * head_width, units_out=heads, parts=parts)
        self.kernel = kernel
        self.output = ElasticLinear(heads * head_width, width, units_in=heads)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        self.refuse_memory(context)
        inner = self._project(hidden, context)
        mixed = self.kernel.mix(self._by_head(inner), inner, context)
        return self._output(mixed, context)

    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        return {self.kernel.map_name: self.kernel.map(self._project(hidden, context), context)}

    def start(self, context: ForwardContext) -> State:
        """Return zeros for the kernel_size − 1 tokens before the first."""
        heads = context.keep_heads or self.heads
        before = self.output.new_zeros(context.layout.batch, self.kernel.kernel_size - 1, heads, self.head_width)
        return (before,)

    def step(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        if not (self.kernel.is_causal or context.is_causal):
            return super().step(hidden, state, context)
        inner = self._project(hidden, context)
        (window,) = append_token(state, [self._by_head(inner)])  # (batch, kernel_size, heads, head_width)
        mixed = self.kernel.step(window, inner, context)
        return self._output(mixed, context), (window[:, 1:],)

    def absorb(self, hidden: Tensor, state: State, context: ForwardContext) -> State:
        if not (self.kernel.is_causal or context.is_causal):
            return super().absorb(hidden, state, context)
        (window,) = append_tokens(state, [self._by_head(self._project(hidden, context))])
        return (window[:, hidden.shape[1] :],)

    def _output(self, mixed: Tensor, context: ForwardContext) -> Tensor:
        mixed = mixed.flatten(-2)  # (…, heads, head_width) -> (…, heads · head_width)
        return self.output(mixed, WeightSlice(keep_in=context.keep_heads, gate=context.head_gate))

    def reorder(self, heads: Tensor) -> None:
        self.project.reorder(units_out=heads)
        self.kernel.reorder(heads)
        self.output.reorder(units_in=heads)

    def extract(self, cut: LayerCut) -> "DynamicConv":
        kernel = self.kernel.extract(cut.heads)
        small = DynamicConv(self.project.inputs, cut.heads, self.head_width, kernel, is_gated=self.is_gated)
        small.project = self.project.extract(keep_out=cut.heads)
        small.output = self.output.extract(keep_in=cut.heads)
        return small

    def _project(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return the input of the convolution, (…, heads · head_width)."""
        projected = self.project(hidden, WeightSlice(keep_out=context.keep_heads))
        return glu(projected) if self.is_gated else projected

    def _by_head(self, inner: Tensor) -> Tensor:
        return inner.unflatten(-1, (-1, self.head_width))  # (…, heads · head_width) -> (…, heads, head_width)
