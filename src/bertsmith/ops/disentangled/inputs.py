"""What every form of disentangled attention is given."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from bertsmith.ops.attending import AttendingInputs
from bertsmith.ops.disentangled.positions import RelativePositions


@dataclass(frozen=True, kw_only=True)
class DisentangledInputs(AttendingInputs):
    """One call of disentangled attention.

    Shape: position_key and position_query (rows, heads, head_width).
    """

    position_key: Tensor | None
    position_query: Tensor | None
    relative: RelativePositions | None
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """1/√(head_width · terms): each term adds as much variance as the first."""
        terms = 1 + (self.position_key is not None) + (self.position_query is not None)
        return (self.query.shape[-1] * terms) ** -0.5

    @property
    def query_positions(self) -> Tensor | None:
        """The places of the queries; None for 0, 1, 2, …."""
        return None if self.relative is None else self.relative.query_positions

    @property
    def has_order(self) -> bool:
        return super().has_order or self.query_positions is not None

    def padded(self) -> Self:
        padded = super().padded()
        if self.relative is None or self.query_positions is None:
            return padded
        positions, _ = self.layout.pad(self.query_positions)
        return replace(padded, relative=replace(self.relative, query_positions=positions))

    def widened(self) -> Self:
        """The same call in float32 at least: in half precision the sum of scores loses digits."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        return replace(
            self,
            query=self.query.to(wide),
            key=self.key.to(wide),
            value=self.value.to(wide),
            position_key=None if self.position_key is None else self.position_key.to(wide),
            position_query=None if self.position_query is None else self.position_query.to(wide),
        )

    def allowed(self) -> Tensor | None:
        """Which keys a query may look at, (batch or 1, 1, queries, keys) or with an axis of 1; padded calls only."""
        allowed = None if self.key_layout.is_token is None else self.key_layout.is_token[:, None, None, :]
        if self.is_causal:
            future = self.offsets()[:, None] < 0
            allowed = ~future if allowed is None else allowed & ~future
        return allowed

    def offsets(self) -> Tensor:
        """Query place − key place for every pair, (batch or 1, queries, keys); padded calls only."""
        keys = torch.arange(self.key_layout.longest, device=self.query.device)
        if self.query_positions is None:
            return torch.arange(self.layout.longest, device=self.query.device)[None, :, None] - keys
        return self.query_positions[..., None] - keys

    def row_of(self, offsets: Tensor) -> Tensor:
        """The row of the relative table for each offset."""
        assert self.relative is not None, "position terms need relative positions"
        slots = self.relative.slots
        reach = slots.shape[0] // 2
        return slots[offsets.clamp(-reach, reach) + reach]
