"""Point-wise functions and norms that a config can name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import layer_norm, rms_norm

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.dropout import drop_tokens
from bertsmith.settings import Record

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,  # the exact, erf form
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),  # the form of Google's BERT code
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


class TokenDropout(nn.Module):
    """Dropout whose draws on a CPU do not depend on how sequences lie: packed and padded runs stay the same run."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        return drop_tokens(hidden, self.rate, layout) if self.training and self.rate else hidden

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


@dataclass(frozen=True)
class LayerGates:
    """What the units of one layer are multiplied by; None for nothing. All of them are listed, cut away or not.

    Shape: heads (heads,), neurons and inner (neurons,).
    """

    heads: Tensor | None = None
    """On what each head hands to the mixer's output projection."""
    neurons: Tensor | None = None
    """On each neuron's activation."""
    inner: Tensor | None = None
    """On what enters each neuron's activation."""


def first_units(gate: Tensor, keep: int | None, groups: int = 1) -> Tensor:
    """The gates of the units that are kept: the first of every group."""
    if keep is None or keep == len(gate):
        return gate
    return gate.unflatten(0, (groups, -1))[:, : keep // groups].flatten()  # (units,) -> (groups, units / groups)


NormKind = Literal["layer", "rms"]
"""By mean and deviation (Ba et al. 2016), or by the root of the mean square alone (Zhang & Sennrich 2019)."""


class NormConfig(Record):
    """Where the normalisation of a block stands, its kind and its epsilon."""

    placement: Literal["post", "pre"] = "post"
    """After the residual sum (BERT), or before mixer and feed-forward."""
    kind: NormKind = "layer"
    """By mean and deviation, or by the root of the mean square alone, which is a little cheaper."""
    epsilon: float = Field(default=1e-12, gt=0)
    has_bias: bool = True

    def build(self, width: int) -> "Norm":
        return Norm(width, self.epsilon, self.kind, has_bias=self.has_bias)


class Norm(nn.Module):
    """Normalisation over the last axis.

    Under autocast PyTorch would run it in float32 and hand float32 to the next layer, which doubles the traffic of the
    residual stream; here input and output stay in the autocast dtype. The statistics are float32 in the kernel.
    """

    def __init__(self, width: int, epsilon: float, kind: NormKind = "layer", *, has_bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None
        self.epsilon, self.kind = epsilon, kind

    def forward(self, hidden: Tensor) -> Tensor:
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):
            return self._normalised(hidden, self.weight, self.bias)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            return self._normalised(hidden.to(dtype), self.weight.to(dtype), bias)

    def _normalised(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.kind == "layer":
            return layer_norm(hidden, weight.shape, weight, bias, self.epsilon)
        scaled = rms_norm(hidden, weight.shape, weight, self.epsilon)
        return scaled if bias is None else scaled + bias
