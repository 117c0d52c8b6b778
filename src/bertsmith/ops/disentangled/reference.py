"""Inputs and reference of disentangled attention; fast implementations are tested against it."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from bertsmith.ops.disentangled.positions import RelativePositions
from bertsmith.ops.query_key_value import QueryKeyValueInputs, through_padding
from bertsmith.ops.sparse import SparseMap, sparse_probabilities


@dataclass(frozen=True, kw_only=True)
class DisentangledInputs(QueryKeyValueInputs):
    """Inputs of disentangled attention.

    Shape: position_key and position_query (rows, heads, head_width).
    """

    position_key: Tensor | None
    position_query: Tensor | None
    relative: RelativePositions | None
    dropout: float = 0.0
    sparse: SparseMap | None = None
    """Sparse weights instead of the softmax."""

    @property
    def scale(self) -> float:
        """1/√(head_width · terms), because every term adds the same variance."""
        terms = 1 + (self.position_key is not None) + (self.position_query is not None)
        return (self.query.shape[-1] * terms) ** -0.5

    @property
    def query_positions(self) -> Tensor | None:
        """The positions of the queries; None for 0, 1, 2, …."""
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
        """Return the inputs at least in float32, because sums of scores are inaccurate in half precision."""
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
        """Return the attention mask, broadcastable to (batch, 1, queries, keys); padded inputs only."""
        allowed = None if self.key_layout.is_token is None else self.key_layout.is_token[:, None, None, :]
        if self.is_causal:
            future = self.offsets()[:, None] < 0
            allowed = ~future if allowed is None else allowed & ~future
        return allowed

    def offsets(self) -> Tensor:
        """Return query position − key position of every pair, (batch or 1, queries, keys); padded inputs only."""
        keys = torch.arange(self.key_layout.max_length, device=self.query.device)
        if self.query_positions is None:
            return torch.arange(self.layout.max_length, device=self.query.device)[None, :, None] - keys
        return self.query_positions[..., None] - keys

    def row_of(self, offsets: Tensor) -> Tensor:
        """Return the row of the relative table for each offset."""
        assert self.relative is not None, "position terms need relative positions"
        slots = self.relative.slots
        reach = slots.shape[0] // 2
        return slots[offsets.clamp(-reach, reach) + reach]


def unsupported(inputs: DisentangledInputs) -> str | None:
    return None


@through_padding
def disentangled(inputs: DisentangledInputs) -> Tensor:
    """Return the attention output in the shape and dtype of the query."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        rows = inputs.widened()
        weights = torch.dropout(_probabilities(rows), inputs.dropout, train=inputs.dropout > 0)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, rows.value)
        return mixed.to(inputs.query.dtype)


def terms(inputs: DisentangledInputs) -> dict[str, Tensor]:
    """Return the probabilities and the scaled terms of the scores, each (batch, heads, queries, keys), 0 at padding."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        rows = inputs.padded().widened()
        maps = {"attention": _probabilities(rows), **_terms(rows)}
        allowed = rows.allowed()
        return maps if allowed is None else {name: scores.where(allowed, 0.0) for name, scores in maps.items()}


def scores(inputs: DisentangledInputs) -> Tensor:
    """Return the sum of the scaled terms, (batch, heads, queries, keys), -inf at masked pairs and at padding."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        rows = inputs.padded().widened()
        total = torch.stack(list(_terms(rows).values())).sum(0)
        for allowed in (rows.allowed(), _real_queries(rows)):
            total = total if allowed is None else total.masked_fill(~allowed, -torch.inf)
        return total


def _real_queries(rows: DisentangledInputs) -> Tensor | None:
    is_token = rows.layout.is_token
    return None if is_token is None else is_token[:, None, :, None]


def _probabilities(rows: DisentangledInputs) -> Tensor:
    """Return the attention probabilities (He et al. 2021, eq. 4): (batch, heads, queries, keys)."""
    scores = torch.stack(list(_terms(rows).values())).sum(0)
    allowed = rows.allowed()
    if rows.sparse is not None:
        return sparse_probabilities(scores, allowed, rows.sparse)
    if allowed is None:
        return scores.softmax(-1)
    # finite, so that an empty sequence gives zeros and not NaN
    return scores.where(allowed, torch.finfo(scores.dtype).min).softmax(-1).where(allowed, 0.0)


def _terms(rows: DisentangledInputs) -> dict[str, Tensor]:
    """Return the scaled terms of the scores, each (batch, heads, queries, keys)."""
    query, key, scale = rows.query, rows.key, rows.scale
    terms = {"content_to_content": torch.einsum("bqhd,bkhd->bhqk", query, key) * scale}
    if rows.position_key is None and rows.position_query is None:
        return terms
    row = rows.row_of(rows.offsets())[:, None]  # (batch or 1, queries, keys) -> (batch or 1, 1, queries, keys)
    row = row.expand(*terms["content_to_content"].shape)
    if rows.position_key is not None:
        by_row = torch.einsum("bqhd,rhd->bhqr", query, rows.position_key) * scale
        terms["content_to_position"] = by_row.gather(-1, row)
    if rows.position_query is not None:
        # the official code and Hugging Face's use the row of (query − key) here, too; the paper writes (key − query)
        by_row = torch.einsum("bkhd,rhd->bhkr", key, rows.position_query) * scale
        terms["position_to_content"] = by_row.gather(-1, row.mT).mT
    return terms
