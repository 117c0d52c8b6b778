"""Layer normalisation that keeps the stream between the layers in the precision of the matrix products."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from bertsmith.settings import Record


class NormConfig(Record):
    """Where the normalisation of a block stands, and its epsilon."""

    placement: Literal["post", "pre"] = "post"
    """After the residual sum (BERT), or before mixer and feed-forward."""
    epsilon: float = Field(default=1e-12, gt=0)

    def build(self, width: int) -> "Norm":
        return Norm(width, self.epsilon)


class Norm(nn.Module):
    """Layer normalisation over the last axis.

    Under autocast PyTorch would run it in float32 and hand float32 to the next layer, which doubles the traffic of the
    residual stream; here input and output stay in the autocast dtype. The statistics are float32 in the kernel.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):
            return layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.epsilon)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            weight, bias = self.weight.to(dtype), self.bias.to(dtype)
            return layer_norm(hidden.to(dtype), weight.shape, weight, bias, self.epsilon)
