"""Disentangled attention by matrix products and one gather per term: operations that exported graphs can express."""

import torch
from torch import Tensor

from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.query_key_value import through_padding
from bertsmith.ops.sparse import sparse_probabilities


def unsupported(inputs: DisentangledInputs) -> str | None:
    return None


@through_padding
def disentangled(inputs: DisentangledInputs) -> Tensor:
    """Return the attention output in the shape and dtype of the query."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        rows = inputs.widened()
        # (batch, length, heads, …) -> (batch, heads, length, …)
        query, key, value = (tensor.transpose(1, 2) for tensor in (rows.query * rows.scale, rows.key, rows.value))
        scores = query @ key.mT
        for term in _position_terms(rows, query, key):
            scores = scores + term
        allowed = rows.allowed()
        weights = torch.dropout(_weights(rows, scores, allowed), inputs.dropout, train=inputs.dropout > 0)
        mixed = (weights @ value).transpose(1, 2)
        if allowed is not None:
            # a query without any key would get the mean of all padding
            mixed = mixed.where(allowed.any(-1).transpose(1, 2)[..., None], 0.0)
        return mixed.to(inputs.query.dtype)


def _weights(rows: DisentangledInputs, scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Return the attention weights, (batch, heads, queries, keys)."""
    if rows.sparse is not None:
        return sparse_probabilities(scores, allowed, rows.sparse)
    if allowed is not None:
        # a sum, because graph optimisers match a sum here; finite, so that an empty sequence gives no NaN
        scores = scores + torch.where(allowed, scores.new_zeros(()), torch.finfo(scores.dtype).min)
    return scores.softmax(-1)


def _position_terms(rows: DisentangledInputs, query: Tensor, key: Tensor) -> list[Tensor]:
    """Return the scaled position terms of the scores, each (batch, heads, queries, keys); the query is scaled."""
    if rows.position_key is None and rows.position_query is None:
        return []
    row = rows.row_of(rows.offsets())[:, None]  # (batch or 1, queries, keys) -> (batch or 1, 1, queries, keys)
    row, terms = row.expand(query.shape[0], query.shape[1], -1, -1), []
    if rows.position_key is not None:
        by_row = query @ rows.position_key.permute(1, 2, 0)  # (batch, heads, queries, rows)
        terms.append(by_row.gather(-1, row))
    if rows.position_query is not None:
        # rows of the table stay rows, so the same index serves without a transpose
        by_row = (rows.position_query * rows.scale).transpose(0, 1) @ key.mT  # (batch, heads, rows, keys)
        terms.append(by_row.gather(-2, row))
    return terms
