"""Attention by PyTorch's fused kernels for padded rows; packed inputs are padded for the call."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bertsmith.ops.attention.reference import AttentionInputs
from bertsmith.ops.query_key_value import through_padding
from bertsmith.ops.rounded_softmax import FUSED
from bertsmith.ops.sparse import SOFTMAX_ONLY


def unsupported(inputs: AttentionInputs) -> str | None:
    if inputs.rounding is not None:
        return FUSED
    return None if inputs.sparse is None else SOFTMAX_ONLY


@through_padding
def attention(inputs: AttentionInputs) -> Tensor:
    """Return the attention output in the layout of the query."""
    is_token, is_near, is_causal = inputs.key_layout.is_token, inputs.is_near(), inputs.is_causal
    mask, bias = None if is_token is None else is_token[:, None, None, :], inputs.bias_matrix(inputs.query.dtype)
    if is_near is not None:
        mask = is_near[None, None] if mask is None else mask & is_near  # (batch or 1, 1, queries, keys)
    if is_causal and bias is not None and mask is None:
        mask = torch.ones_like(bias[:1], dtype=torch.bool)[None]
    if is_causal and mask is not None:
        mask, is_causal = mask.expand(-1, 1, inputs.layout.max_length, -1).tril(), False
    if bias is not None:  # (batch or 1, heads, queries, keys)
        mask = bias[None] if mask is None else torch.where(mask, bias, -torch.inf)
    mixed = scaled_dot_product_attention(
        inputs.query.transpose(1, 2),  # (batch, length, heads, head_width) -> (batch, heads, length, head_width)
        inputs.key.transpose(1, 2),
        inputs.value.transpose(1, 2),
        attn_mask=mask,
        dropout_p=inputs.dropout,
        is_causal=is_causal,
    )
    return mixed.transpose(1, 2)
