"""Multi-linear attention (Ma et al. 2019): every pair of positions has its own output weights (docs/papers/lite.md)."""

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.cumulative_sum import cumulative_sum
from bertsmith.ops.dispatch import Implementation, Implementations, choose
from bertsmith.ops.multi_linear import products, reference
from bertsmith.ops.multi_linear.reference import MultiLinearInputs

__all__ = ["BACKENDS", "multi_linear", "multi_linear_map", "multi_linear_step"]

BACKENDS: Implementations[MultiLinearInputs, Tensor] = {
    "products": Implementation(products.multi_linear, products.unsupported),
    "reference": Implementation(reference.multi_linear, reference.unsupported),
}


def multi_linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: Tensor,
    layout: SequenceLayout,
    *,
    is_causal: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Return Σ_{j,m} (Σ_r Qᵢᵣ Kⱼᵣ Vₘᵣ) · W[j, m] / n², over all n² pairs of tokens of the sequence.

    If it is causal, j and m are at most i, and the sum is divided by (i + 1)². The division is not in the paper, whose
    sums grow with the square of the length.
    Shape: query, key, value (batch, length, rank), or (tokens, rank) when packed; pairs, the matrix W,
    (max_length, max_length, width); the result (…, width).
    """
    inputs = MultiLinearInputs(query, key, value, layout, layout, is_causal, pairs=pairs)
    return choose(BACKENDS, backend, inputs).compute(inputs)


def multi_linear_map(
    query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout, *, is_causal: bool = False
) -> Tensor:
    """Return the sum of the tensor over its third index, divided as in `multi_linear`; 0 at padding.

    Shape: query, key, value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed;
    the result (batch, heads, queries, keys).
    """
    by_head = query.shape[-2:]
    query, key, value = (tensor.flatten(-2) for tensor in (query, key, value))  # (…, heads, head_width) -> (…, rank)
    inputs = MultiLinearInputs(query, key, value, layout, layout, is_causal, pairs=query.new_empty(0)).padded()
    query, key, value = reference.masked(inputs)
    total = cumulative_sum(value, 1) if is_causal else value.sum(1, keepdim=True)
    weighted = (query * total / inputs.counts()).unflatten(-1, by_head)
    scores = torch.einsum("bihr,bjhr->bhij", weighted, key.unflatten(-1, by_head))
    return scores.tril() if is_causal else scores


def multi_linear_step(
    query: Tensor, key: Tensor, value: Tensor, memory: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the causal output of the last token, (batch, width), and the new memory, (batch, rank, width).

    Shape: query (batch, rank); key, value (batch, length, rank) including the last token; memory of earlier tokens,
    (batch, rank, width).
    """
    last = key.shape[1] - 1
    wide = memory.dtype
    query, key, value, pairs = (tensor.to(wide) for tensor in (query, key, value, pairs))
    by_key = torch.einsum("bmr,mo->bro", value, pairs[last, : last + 1])
    by_value = torch.einsum("bjr,jo->bro", key[:, :-1], pairs[:last, last])
    memory = memory + key[:, -1, :, None] * by_key + value[:, -1, :, None] * by_value
    return torch.einsum("br,bro->bo", query, memory) / (last + 1) ** 2, memory
