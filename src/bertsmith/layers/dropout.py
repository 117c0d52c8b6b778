"""Dropout on states that draws nothing for pads."""

from torch import Tensor, nn

from bertsmith.batches.layout import SequenceLayout
from bertsmith.ops.dropout import drop_tokens


class TokenDropout(nn.Module):
    """Dropout whose draws on a CPU do not depend on how sequences lie: packed and padded runs stay the same run."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        return drop_tokens(hidden, self.rate, layout) if self.training and self.rate else hidden

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
