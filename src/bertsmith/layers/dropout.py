"""Dropout on states that draws nothing for pads."""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from bertsmith.batches.layout import SequenceLayout


class TokenDropout(nn.Module):
    """Dropout whose draws on a CPU do not depend on how sequences lie: packed and padded runs stay the same run.

    On a GPU and in compiled code pads are drawn for, too: to count the real tokens would make the device wait.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        if not self.training or self.rate == 0.0:
            return hidden
        is_token = layout.is_token
        if is_token is None or hidden.is_cuda or torch.compiler.is_compiling():
            return dropout(hidden, self.rate)
        factors = torch.zeros_like(hidden)
        factors[is_token] = dropout(hidden.new_ones(int(is_token.sum()), hidden.shape[-1]), self.rate)
        return hidden * factors

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
