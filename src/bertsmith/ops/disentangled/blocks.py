"""Disentangled attention for inference on a CPU: one sequence after the other, its positions by blocks of tokens.

Every offset has a column of its own, so a map by offsets becomes one by keys when it is read along its diagonals: a
view. A block of tokens meets few more offsets than there are keys, so that little is computed in vain; what one
sequence needs stays in the cache, and no index of pairs is made.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bertsmith.ops.disentangled.reference import DisentangledInputs

_BLOCK = 64  # tokens whose offsets are computed together; twice as many took a tenth longer
_SHORT = 64  # tokens below which sequences are better taken all at once


def unsupported(inputs: DisentangledInputs) -> str | None:
    if inputs.query.device.type != "cpu":
        return f"the tensors are on {inputs.query.device.type} and this backend is for the CPU"
    if inputs.position_key is None and inputs.position_query is None:
        return "there is no term of positions"
    if inputs.query_positions is not None or inputs.key_layout is not inputs.layout:
        return "the queries have places or keys of their own"
    if torch.compiler.is_compiling():
        return "the lengths decide on the shapes, which compiled code cannot have"
    if inputs.dropout > 0.0:
        return "there is dropout, and this backend is for inference"
    tensors = (inputs.query, inputs.key, inputs.value, inputs.position_key, inputs.position_query)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return "gradients are asked for, and this backend is for inference"
    return None


def preferred(inputs: DisentangledInputs) -> bool:
    return inputs.layout.batch == 1 or inputs.layout.max_length >= _SHORT


def disentangled(inputs: DisentangledInputs) -> Tensor:
    """The attention output, in the shape and dtype of the query; 0 at pads."""
    with torch.autocast("cpu", enabled=False):
        rows, layout = inputs.widened(), inputs.layout
        query, key, value = rows.query, rows.key, rows.value
        if not layout.is_packed:
            query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
        lengths = layout.lengths(query.device).tolist()
        position_key, position_query = _by_offset(rows, max_length := max(lengths))
        mixed = value.new_zeros(value.shape) if layout.is_token is not None else value.new_empty(value.shape)
        first = 0
        for length in lengths:
            position, around = slice(first, first + length), slice(max_length - length, max_length + length - 1)
            if length > 0:
                # (length, heads, …) -> (heads, length, …)
                one = [tensor[position].transpose(0, 1) for tensor in (query, key, value)]
                tables = (None if table is None else table[..., around] for table in (position_key, position_query))
                mixed[position] = _one(*one, *tables, scale=rows.scale, is_causal=inputs.is_causal).transpose(0, 1)
            first += length if layout.is_packed else layout.max_length
        return mixed.view(inputs.value.shape).to(inputs.query.dtype)


def _one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_key: Tensor | None,
    position_query: Tensor | None,
    *,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """The output of one sequence: (heads, length, …) -> (heads, length, value_width)."""
    bias = _bias(query * scale, key * scale, position_key, position_query)
    if is_causal:
        future = torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1)
        bias.masked_fill_(future, torch.finfo(bias.dtype).min)
    found = scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=bias[None], scale=scale)
    return found[0]


def _by_offset(rows: DisentangledInputs, max_length: int) -> tuple[Tensor | None, Tensor | None]:
    """A column of each table for every offset: the keys' from longest − 1 down to 1 − longest, the queries' up.

    Shape: each (heads, head_width, 2 · longest − 1).
    """
    row = rows.row_of(torch.arange(1 - max_length, max_length))
    key, query = rows.position_key, rows.position_query
    return (
        None if key is None else key.index_select(0, row.flip(0)).permute(1, 2, 0),
        None if query is None else query.index_select(0, row).permute(1, 2, 0),
    )


def _bias(query: Tensor, key: Tensor, position_key: Tensor | None, position_query: Tensor | None) -> Tensor:
    """The position terms of the scores of one sequence, (heads, length, length).

    Shape: query, key (heads, length, head_width), scaled; the tables (heads, head_width, 2 · length − 1).
    """
    heads, length, _ = query.shape
    make = query.new_zeros if position_key is None else query.new_empty
    bias = make(heads, length, length)
    if position_key is not None:
        for block, around in _blocks(length):  # the offsets of these queries to all keys
            bias[:, block] = _diagonals(torch.bmm(query[:, block], position_key[..., around]), length)
    if position_query is not None:
        for block, around in _blocks(length):  # the offsets of all queries to these keys
            bias[..., block] += _diagonals(torch.bmm(key[:, block], position_query[..., around]), length).mT
    return bias


def _blocks(length: int) -> Iterator[tuple[slice, slice]]:
    """Stretches of tokens, and the columns of the offsets that each can meet."""
    for first in range(0, length, _BLOCK):
        last = min(length, first + _BLOCK)
        yield slice(first, last), slice(length - last, 2 * length - 1 - first)


def _diagonals(by_offset: Tensor, width: int) -> Tensor:
    """by_offset[…, i, tokens − 1 − i + j] at […, i, j], as a view.

    Shape: (heads, tokens, tokens + width − 1) -> (heads, tokens, width).
    """
    heads, tokens, offsets = by_offset.shape
    return by_offset.as_strided((heads, tokens, width), (tokens * offsets, offsets - 1, 1), tokens - 1)
