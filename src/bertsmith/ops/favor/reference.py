"""Inputs and reference of linear attention: the matrix of all pairs, differentiable in any dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.errors import InputError
from bertsmith.ops.favor.features import RandomFeatures, key_side, query_side
from bertsmith.ops.query_key_value import QueryKeyValueInputs, through_padding


@dataclass(frozen=True, kw_only=True)
class FavorInputs(QueryKeyValueInputs):
    """Inputs of linear attention."""

    features: RandomFeatures
    chunk: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise InputError(f"chunk is {self.chunk}; allowed: 1 or more")


def unsupported(inputs: FavorInputs) -> str | None:
    return None


@through_padding
def favor(inputs: FavorInputs) -> Tensor:
    """Return the attention output in the shape of the query."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        weights = probabilities(inputs)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, inputs.value.to(weights.dtype))
    return mixed.to(inputs.value.dtype)


def probabilities(inputs: FavorInputs) -> Tensor:
    """Return φ(Q)φ(K)ᵀ divided by its row sums (Choromanski et al. 2021, eq. 4), for padded inputs.

    Shape: (batch, heads, queries, keys).
    """
    queries = query_side(inputs.query, inputs.features)
    keys = key_side(inputs.key, inputs.features, inputs.key_layout.is_token, is_causal=inputs.is_causal)
    scores = queries.features @ keys.features.mT  # (batch, heads, queries, keys)
    if inputs.is_causal:
        # the key of column j was divided by exp(level j), but row i needs one common level, level i
        positions = torch.arange(scores.shape[-1], device=scores.device)
        is_future = positions > positions[:, None]
        scores = scores * (keys.level.mT - keys.level).masked_fill(is_future, -torch.inf).exp()
    total = scores.sum(-1, keepdim=True)
    # an empty sequence gives zeros and not NaN
    return scores / torch.where(total == 0, 1.0, total)
