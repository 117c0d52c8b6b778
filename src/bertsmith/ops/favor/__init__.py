"""Linear-time attention by random features, FAVOR+ (Choromanski et al. 2021).

`favor` returns the output, `favor_map` the estimated probabilities; `favor_start`, `favor_memory`, `favor_step`,
`favor_absorb` and `favor_read` are for decoding. All take `RandomFeatures`, whose random matrix `draw` returns.
"""

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.dispatch import Implementation, Implementations, choose
from bertsmith.ops.favor import fused, linear, reference
from bertsmith.ops.favor.feature_maps import FEATURE_MAPS, FeatureMapName, draw
from bertsmith.ops.favor.features import RandomFeatures
from bertsmith.ops.favor.reference import FavorInputs
from bertsmith.ops.favor.step import FavorState, favor_absorb, favor_memory, favor_read, favor_start, favor_step

__all__ = [
    "BACKENDS",
    "FEATURE_MAPS",
    "FavorState",
    "FeatureMapName",
    "RandomFeatures",
    "draw",
    "favor",
    "favor_absorb",
    "favor_map",
    "favor_memory",
    "favor_read",
    "favor_start",
    "favor_step",
]

BACKENDS: Implementations[FavorInputs, Tensor] = {
    "triton": Implementation(fused.favor, fused.unsupported, fused.preferred),
    "linear": Implementation(linear.favor, linear.unsupported),
    "reference": Implementation(reference.favor, reference.unsupported),
}


def favor(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: RandomFeatures,
    layout: SequenceLayout,
    *,
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
    chunk: int = 128,
    backend: str = "auto",
) -> Tensor:
    """Return φ(Q)φ(K)ᵀV divided by its row sums, over the real tokens of each sequence.

    Features, sums and row sums are float32 (float64 for float64 inputs), also under autocast. For exponential feature
    maps ε is relative to the largest feature of the query, and of the keys of the sequence (causal: the keys so far).
    The kernel ("triton", the choice of "auto" on a GPU) multiplies in the precision of the inputs: in half precision
    the random matrix is rounded, like any weight under autocast, and so are features and means of values; exponents and
    sums stay float32. It returns 0 at padding and ignores `chunk`.

    Shape: query, key, value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed.
    """
    inputs = FavorInputs(query, key, value, layout, key_layout or layout, is_causal, features=features, chunk=chunk)
    return choose(BACKENDS, backend, inputs).compute(inputs)


def favor_map(
    query: Tensor,
    key: Tensor,
    features: RandomFeatures,
    layout: SequenceLayout,
    *,
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return the estimated attention probabilities, (batch, heads, queries, keys), 0 at padding."""
    inputs = FavorInputs(query, key, key, layout, key_layout or layout, is_causal, features=features)
    with torch.autocast(query.device.type, enabled=False):
        return reference.probabilities(inputs.padded())
