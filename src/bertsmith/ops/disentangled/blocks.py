"""Disentangled attention for inference on a CPU: sequence by sequence, with position scores by blocks of tokens.

Products with one column per offset become scores by key when they are read along diagonals, which is a view. A block of
tokens has few more offsets than keys, so little work is wasted; the data of one sequence stays in the cache, and no
index of pairs is built.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.sparse import SOFTMAX_ONLY

_BLOCK = 64  # tokens per block; 128 took a tenth longer
_MIN_LENGTH = 64  # shorter sequences are faster in one batch


def unsupported(inputs: DisentangledInputs) -> str | None:
    if inputs.sparse is not None:
        return SOFTMAX_ONLY
    if inputs.query.device.type != "cpu":
        return f"the tensors are on {inputs.query.device.type}, but this backend is for the CPU"
    if inputs.position_key is None and inputs.position_query is None:
        return "there are no position terms"
    if inputs.query_positions is not None or inputs.key_layout is not inputs.layout:
        return "query_positions are set, or key_layout differs from the queries' layout"
    if torch.compiler.is_compiling():
        return "shapes depend on the lengths, which compiled code does not support"
    if inputs.dropout > 0.0:
        return "dropout is not 0, but this backend is for inference"
    tensors = (inputs.query, inputs.key, inputs.value, inputs.position_key, inputs.position_query)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return "gradients are required, but this backend is for inference"
    return None


def preferred(inputs: DisentangledInputs) -> bool:
    return inputs.layout.batch == 1 or inputs.layout.max_length >= _MIN_LENGTH


def disentangled(inputs: DisentangledInputs) -> Tensor:
    """Return the attention output in the shape and dtype of the query; 0 at padding."""
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
    """Return the output of one sequence: (heads, length, …) -> (heads, length, value_width)."""
    bias = _bias(query * scale, key * scale, position_key, position_query)
    if is_causal:
        future = torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1)
        bias.masked_fill_(future, torch.finfo(bias.dtype).min)
    mixed = scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=bias[None], scale=scale)
    return mixed[0]


def _by_offset(rows: DisentangledInputs, max_length: int) -> tuple[Tensor | None, Tensor | None]:
    """Return each table with one column per offset: of keys from max_length − 1 to 1 − max_length, of queries reversed.

    Shape: each (heads, head_width, 2 · max_length − 1).
    """
    row = rows.row_of(torch.arange(1 - max_length, max_length))
    key, query = rows.position_key, rows.position_query
    return (
        None if key is None else key.index_select(0, row.flip(0)).permute(1, 2, 0),
        None if query is None else query.index_select(0, row).permute(1, 2, 0),
    )


def _bias(query: Tensor, key: Tensor, position_key: Tensor | None, position_query: Tensor | None) -> Tensor:
    """Return the position terms of the scores of one sequence, (heads, length, length).

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
    """Yield blocks of tokens and the columns of their possible offsets."""
    for first in range(0, length, _BLOCK):
        last = min(length, first + _BLOCK)
        yield slice(first, last), slice(length - last, 2 * length - 1 - first)


def _diagonals(by_offset: Tensor, width: int) -> Tensor:
    """Return by_offset[…, i, tokens − 1 − i + j] at […, i, j], as a view.

    Shape: (heads, tokens, tokens + width − 1) -> (heads, tokens, width).
    """
    heads, tokens, offsets = by_offset.shape
    return by_offset.as_strided((heads, tokens, width), (tokens * offsets, offsets - 1, 1), tokens - 1)
