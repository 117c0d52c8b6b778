"""Attention as two matrix products and a softmax: basic operations that exported graphs can express."""

import torch
from torch import Tensor

from bertsmith.ops.attention.reference import AttentionInputs
from bertsmith.ops.query_key_value import through_padding
from bertsmith.ops.rounded_softmax import FUSED
from bertsmith.ops.sparse import sparse_probabilities


def unsupported(inputs: AttentionInputs) -> str | None:
    return None if inputs.rounding is None else FUSED


@through_padding
def attention(inputs: AttentionInputs) -> Tensor:
    """Return the attention output in the layout of the query."""
    # (batch, length, heads, …) -> (batch, heads, length, …)
    query, key, value = (tensor.transpose(1, 2) for tensor in (inputs.query, inputs.key, inputs.value))
    scores = (query * query.shape[-1] ** -0.5) @ key.mT
    bias = inputs.bias_matrix(scores.dtype)
    scores = scores if bias is None else scores + bias
    allowed = _allowed(inputs)
    weights = torch.dropout(_weights(inputs, scores, allowed), inputs.dropout, train=inputs.dropout > 0)
    return (weights @ value).transpose(1, 2)


def _weights(inputs: AttentionInputs, scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Return the attention weights, (batch, heads, queries, keys)."""
    if inputs.sparse is not None:
        return sparse_probabilities(scores, allowed, inputs.sparse)
    if allowed is not None:
        # a sum, because graph optimisers match a sum here; finite, so that an empty sequence gives no NaN
        scores = scores + torch.where(allowed, scores.new_zeros(()), torch.finfo(scores.dtype).min)
    return scores.softmax(-1)


def _allowed(inputs: AttentionInputs) -> Tensor | None:
    """Return the mask of keys that a query attends to, (batch or 1, 1, queries or 1, keys); None for all."""
    is_token, allowed = inputs.key_layout.is_token, inputs.is_near()
    if inputs.is_causal:
        position = torch.arange(inputs.layout.max_length, device=inputs.query.device)
        is_past = position[:, None] >= position
        allowed = is_past if allowed is None else allowed & is_past
    if allowed is not None:
        allowed = allowed[None, None]
    if is_token is None:
        return allowed
    return is_token[:, None, None, :] if allowed is None else is_token[:, None, None, :] & allowed
