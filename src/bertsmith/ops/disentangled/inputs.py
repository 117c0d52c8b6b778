"""What every form of disentangled attention is given."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.disentangled.positions import RelativePositions


@dataclass(frozen=True)
class DisentangledInputs:
    """One call of disentangled attention.

    Shape: query (batch, length, heads, head_width) or (tokens, heads, head_width), key and value so in key_layout;
    position_key and position_query (rows, heads, head_width).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    position_key: Tensor | None
    position_query: Tensor | None
    layout: SequenceLayout
    key_layout: SequenceLayout
    relative: RelativePositions | None = None
    is_causal: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        queries, keys = self.layout.batch, self.key_layout.batch
        if queries != keys:
            raise InputError(f"the queries lie in {queries} sequences and the keys in {keys}; they must agree")

    @property
    def scale(self) -> float:
        """1/√(head_width · terms): each term adds as much variance as the first."""
        terms = 1 + (self.position_key is not None) + (self.position_query is not None)
        return (self.query.shape[-1] * terms) ** -0.5

    @property
    def query_positions(self) -> Tensor | None:
        """The places of the queries; None for 0, 1, 2, …."""
        return None if self.relative is None else self.relative.query_positions

    def rows(self) -> "DisentangledInputs":
        """The same call in padded rows and in float32 at least: in half precision the sum of scores loses digits."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        query, layout = self.layout.pad(self.query)
        key, key_layout = self.key_layout.pad(self.key)
        positions = None if self.query_positions is None else self.layout.pad(self.query_positions)[0]
        return replace(
            self,
            query=query.to(wide),
            key=key.to(wide),
            value=self.key_layout.pad(self.value)[0].to(wide),
            position_key=None if self.position_key is None else self.position_key.to(wide),
            position_query=None if self.position_query is None else self.position_query.to(wide),
            layout=layout,
            key_layout=key_layout,
            relative=None if self.relative is None else replace(self.relative, query_positions=positions),
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
