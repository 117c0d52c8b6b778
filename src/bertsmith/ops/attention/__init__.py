"""Softmax attention inside each sequence: `attention` for the output, `attention_map` for the probabilities."""

from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.attention import grouped, products, reference, sdpa, varlen
from bertsmith.ops.attention.reference import AttentionInputs
from bertsmith.ops.dispatch import Implementation, Implementations, choose

BACKENDS: Implementations[AttentionInputs] = {
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
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """softmax(QKᵀ/√head_width)V over the real tokens of each query's own sequence, in the layout of `query`.

    `key_layout` says how key and value lie where they are not the queries' own sequences; the i-th sequence of queries
    looks at the i-th sequence of keys. With a `window`, a query looks no further than so many tokens to each side.

    Shape: query, key, value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed.
    """
    inputs = AttentionInputs(
        query, key, value, layout, key_layout or layout, is_causal=is_causal, dropout=dropout, window=window
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
) -> Tensor:
    """The attention probabilities, (batch, heads, longest, longest key); rows are queries, pads get 0."""
    inputs = AttentionInputs(query, key, key, layout, key_layout or layout, is_causal=is_causal, window=window)
    return reference.probabilities(inputs.padded())


def attention_scores(
    query: Tensor,
    key: Tensor,
    layout: SequenceLayout,
    *,
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """QKᵀ/√head_width, of which the softmax is taken: (batch, heads, longest, longest key).

    Rows are queries; -inf where one does not look, and in every row and column of a pad.
    """
    inputs = AttentionInputs(query, key, key, layout, key_layout or layout, is_causal=is_causal, window=window)
    return reference.scores(inputs.padded())
