"""Kernels of convolution mixers: learned, the same for all tokens, or predicted from a vector of each token."""

import copy
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

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
from bertsmith.ops.dispatch import resolve_backend

_ALIGNMENT = 8  # numbers of 2 bytes in 16 bytes


class Kernel(nn.Module, ABC):
    """The convolution kernel of every head, and the convolution with it.

    `source` holds the vector of each token that its kernel is predicted from, (…, heads · head_width). `table` has one
    unit per head. `dropout` is applied to the tap weights; `has_bias` applies to predicted kernels.
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
        """Return the weighted sum of each token's neighbours.

        Shape: value and result (…, heads, head_width).
        """

    @abstractmethod
    def step(self, window: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        """Return `mix` at the last token: (batch, kernel_size, heads, head_width) -> (batch, heads, head_width)."""

    @abstractmethod
    def weights(self, source: Tensor, context: ForwardContext) -> Tensor:
        """Return the tap weights: (heads, kernel_size), or (…, heads, kernel_size) where tokens differ."""

    def map(self, source: Tensor, context: ForwardContext) -> Tensor:
        """Return the tap weights as a band matrix, (batch, heads, max_length, max_length)."""
        return kernel_map(self.weights(source, context), context.layout, **self._options(context))

    def reorder(self, heads: Tensor) -> None:
        """Sort the heads in place by the given order."""
        self.table.reorder(units_in=None if self.table.units_in is None else heads, units_out=heads)

    def extract(self, heads: int) -> "Kernel":
        """Return a new kernel with the first heads only."""
        small = copy.deepcopy(self)
        small.table = self.table.extract(keep_in=None if self.table.units_in is None else heads, keep_out=heads)
        return small

    def _options(self, context: ForwardContext) -> dict[str, bool]:
        return {"is_causal": self.is_causal or context.is_causal, "legacy_padding": self.legacy_padding}


class SoftmaxKernel(Kernel):
    """Kernels whose tap weights are a softmax over scores, one kernel per head."""

    @abstractmethod
    def scores(self, source: Tensor, context: ForwardContext) -> Tensor:
        """Return the scores before the softmax: (heads, kernel_size) or (…, heads, kernel_size)."""

    def mix(self, value: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        scores, dropout = self.scores(source, context), self.dropout if self.training else 0.0
        backend = resolve_backend(BACKENDS, context.backend)
        return light_conv(value, scores, context.layout, **self._options(context), dropout=dropout, backend=backend)

    def step(self, window: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        return light_conv_step(window, self.scores(source, context))

    def weights(self, source: Tensor, context: ForwardContext) -> Tensor:
        return tap_weights(self.scores(source, context))


class FixedKernel(SoftmaxKernel):
    """Learned scores: lightweight convolution (Wu et al. 2019, section 3)."""

    def _make_table(self, heads: int, has_bias: bool) -> ElasticLinear:
        return ElasticLinear(self.kernel_size, heads, units_out=heads, bias=False)

    def scores(self, source: Tensor, context: ForwardContext) -> Tensor:
        return self.table.prefix(None, context.keep_heads)[0]


class PredictedKernel(SoftmaxKernel):
    """Scores as a linear function of the source: dynamic convolution (Wu et al. 2019, section 4)."""

    def _make_table(self, heads: int, has_bias: bool) -> ElasticLinear:
        inner = heads * self.head_width
        return ElasticLinear(inner, heads * self.kernel_size, units_in=heads, units_out=heads, bias=has_bias)

    def scores(self, source: Tensor, context: ForwardContext) -> Tensor:
        if source.is_cuda and type(self.table) is ElasticLinear:
            scores = _aligned_product(source, *self.table.prefix(context.keep_heads, context.keep_heads))
        else:
            scores = self.table(source, WeightSlice(context.keep_heads, context.keep_heads))
        return scores.unflatten(-1, (-1, self.kernel_size))  # (…, heads · kernel_size) -> (…, heads, kernel_size)


def _aligned_product(source: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear function of the source, with rows whose size is a multiple of 16 bytes in half precision.

    Heads times kernel size is 18 in a small model and 54 in a base one. Rows of that size exclude the fast matrix
    products on a GPU, above all from the two products of the backward pass.
    """
    outputs = weight.shape[0]
    padding = -outputs % _ALIGNMENT
    weight = pad(weight, (0, 0, 0, padding))
    return linear(source, weight, None if bias is None else pad(bias, (0, padding)))[..., :outputs]


class DepthwiseKernel(Kernel):
    """Learned weights per channel, without a softmax."""

    map_name: ClassVar[str] = "depthwise_convolution"

    def _make_table(self, heads: int, has_bias: bool) -> ElasticLinear:
        return ElasticLinear(self.kernel_size, heads * self.head_width, units_out=heads, bias=False)

    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Initialise the kernel; init_std is for matrices only."""
        initialise_depthwise(self.table.weight, generator)

    def mix(self, value: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        kernel = torch.dropout(self._kernel(context), self.dropout, train=self.training)
        backend = resolve_backend(DEPTHWISE_BACKENDS, context.backend)
        mixed = depthwise(value.flatten(-2), kernel, context.layout, **self._options(context), backend=backend)
        return mixed.unflatten(-1, (-1, self.head_width))  # (…, heads · head_width) -> (…, heads, head_width)

    def step(self, window: Tensor, source: Tensor, context: ForwardContext) -> Tensor:
        mixed = depthwise_step(window.flatten(-2), self._kernel(context))
        return mixed.unflatten(-1, (-1, self.head_width))  # (batch, heads · head_width) -> (batch, heads, head_width)

    def weights(self, source: Tensor, context: ForwardContext) -> Tensor:
        """Return the mean over the channels of each head, (heads, kernel_size)."""
        return self._kernel(context).unflatten(0, (-1, self.head_width)).mean(1)

    def _kernel(self, context: ForwardContext) -> Tensor:
        return self.table.prefix(None, context.keep_heads)[0]  # (heads · head_width, kernel_size)


KERNELS: dict[str, type[Kernel]] = {
    "span": PredictedKernel,
    "token": PredictedKernel,
    "fixed": FixedKernel,
    "depthwise": DepthwiseKernel,
}
"""The kernels by the setting `kernel_from`."""


@torch.no_grad()
def initialise_depthwise(kernel: Tensor, generator: torch.Generator | None) -> None:
    """Initialise a depthwise kernel, (channels, kernel_size), with std 1 / kernel_size as in ConvBERT's code."""
    init_std = 1 / kernel.shape[-1]
    nn.init.trunc_normal_(kernel, std=init_std, a=-2 * init_std, b=2 * init_std, generator=generator)
