"""Attention written out: short, differentiable in any dtype, the truth the fast forms are tested against."""

import torch
from torch import Tensor

from bertsmith.ops.attention.inputs import AttentionInputs, through_padding


def unsupported(inputs: AttentionInputs) -> str | None:
    return None


def attention(inputs: AttentionInputs) -> Tensor:
    """The attention output, in the layout of the query."""
    if inputs.layout.is_packed or inputs.key_layout.is_packed:
        return through_padding(attention, inputs)
    weights = torch.dropout(probabilities(inputs), inputs.dropout, train=inputs.dropout > 0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, inputs.value)


def probabilities(inputs: AttentionInputs) -> Tensor:
    """Vaswani et al. 2017, eq. 1, without the value: (batch, heads, longest, longest key)."""
    query, layout = inputs.layout.pad(inputs.query)
    key, key_layout = inputs.key_layout.pad(inputs.key)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    allowed = torch.ones(layout.batch, 1, layout.longest, key_layout.longest, dtype=torch.bool, device=query.device)
    if key_layout.is_token is not None:
        allowed = allowed & key_layout.is_token[:, None, None, :]
    if inputs.is_causal:
        allowed = allowed.tril()
    # a finite floor, so that an empty sequence gives zeros and not NaN
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~allowed, 0.0)
