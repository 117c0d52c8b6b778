"""Softmax attention inside each sequence: `attention` for the output, `attention_map` for the probabilities."""

from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.ops.attention import reference, sdpa, varlen
from bertsmith.ops.attention.inputs import AttentionInputs
from bertsmith.ops.dispatch import Form, choose

FORMS: dict[str, Form[AttentionInputs]] = {
    "varlen": Form(varlen.attention, varlen.unsupported),
    "sdpa": Form(sdpa.attention, sdpa.unsupported),
    "reference": Form(reference.attention, reference.unsupported),
}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SequenceLayout,
    *,
    is_causal: bool = False,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """softmax(QKᵀ/√head_width)V over the real tokens of each query's own sequence, in the shape of `query`.

    Shape: query, key, value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed.
    """
    inputs = AttentionInputs(query, key, value, layout, is_causal=is_causal, dropout=dropout)
    return choose(FORMS, backend, inputs).compute(inputs)


def attention_map(query: Tensor, key: Tensor, layout: SequenceLayout, *, is_causal: bool = False) -> Tensor:
    """The attention probabilities, (batch, heads, longest, longest); rows are queries, pads get 0."""
    return reference.probabilities(AttentionInputs(query, key, key, layout, is_causal=is_causal))
