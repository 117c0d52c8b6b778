"""The point-wise functions a config can name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.dropout import drop_tokens

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
