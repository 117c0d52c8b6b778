"""The table of relative positions that all layers of a DeBERTa read."""

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from bertsmith.layers.norm import Norm
from bertsmith.layers.remember import Remembered, autocast_dtype
from bertsmith.ops.disentangled import RelativePositions, bucket_slots, linear_slots
from bertsmith.settings import Record


class RelativeConfig(Record):
    """One vector for every (bucket of a) distance between two tokens."""

    span: int = Field(default=512, gt=0)
    """Half the rows of the table: distances, or buckets of them, to either side."""
    farthest: int | None = Field(default=None, gt=1)
    """Distances below this one are told apart, beyond span / 2 by buckets that grow with the logarithm (v2, v3); None
    for one row per distance (v1)."""
    clamp: Literal["official", "hf"] = "official"
    """What stands for distances of `farthest` or more: the farthest one's row, or Hugging Face's rows at the very ends
    of the table, of which one was never trained."""
    has_norm: bool = False
    """Normalise the table before it is used (v2, v3)."""
    epsilon: float = Field(default=1e-7, gt=0)

    @model_validator(mode="after")
    def _check_buckets(self) -> "RelativeConfig":
        if self.farthest is not None and (self.span < 2 or self.farthest - 1 <= self.span // 2):
            least = self.span // 2 + 2
            raise ValueError(f"span is {self.span} and farthest {self.farthest}; allowed: from 2, and from {least}")
        return self

    def build(self, width: int) -> "RelativeTable":
        return RelativeTable(width, 2 * self.span, self.slots(), self.epsilon if self.has_norm else None)

    def slots(self) -> Tensor:
        """The row for every offset from the farthest behind to the farthest ahead; further ones take the end's."""
        if self.farthest is None:
            return linear_slots(self.span)
        return bucket_slots(self.span, self.farthest, clamps_distance=self.clamp == "official")


class RelativeTable(nn.Module):
    """The vectors, and which of them stands for which offset."""

    slots: Tensor

    def __init__(self, width: int, rows: int, slots: Tensor, epsilon: float | None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, width))
        self.norm = None if epsilon is None else Norm(width, epsilon)
        self.register_buffer("slots", slots, persistent=False)  # it follows from the config
        self.remembered: Remembered[Tensor] = Remembered()

    def forward(self) -> RelativePositions:
        norm = self.norm
        if norm is None:
            return RelativePositions(self.table, self.slots)
        # one tensor for many calls, by which the mixers know that their projections of it still hold
        sources = [self.table, *norm.parameters()]
        vectors = self.remembered(sources, autocast_dtype(self.table), lambda: norm(self.table))
        return RelativePositions(vectors, self.slots)
