"""Attention inside each sequence: `attention` for the output, `attention_map` for the probabilities."""

from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.attention import grouped, products, reference, sdpa, short, varlen
from bertsmith.ops.attention.bias import RelativeBias, t5_slots
from bertsmith.ops.attention.reference import AttentionInputs
from bertsmith.ops.dispatch import Implementation, Implementations, choose
from bertsmith.ops.rounded_softmax import SoftmaxRounding
from bertsmith.ops.sparse import SparseMap

__all__ = ["BACKENDS", "RelativeBias", "attention", "attention_map", "attention_scores", "t5_slots"]

BACKENDS: Implementations[AttentionInputs, Tensor] = {
    "short": Implementation(short.attention, short.unsupported, short.preferred),
    "varlen": Implementation(varlen.attention, varlen.unsupported),
    "grouped": Implementation(grouped.attention, grouped.unsupported),
    "sdpa": Implementation(sdpa.attention, sdpa.unsupported),
    "products": Implementation(products.attention, products.unsupported),
    "reference": Implementation(reference.attention, reference.unsupported),
}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout,
    *,
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
    window: int | None = None,
    sparse: SparseMap | None = None,
    rounding: SoftmaxRounding | None = None,
    bias: RelativeBias | None = None,
    dropout: float = 0.0,
    joint: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return softmax(QKᵀ/√head_width)V over the real tokens of each sequence, in the layout of `query`.

    `key_layout` is the layout of key and value in cross-attention; the i-th sequence of queries attends to the i-th
    sequence of keys. With a `window`, a query attends to at most that many tokens on each side. With `sparse`, sparse
    weights replace the softmax; with `rounding`, its parts are rounded; a `bias` is added to the scores. `joint` is the
    tensor that query, key and value are slices of, if there is one: kernels then write one gradient for all three.

    Shape: query, key, value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed; joint (…,
    3, heads, head_width).
    """
    inputs = AttentionInputs(
        query,
        key,
        value,
        layout,
        key_layout or layout,
        is_causal,
        dropout=dropout,
        window=window,
        sparse=sparse,
        rounding=rounding,
        bias=bias,
        joint=joint,
    )
    return choose(BACKENDS, backend, inputs).compute(inputs)


def attention_map(
    query: Tensor,
    key: Tensor,
    layout: SequenceLayout,
    *,
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
    window: int | None = None,
    sparse: SparseMap | None = None,
    rounding: SoftmaxRounding | None = None,
    bias: RelativeBias | None = None,
) -> Tensor:
    """Return the attention probabilities, (batch, heads, queries, keys), 0 at padding."""
    inputs = AttentionInputs(
        query,
        key,
        key,
        layout,
        key_layout or layout,
        is_causal=is_causal,
        window=window,
        sparse=sparse,
        rounding=rounding,
        bias=bias,
    )
    return reference.probabilities(inputs.padded())


def attention_scores(
    query: Tensor,
    key: Tensor,
    layout: SequenceLayout,
    *,
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
    window: int | None = None,
    bias: RelativeBias | None = None,
) -> Tensor:
    """Return QKᵀ/√head_width plus the bias, the scores before the softmax: (batch, heads, queries, keys).

    Masked pairs, and rows and columns of padding, are -inf.
    """
    inputs = AttentionInputs(
        query, key, key, layout, key_layout or layout, is_causal=is_causal, window=window, bias=bias
    )
    return reference.scores(inputs.padded())
