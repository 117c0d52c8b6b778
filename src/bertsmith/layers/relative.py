"""The table of relative positions that all layers of a DeBERTa read."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertsmith.layers.norm import Norm
from bertsmith.ops.disentangled.positions import RelativePositions
from bertsmith.settings import Record


class RelativeConfig(Record):
    """One vector for every (bucket of a) distance between two tokens."""

    span: int = Field(default=512, gt=0)
    """Half the rows of the table: distances, or buckets of them, to either side."""
    farthest: int | None = Field(default=None, gt=1)
    """Distances up to this one are told apart by buckets that grow with the logarithm (v2, v3); None for one row per
    distance (v1)."""
    clamp: Literal["official", "hf"] = "official"
    """What stands for distances of `farthest` or more: the farthest one's row, or Hugging Face's rows at the very ends
    of the table, of which one was never trained."""
    has_norm: bool = False
    """Normalise the table before it is used (v2, v3)."""
    epsilon: float = Field(default=1e-7, gt=0)

    def build(self, width: int) -> "RelativeTable":
        return RelativeTable(width, 2 * self.span, torch.tensor(self.slots()), self.epsilon if self.has_norm else None)

    def slots(self) -> list[int]:
        """The row for every offset from the farthest behind to the farthest ahead; further ones take the end's."""
        k = self.span
        if self.farthest is None:
            return [min(max(offset + k, 0), 2 * k - 1) for offset in range(-k, k + 1)]
        reach = self.farthest if self.clamp == "hf" else self.farthest - 1
        return [min(max(self._bucket(offset) + k, 0), 2 * k - 1) for offset in range(-reach, reach + 1)]

    def _bucket(self, offset: int) -> int:
        assert self.farthest is not None
        middle = self.span // 2
        if abs(offset) <= middle:
            return offset
        share = math.log(abs(offset) / middle) / math.log((self.farthest - 1) / middle)
        return int(math.copysign(middle + math.ceil(share * (middle - 1)), offset))


class RelativeTable(nn.Module):
    """The vectors, and which of them stands for which offset."""

    slots: Tensor

    def __init__(self, width: int, rows: int, slots: Tensor, epsilon: float | None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, width))
        self.norm = nn.Identity() if epsilon is None else Norm(width, epsilon)
        self.register_buffer("slots", slots, persistent=False)  # it follows from the config

    def forward(self) -> RelativePositions:
        return RelativePositions(self.norm(self.table), self.slots)
