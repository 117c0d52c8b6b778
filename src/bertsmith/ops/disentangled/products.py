"""Disentangled attention in the plain operations that other programs' graphs have: products, one gather a term."""

import torch
from torch import Tensor

from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.query_key_value import through_padding


def unsupported(inputs: DisentangledInputs) -> str | None:
    return None


@through_padding
def disentangled(inputs: DisentangledInputs) -> Tensor:
    """The attention output, in the shape and dtype of the query."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        rows = inputs.widened()
        # (batch, length, heads, …) -> (batch, heads, length, …)
        query, key, value = (tensor.transpose(1, 2) for tensor in (rows.query * rows.scale, rows.key, rows.value))
        scores = query @ key.mT
        for term in _position_terms(rows, query, key):
            scores = scores + term
        allowed = rows.allowed()
        if allowed is not None:
            # a sum and a finite floor: graphs are searched for a sum here, and an empty sequence gives no NaN
            scores = scores + torch.where(allowed, scores.new_zeros(()), torch.finfo(scores.dtype).min)
        weights = torch.dropout(scores.softmax(-1), inputs.dropout, train=inputs.dropout > 0)
        mixed = (weights @ value).transpose(1, 2)
        if allowed is not None:
            # a query without any key would see the mean of all the pads
            mixed = mixed.where(allowed.any(-1).transpose(1, 2)[..., None], 0.0)
        return mixed.to(inputs.query.dtype)


def _position_terms(rows: DisentangledInputs, query: Tensor, key: Tensor) -> list[Tensor]:
    """The scaled position terms of the scores, each (batch, heads, queries, keys); the query is scaled already."""
    if rows.position_key is None and rows.position_query is None:
        return []
    row = rows.row_of(rows.offsets())[:, None]  # (batch or 1, queries, keys) -> (batch or 1, 1, queries, keys)
    row, terms = row.expand(query.shape[0], query.shape[1], -1, -1), []
    if rows.position_key is not None:
        by_row = query @ rows.position_key.permute(1, 2, 0)  # (batch, heads, queries, rows)
        terms.append(by_row.gather(-1, row))
    if rows.position_query is not None:
        # a row of the table is a row here, too: the same places serve, and nothing is turned round
        by_row = (rows.position_query * rows.scale).transpose(0, 1) @ key.mT  # (batch, heads, rows, keys)
        terms.append(by_row.gather(-2, row))
    return terms
