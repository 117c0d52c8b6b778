"""Where a convolution mixer has its taps from: the same for all tokens, or made from a vector of each token."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bertsmith.layers.call import ForwardPass
from bertsmith.layers.elastic import ElasticLinear
from bertsmith.ops.conv import depthwise, depthwise_step, kernel_map, light_conv, light_conv_step, tap_weights


class Kernel(nn.Module, ABC):
    """The taps of every head, and the convolution by them.

    `source` is the vector of each token that a kernel may be made from, (…, heads · head_width).
    Shape: value (…, heads, head_width), and so is what comes back.
    """

    def __init__(
        self, taps: int, *, is_causal: bool = False, legacy_padding: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.taps = taps
        self.is_causal, self.legacy_padding, self.dropout = is_causal, legacy_padding, dropout

    table: ElasticLinear
    """The weights, with a unit for every head."""

    @abstractmethod
    def mix(self, value: Tensor, source: Tensor, call: ForwardPass) -> Tensor:
        """The values of each token's neighbours, weighted by its taps."""

    @abstractmethod
    def step(self, window: Tensor, source: Tensor, call: ForwardPass) -> Tensor:
        """`mix` at the last place of (batch, taps, heads, head_width) values: (batch, heads, head_width)."""

    @abstractmethod
    def weights(self, source: Tensor, call: ForwardPass) -> Tensor:
        """What each tap counts: (heads, taps), or (…, heads, taps) where tokens differ."""

    @abstractmethod
    def reorder(self, heads: Tensor) -> None:
        """Puts the heads in the given order."""

    @abstractmethod
    def keep(self, heads: int) -> None:
        """Drops all heads but the first, for good."""

    def map(self, source: Tensor, call: ForwardPass) -> Tensor:
        """The taps as (batch, heads, longest, longest)."""
        weights = self.weights(source, call)
        return kernel_map(weights, call.layout, is_causal=self.is_causal, legacy_padding=self.legacy_padding)

    def _options(self) -> dict[str, bool]:
        return {"is_causal": self.is_causal, "legacy_padding": self.legacy_padding}


class SoftmaxKernel(Kernel):
    """Taps that are a softmax over scores, one kernel per head."""

    @abstractmethod
    def scores(self, source: Tensor, call: ForwardPass) -> Tensor:
        """What the softmax is taken of: (heads, taps) or (…, heads, taps)."""

    def mix(self, value: Tensor, source: Tensor, call: ForwardPass) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        scores = self.scores(source, call)
        return light_conv(value, scores, call.layout, **self._options(), dropout=dropout, backend=call.backend)

    def step(self, window: Tensor, source: Tensor, call: ForwardPass) -> Tensor:
        return light_conv_step(window, self.scores(source, call))

    def weights(self, source: Tensor, call: ForwardPass) -> Tensor:
        return tap_weights(self.scores(source, call))


class FixedKernel(SoftmaxKernel):
    """The scores are weights: light-weight convolution (Wu et al. 2019, section 3)."""

    def __init__(self, heads: int, head_width: int, taps: int, **options: bool | float) -> None:
        super().__init__(taps, **options)  # type: ignore[arg-type]
        self.table = ElasticLinear(taps, heads, units_out=heads, bias=False)

    def scores(self, source: Tensor, call: ForwardPass) -> Tensor:
        return self.table.prefix(None, call.keep_heads)[0]

    def reorder(self, heads: Tensor) -> None:
        self.table.reorder(units_out=heads)

    def keep(self, heads: int) -> None:
        self.table = self.table.extract(keep_out=heads)


class PredictedKernel(SoftmaxKernel):
    """The scores are a linear function of the source: dynamic convolution (Wu et al. 2019, section 4)."""

    def __init__(self, heads: int, head_width: int, taps: int, **options: bool | float) -> None:
        super().__init__(taps, **options)  # type: ignore[arg-type]
        self.table = ElasticLinear(heads * head_width, heads * taps, units_in=heads, units_out=heads)

    def scores(self, source: Tensor, call: ForwardPass) -> Tensor:
        scores = self.table(source, keep_in=call.keep_heads, keep_out=call.keep_heads)
        return scores.unflatten(-1, (-1, self.taps))  # (…, heads · taps) -> (…, heads, taps)

    def reorder(self, heads: Tensor) -> None:
        self.table.reorder(units_in=heads, units_out=heads)

    def keep(self, heads: int) -> None:
        self.table = self.table.extract(keep_in=heads, keep_out=heads)


class DepthwiseKernel(Kernel):
    """A free kernel for every channel, without a softmax."""

    def __init__(self, heads: int, head_width: int, taps: int, **options: bool | float) -> None:
        super().__init__(taps, **options)  # type: ignore[arg-type]
        self.head_width = head_width
        self.table = ElasticLinear(taps, heads * head_width, units_out=heads, bias=False)

    def initialise(self, deviation: float, generator: torch.Generator | None) -> None:
        initialise_depthwise(self.table.weight, generator)

    def mix(self, value: Tensor, source: Tensor, call: ForwardPass) -> Tensor:
        kernel = torch.dropout(self._kernel(call), self.dropout, train=self.training)
        mixed = depthwise(value.flatten(-2), kernel, call.layout, **self._options(), backend=call.backend)
        return mixed.unflatten(-1, (-1, self.head_width))  # (…, width) -> (…, heads, head_width)

    def step(self, window: Tensor, source: Tensor, call: ForwardPass) -> Tensor:
        mixed = depthwise_step(window.flatten(-2), self._kernel(call))
        return mixed.unflatten(-1, (-1, self.head_width))

    def weights(self, source: Tensor, call: ForwardPass) -> Tensor:
        """The mean over the channels of each head: (heads, taps)."""
        return self._kernel(call).unflatten(0, (-1, self.head_width)).mean(1)

    def reorder(self, heads: Tensor) -> None:
        self.table.reorder(units_out=heads)

    def keep(self, heads: int) -> None:
        self.table = self.table.extract(keep_out=heads)

    def _kernel(self, call: ForwardPass) -> Tensor:
        return self.table.prefix(None, call.keep_heads)[0]  # (heads · head_width, taps)


KERNELS: dict[str, Callable[..., Kernel]] = {
    "fixed": FixedKernel,
    "predicted": PredictedKernel,
    "depthwise": DepthwiseKernel,
}


@torch.no_grad()
def initialise_depthwise(kernel: Tensor, generator: torch.Generator | None) -> None:
    """The first weights of a depthwise kernel (…, taps): deviation 1/taps, so that the sum over taps keeps its size."""
    deviation = 1 / kernel.shape[-1]
    nn.init.trunc_normal_(kernel, std=deviation, a=-2 * deviation, b=2 * deviation, generator=generator)
