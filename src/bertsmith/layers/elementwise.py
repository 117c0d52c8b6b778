"""Activations, dropout, gates and norms."""

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
    """Dropout whose random numbers on a CPU do not depend on the layout: packed and padded batches get the same."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        return drop_tokens(hidden, self.rate, layout) if self.training and self.rate else hidden

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


@dataclass(frozen=True)
class LayerGates:
    """Factors of the units of one layer; None for no gates. Units that a sub-network leaves out have a gate, too.

    Shape: heads (heads,), neurons and inner (neurons,).
    """

    heads: Tensor | None = None
    """Factors of the heads' outputs, before the mixer's output projection."""
    neurons: Tensor | None = None
    """Factors of the neurons' activations."""
    inner: Tensor | None = None
    """Factors of the neurons' pre-activations."""


def first_units(gate: Tensor, keep: int | None, groups: int = 1) -> Tensor:
    """Return the gates of the first units of every group, `keep` in total."""
    if keep is None or keep == len(gate):
        return gate
    return gate.unflatten(0, (groups, -1))[:, : keep // groups].flatten()  # (units,) -> (groups, units / groups)


NormKind = Literal["layer", "rms"]
"""LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019)."""


class NormConfig(Record):
    """Placement, kind and epsilon of the norms of a block."""

    placement: Literal["post", "pre"] = "post"
    """After the residual sum (BERT), or before mixer and feed-forward."""
    kind: NormKind = "layer"
    """LayerNorm, or RMSNorm, which is slightly cheaper."""
    epsilon: float = Field(default=1e-12, gt=0)
    has_bias: bool = True

    def build(self, width: int) -> "Norm":
        return Norm(width, self.epsilon, self.kind, has_bias=self.has_bias)


class Norm(nn.Module):
    """Normalisation over the last axis.

    Under autocast PyTorch would run it in float32 and return float32, which doubles the memory traffic of the residual
    stream; here input and output stay in the autocast dtype. The kernel computes the statistics in float32.
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
