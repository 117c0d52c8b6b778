"""Disentangled attention (He et al. 2021): `disentangled` for the output, `disentangled_terms` for the maps."""

from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.disentangled import blocks, fused, grouped, products, reference, sdpa
from bertsmith.ops.disentangled.positions import RelativePositions, bucket_slots, linear_slots, mirrored_rows
from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.dispatch import Implementation, Implementations, choose
from bertsmith.ops.sparse import SparseMap

__all__ = [
    "BACKENDS",
    "RelativePositions",
    "bucket_slots",
    "disentangled",
    "disentangled_scores",
    "disentangled_terms",
    "linear_slots",
    "mirrored_rows",
]

BACKENDS: Implementations[DisentangledInputs, Tensor] = {
    "triton": Implementation(fused.disentangled, fused.unsupported, fused.preferred),
    "blocks": Implementation(blocks.disentangled, blocks.unsupported, blocks.preferred),
    "grouped": Implementation(grouped.disentangled, grouped.unsupported, grouped.preferred),
    "sdpa": Implementation(sdpa.disentangled, sdpa.unsupported),
    "products": Implementation(products.disentangled, products.unsupported),
    "reference": Implementation(reference.disentangled, reference.unsupported),
}


def disentangled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_key: Tensor | None,
    position_query: Tensor | None,
    layout: SequenceLayout,
    relative: RelativePositions | None,
    *,
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
    sparse: SparseMap | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Return softmax(content·content + content·position + position·content)V, in the shape of `query`.

    The score of query i and key j is (Qᵢ·Kⱼ + Qᵢ·PKᵣ + Kⱼ·PQᵣ) / √(head_width · terms), where r is the row of the
    relative table for i − j. None for position_key or position_query omits that term; without both, `relative` is not
    needed. With `sparse`, sparse weights replace the softmax.
    Shape: query (batch, length, heads, head_width), or (tokens, heads, head_width) when packed; key and value likewise
    in `key_layout` (None for the queries' layout); position_key, position_query (rows, heads, head_width).
    """
    inputs = DisentangledInputs(
        query,
        key,
        value,
        layout,
        key_layout or layout,
        is_causal,
        position_key=position_key,
        position_query=position_query,
        relative=relative,
        dropout=dropout,
        sparse=sparse,
    )
    return choose(BACKENDS, backend, inputs).compute(inputs)


def disentangled_terms(
    query: Tensor,
    key: Tensor,
    position_key: Tensor | None,
    position_query: Tensor | None,
    layout: SequenceLayout,
    relative: RelativePositions | None,
    *,
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
    sparse: SparseMap | None = None,
) -> dict[str, Tensor]:
    """Return the probabilities ("attention") and the scaled terms of the scores by name, 0 at padding.

    Shape: each (batch, heads, queries, keys).
    """
    inputs = DisentangledInputs(
        query,
        key,
        key,
        layout,
        key_layout or layout,
        is_causal,
        position_key=position_key,
        position_query=position_query,
        relative=relative,
        sparse=sparse,
    )
    return reference.terms(inputs)


def disentangled_scores(
    query: Tensor,
    key: Tensor,
    position_key: Tensor | None,
    position_query: Tensor | None,
    layout: SequenceLayout,
    relative: RelativePositions | None,
    *,
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return the scores before the softmax: (batch, heads, queries, keys).

    Masked pairs, and rows and columns of padding, are -inf.
    """
    inputs = DisentangledInputs(
        query,
        key,
        key,
        layout,
        key_layout or layout,
        is_causal,
        position_key=position_key,
        position_query=position_query,
        relative=relative,
    )
    return reference.scores(inputs)
