"""Attention with dropout on a CPU: sequences of similar length are computed together, with little padding.

PyTorch's fused CPU kernel has no dropout, and its fallback spends most of its time on padding and random numbers. The
random numbers here depend on the lengths alone, so packed and padded batches get the same.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bertsmith.data.layout import gather_rows, scatter_rows
from bertsmith.ops.attention.reference import AttentionInputs
from bertsmith.ops.dropout import draw_mask
from bertsmith.ops.rounded_softmax import FUSED
from bertsmith.ops.sparse import sparse_probabilities

QueryKeyValue = tuple[Tensor, Tensor, Tensor]


def unsupported(inputs: AttentionInputs) -> str | None:
    if inputs.rounding is not None:
        return FUSED
    if inputs.query.device.type != "cpu":
        return f"the tensors are on {inputs.query.device.type}, but this backend is for the CPU"
    if inputs.query.dtype not in (torch.float32, torch.float64):
        return f"the tensors are {inputs.query.dtype}, but this backend supports float32 and float64"
    if inputs.key_layout is not inputs.layout:
        return "key_layout differs from the queries' layout"
    if torch.compiler.is_compiling():
        return "shapes depend on the lengths, which compiled code does not support"
    if inputs.dropout == 0.0:
        return "dropout is 0, but this backend is for training with dropout"
    return None


def attention(inputs: AttentionInputs) -> Tensor:
    """Return the attention output in the layout of the query; 0 at padding."""
    layout = inputs.layout
    tensors = (inputs.query, inputs.key, inputs.value)
    if layout.is_packed:
        return _by_groups(inputs, tensors)
    shape, tensors = (layout.batch, layout.max_length), _each(tensors, lambda tensor: tensor.flatten(0, 1))
    if layout.is_token is None:
        return _mixed(inputs, tensors, shape, None).unflatten(0, shape)
    positions = layout.is_token.flatten().nonzero().squeeze(1)
    mixed = _by_groups(inputs, _each(tensors, lambda tensor: gather_rows(tensor, positions)))
    return scatter_rows(mixed, positions, layout.batch * layout.max_length).unflatten(0, shape)


def _each(tensors: QueryKeyValue, change: Callable[[Tensor], Tensor]) -> QueryKeyValue:
    query, key, value = tensors
    return change(query), change(key), change(value)


def _by_groups(inputs: AttentionInputs, tensors: QueryKeyValue) -> Tensor:
    """Return the output of packed tokens, (tokens, heads, value_width)."""
    groups = inputs.layout.groups
    if len(groups.sizes) == 1 and groups.is_token[0] is None:
        return _mixed(inputs, tensors, groups.sizes[0], None)  # equal lengths: packed tokens are rows already
    counts = [sequences * length for sequences, length in groups.sizes]
    queries, keys, values = (scatter_rows(tensor, groups.positions, groups.rows).split(counts) for tensor in tensors)
    by_group = zip(zip(queries, keys, values, strict=True), groups.sizes, groups.is_token, strict=True)
    mixed = [_mixed(inputs, group, size, is_token) for group, size, is_token in by_group]
    return gather_rows(torch.cat(mixed), groups.positions)


def _mixed(inputs: AttentionInputs, tensors: QueryKeyValue, size: tuple[int, int], is_token: Tensor | None) -> Tensor:
    """Return the output of `size` = (sequences, length including padding).

    Shape: query, key, value (sequences · length, heads, …); the result (sequences · length, heads, value_width).
    """
    (sequences, length), heads = size, tensors[0].shape[1]
    # (sequences · length, heads, …) -> (sequences · heads, length, …)
    query, key, value = _each(tensors, lambda tensor: tensor.unflatten(0, size).transpose(1, 2).flatten(0, 1))
    scale = query.shape[-1] ** -0.5
    allowed = _allowed(inputs, length, is_token)
    bias = None if inputs.bias is None else inputs.bias.matrix(length, length, query.dtype)
    if inputs.sparse is not None:
        scores = torch.bmm(query * scale, key.mT).unflatten(0, (sequences, heads))
        scores = scores if bias is None else scores + bias
        allowed = None if allowed is None else allowed[:, None]  # the same for all heads
        weights = sparse_probabilities(scores, allowed, inputs.sparse).flatten(0, 1)
    elif allowed is None and bias is None:
        weights = torch.bmm(query * scale, key.mT).softmax(-1)
    else:
        added = _added(bias, allowed, query.dtype)  # (sequences or 1, heads or 1, length or 1, length)
        by_row = added.expand(sequences, heads, -1, -1).flatten(0, 1) if added.shape[:2] != (1, 1) else added[0]
        weights = torch.baddbmm(by_row, query, key.mT, alpha=scale).softmax(-1)
    is_dropped, factor = draw_mask(weights.shape, inputs.dropout)
    weights = weights.masked_fill(is_dropped, 0.0)
    mixed = torch.bmm(weights, value * factor)
    # (sequences · heads, length, …) -> (sequences · length, heads, …)
    return mixed.unflatten(0, (sequences, heads)).transpose(1, 2).flatten(0, 1)


def _added(bias: Tensor | None, allowed: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the numbers to add to the scores: the bias, or 0, and the lowest number at masked pairs."""
    bias = torch.zeros((), dtype=dtype) if bias is None else bias[None]
    return bias if allowed is None else torch.where(allowed[:, None], bias, torch.finfo(dtype).min)


def _allowed(inputs: AttentionInputs, length: int, is_token: Tensor | None) -> Tensor | None:
    """Return the mask of pairs that attend; None for all pairs.

    Shape: (sequences or 1, length or 1, length).
    """
    allowed = None if is_token is None else is_token[:, None, :]
    if inputs.window is not None or inputs.is_causal:
        position = torch.arange(length)
        distance = position[:, None] - position
        near = distance >= 0 if inputs.is_causal else torch.ones_like(distance, dtype=torch.bool)
        if inputs.window is not None:
            near = near & (distance.abs() <= inputs.window)
        allowed = near[None] if allowed is None else allowed & near
    return allowed
