"""A convolution beside a whole layer (DeBERTa v2's first layer)."""

from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn
from torch.nn.functional import linear

from bertsmith.layers.activation import ACTIVATIONS, Activation
from bertsmith.layers.call import ForwardPass
from bertsmith.layers.dropout import TokenDropout
from bertsmith.layers.norm import Norm
from bertsmith.ops.conv import odd_taps, reach, shifted
from bertsmith.settings import Record


class BranchConfig(Record):
    """What the neighbours of a token add to a layer's output."""

    taps: Annotated[int, AfterValidator(odd_taps)] = 3
    activation: Activation = "gelu"
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Before the activation, as in the released code."""
    epsilon: float = Field(default=1e-7, gt=0)

    def build(self, width: int, *, is_causal: bool = False) -> "ConvolutionBranch":
        """The branch of a layer, causal if the layer's mixer is."""
        return ConvolutionBranch(width, self.taps, self.activation, self.dropout, self.epsilon, is_causal=is_causal)

    def flops(self, width: int) -> int:
        """Floating-point operations of one token's forward pass."""
        return 2 * self.taps * width * width


class ConvolutionBranch(nn.Module):
    """norm(layer(x) + activation(dropout(convolution(x)))), x being what enters the layer.

    The middle tap is the token itself; causal, the last one is, and the weights stay as they are.
    """

    def __init__(
        self, width: int, taps: int, activation: Activation, dropout: float, epsilon: float, *, is_causal: bool
    ) -> None:
        super().__init__()
        self.taps, self.activation, self.is_causal = taps, activation, is_causal
        self.weight = nn.Parameter(torch.empty(width, taps * width))
        self.bias = nn.Parameter(torch.empty(width))
        self.dropout = TokenDropout(dropout)
        self.norm = Norm(width, epsilon)

    def forward(self, entered: Tensor, left: Tensor, call: ForwardPass) -> Tensor:
        """The layer's output with the convolution of its input added.

        Shape: entered, left (…, width), the states before and after the layer.
        """
        before, _ = reach(self.taps, self.is_causal or call.is_causal)
        span = torch.cat([shifted(entered, tap - before, call.layout) for tap in range(self.taps)], dim=-1)
        added = self.dropout(linear(span, self.weight, self.bias), call.layout)  # (…, taps · width) -> (…, width)
        return self.norm(left + ACTIVATIONS[self.activation](added))
