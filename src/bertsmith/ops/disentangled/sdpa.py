"""Disentangled attention as a bias for PyTorch's fused attention."""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.query_key_value import through_padding
from bertsmith.ops.sparse import SOFTMAX_ONLY


def unsupported(inputs: DisentangledInputs) -> str | None:
    return None if inputs.sparse is None else SOFTMAX_ONLY


@through_padding
def disentangled(inputs: DisentangledInputs) -> Tensor:
    """Return the attention output in the shape and dtype of the query."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        rows = inputs.widened()
        bias, allowed = _bias(rows), rows.allowed()
        mixed = scaled_dot_product_attention(
            rows.query.transpose(1, 2),  # (batch, length, heads, head_width) -> (batch, heads, length, head_width)
            rows.key.transpose(1, 2),
            rows.value.transpose(1, 2),
            attn_mask=_with_mask(bias, allowed, rows),
            dropout_p=inputs.dropout,
            scale=rows.scale,
        )
        mixed = mixed.transpose(1, 2)
        if allowed is not None:
            # a query without any key would get the mean of all padding
            mixed = mixed.where(allowed.any(-1).transpose(1, 2)[..., None], 0.0)
        return mixed.to(inputs.query.dtype)


def _with_mask(bias: Tensor | None, allowed: Tensor | None, rows: DisentangledInputs) -> Tensor | None:
    if allowed is None:
        return bias
    if bias is None:
        bias = rows.query.new_zeros(1)
    return bias.where(allowed, torch.finfo(bias.dtype).min)


def _bias(rows: DisentangledInputs) -> Tensor | None:
    """Return the scaled position terms of the scores, (batch, heads, queries, keys)."""
    if rows.position_key is None and rows.position_query is None:
        return None
    terms = []
    query, key = rows.query.transpose(1, 2) * rows.scale, rows.key.transpose(1, 2) * rows.scale
    if rows.query_positions is None:
        keys, queries = rows.key_layout.max_length, rows.layout.max_length
        row = rows.row_of(torch.arange(1 - keys, queries, device=query.device))
        if rows.position_key is not None:
            terms.append(_skew(query @ _by_offset(rows.position_key, row.flip(0)), keys))
        if rows.position_query is not None:
            terms.append(_skew(key @ _by_offset(rows.position_query, row), queries).mT)
    else:
        row = rows.row_of(rows.offsets())[:, None].expand(-1, query.shape[1], -1, -1)
        if rows.position_key is not None:
            terms.append((query @ rows.position_key.permute(1, 2, 0)).gather(-1, row))
        if rows.position_query is not None:
            terms.append((key @ rows.position_query.permute(1, 2, 0)).gather(-1, row.mT).mT)
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _by_offset(table: Tensor, row: Tensor) -> Tensor:
    """Return one column per offset: (rows, heads, head_width) -> (heads, head_width, offsets)."""
    return table.index_select(0, row).permute(1, 2, 0)


def _skew(by_offset: Tensor, width: int) -> Tensor:
    """Return by_offset[…, i, length − 1 − i + j] at […, i, j], for j < width.

    Pad one column, flatten, and read in rows that are one element shorter. The mapping is one to one, so its backward
    pass copies, while the backward pass of a gather would add.
    Shape: (…, length, length + width − 1) -> (…, length, width).
    """
    length, offsets = by_offset.shape[-2:]
    flat = pad(by_offset, (0, 1)).flatten(-2)  # (…, length · (offsets + 1))
    return flat[..., length - 1 : length - 1 + length * offsets].unflatten(-1, (length, offsets))[..., :width]
