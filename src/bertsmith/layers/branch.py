"""A convolution beside a whole layer (DeBERTa v2's first layer)."""

from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn
from torch.nn.functional import linear

from bertsmith.layers.activation import ACTIVATIONS, Activation
from bertsmith.layers.call import ForwardPass
from bertsmith.layers.norm import Norm
from bertsmith.ops.conv import odd_taps, shifted
from bertsmith.settings import Record


class BranchConfig(Record):
    """What the neighbours of a token add to a layer's output."""

    taps: Annotated[int, AfterValidator(odd_taps)] = 3
    activation: Activation = "gelu"
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Before the activation, as in the released code."""
    epsilon: float = Field(default=1e-7, gt=0)

    def build(self, width: int) -> "ConvolutionBranch":
        return ConvolutionBranch(width, self.taps, self.activation, self.dropout, self.epsilon)

    def flops(self, width: int) -> int:
        """Floating-point operations of one token's forward pass."""
        return 2 * self.taps * width * width


class ConvolutionBranch(nn.Module):
    """norm(layer(x) + activation(dropout(convolution(x)))), x being what enters the layer."""

    def __init__(self, width: int, taps: int, activation: Activation, dropout: float, epsilon: float) -> None:
        super().__init__()
        self.taps, self.activation = taps, activation
        self.weight = nn.Parameter(torch.empty(width, taps * width))
        self.bias = nn.Parameter(torch.empty(width))
        self.dropout = nn.Dropout(dropout)
        self.norm = Norm(width, epsilon)

    def forward(self, entered: Tensor, left: Tensor, call: ForwardPass) -> Tensor:
        """The layer's output with the convolution of its input added.

        Shape: entered, left (…, width), the states before and after the layer.
        """
        middle = self.taps // 2
        span = torch.cat([shifted(entered, tap - middle, call.layout) for tap in range(self.taps)], dim=-1)
        added = self.dropout(linear(span, self.weight, self.bias))  # (…, taps · width) -> (…, width)
        return self.norm(left + ACTIVATIONS[self.activation](added))
