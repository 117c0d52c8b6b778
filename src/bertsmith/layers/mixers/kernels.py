"""Where a convolution mixer has its taps from: the same for all tokens, or made from a vector of each token."""

import copy
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from bertsmith.layers.context import ForwardContext
from bertsmith.layers.linear import ElasticLinear, WeightSlice
from bertsmith.ops.conv import (
    BACKENDS,
    DEPTHWISE_BACKENDS,
    depthwise,
    depthwise_step,
    kernel_map,
    light_conv,
    light_conv_step,
    tap_weights,
)
from bertsmith.ops.dispatch import own_backend


class Kernel(nn.Module, ABC):
    """The taps of every head, and the convolution by them.

    `source` is the vector of each token that its taps may be made from, (…, heads · head_width). `table` has a unit for
    every head. `dropout` falls on the tap weights; `has_bias` is for kinds that predict.
    """

    map_name: ClassVar[str] = "convolution"

    def __init__(
        self,
        heads: int,
        head_width: int,
        kernel_size: int,
        *,
        is_causal: bool = False,
        legacy_padding: bool = False,
        dropout: float = 0.0,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        self.head_width, self.kernel_size = head_width, kernel_size
        self.is_causal, self.legacy_padding, self.dropout = is_causal, legacy_padding, dropout
        self.table = self._make_table(heads, has_bias)

    @abstractmethod
    def _make_table(self, heads: int, has_bias: bool) -> ElasticLinear: ...

    @abstractmethod
    def mix(self, value: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        """The values of each token's neighbours, weighted by its taps.

        Shape: value (…, heads, head_width), and so is what comes back.
        """

    @abstractmethod
    def step(self, window: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        """`mix` at the last of (batch, taps, heads, head_width) values: (batch, heads, head_width)."""

    @abstractmethod
    def weights(self, source: Tensor, context: ForwardContext) -> Tensor:
        """What each tap counts: (heads, taps), or (…, heads, taps) where tokens differ."""

    def map(self, source: Tensor, context: ForwardContext) -> Tensor:
        """The taps as a banded matrix, (batch, heads, longest, longest)."""
        return kernel_map(self.weights(source, context), context.layout, **self._options(context))

    def reorder(self, heads: Tensor) -> None:
        """Puts the heads in the given order."""
        self.table.reorder(units_in=None if self.table.units_in is None else heads, units_out=heads)

    def extract(self, heads: int) -> "Kernel":
        """A kernel of its own with the first heads only."""
        small = copy.deepcopy(self)
        small.table = self.table.extract(keep_in=None if self.table.units_in is None else heads, keep_out=heads)
        return small

    def _options(self, context: ForwardContext) -> dict[str, bool]:
        return {"is_causal": self.is_causal or context.is_causal, "legacy_padding": self.legacy_padding}


class SoftmaxKernel(Kernel):
    """Taps that are a softmax over scores, one kernel per head."""

    @abstractmethod
    def scores(self, source: Tensor, context: ForwardContext) -> Tensor:
        """What the softmax is taken of: (heads, taps) or (…, heads, taps)."""

    def mix(self, value: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        scores, dropout = self.scores(source, context), self.dropout if self.training else 0.0
        backend = own_backend(BACKENDS, context.backend)
        return light_conv(value, scores, context.layout, **self._options(context), dropout=dropout, backend=backend)

    def step(self, window: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        return light_conv_step(window, self.scores(source, context))

    def weights(self, source: Tensor, context: ForwardContext) -> Tensor:
        return tap_weights(self.scores(source, context))


class FixedKernel(SoftmaxKernel):
    """The scores are weights: light-weight convolution (Wu et al. 2019, section 3)."""

    def _make_table(self, heads: int, has_bias: bool) -> ElasticLinear:
        return ElasticLinear(self.kernel_size, heads, units_out=heads, bias=False)

    def scores(self, source: Tensor, context: ForwardContext) -> Tensor:
        return self.table.prefix(None, context.keep_heads)[0]


class PredictedKernel(SoftmaxKernel):
    """The scores are a linear function of the source: dynamic convolution (Wu et al. 2019, section 4)."""

    def _make_table(self, heads: int, has_bias: bool) -> ElasticLinear:
        inner = heads * self.head_width
        return ElasticLinear(inner, heads * self.kernel_size, units_in=heads, units_out=heads, bias=has_bias)

    def scores(self, source: Tensor, context: ForwardContext) -> Tensor:
        scores = self.table(source, WeightSlice(context.keep_heads, context.keep_heads))
        return scores.unflatten(-1, (-1, self.kernel_size))  # (…, heads · taps) -> (…, heads, taps)


class DepthwiseKernel(Kernel):
    """Free weights for every channel, without a softmax."""

    map_name: ClassVar[str] = "depthwise_convolution"

    def _make_table(self, heads: int, has_bias: bool) -> ElasticLinear:
        return ElasticLinear(self.kernel_size, heads * self.head_width, units_out=heads, bias=False)

    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Fresh weights; the model's deviation is for matrices."""
        initialise_depthwise(self.table.weight, generator)

    def mix(self, value: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        kernel = torch.dropout(self._kernel(context), self.dropout, train=self.training)
        backend = own_backend(DEPTHWISE_BACKENDS, context.backend)
        mixed = depthwise(value.flatten(-2), kernel, context.layout, **self._options(context), backend=backend)
        return mixed.unflatten(-1, (-1, self.head_width))  # (…, heads · head_width) -> (…, heads, head_width)

    def step(self, window: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        mixed = depthwise_step(window.flatten(-2), self._kernel(context))
        return mixed.unflatten(-1, (-1, self.head_width))  # (batch, heads · head_width) -> (batch, heads, head_width)

    def weights(self, source: Tensor, context: ForwardContext) -> Tensor:
        """The mean over the channels of each head: (heads, taps)."""
        return self._kernel(context).unflatten(0, (-1, self.head_width)).mean(1)

    def _kernel(self, context: ForwardContext) -> Tensor:
        return self.table.prefix(None, context.keep_heads)[0]  # (heads · head_width, taps)


KERNELS: dict[str, type[Kernel]] = {
    "span": PredictedKernel,
    "token": PredictedKernel,
    "fixed": FixedKernel,
    "depthwise": DepthwiseKernel,
}
"""The kernels by what makes their taps, as `kernel_from` says."""


@torch.no_grad()
def initialise_depthwise(kernel: Tensor, generator: torch.Generator | None) -> None:
    """Sets a depthwise kernel (channels, taps) to fresh weights, of deviation 1/taps as in ConvBERT's code."""
    init_std = 1 / kernel.shape[-1]
    nn.init.trunc_normal_(kernel, std=init_std, a=-2 * init_std, b=2 * init_std, generator=generator)
