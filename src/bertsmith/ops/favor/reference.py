"""Linear attention written out with the whole matrix of products: quadratic, obvious, differentiable in any dtype."""

import torch
from torch import Tensor

from bertsmith.ops.attending import through_padding
from bertsmith.ops.favor.features import key_side, query_side
from bertsmith.ops.favor.inputs import FavorInputs


def unsupported(inputs: FavorInputs) -> str | None:
    return None


@through_padding
def favor(inputs: FavorInputs) -> Tensor:
    """The mixed values, in the shape of the query."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        weights = probabilities(inputs)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, inputs.value.to(weights.dtype))
    return mixed.to(inputs.value.dtype)


def probabilities(inputs: FavorInputs) -> Tensor:
    """φ(Q)φ(K)ᵀ over its row sums (Choromanski et al. 2021, eq. 4), in padded rows.

    Shape: (batch, heads, queries' longest, keys' longest).
    """
    queries = query_side(inputs.query, inputs.features)
    keys = key_side(inputs.key, inputs.features, inputs.key_layout.is_token, is_causal=inputs.is_causal)
    scores = queries.features @ keys.features.mT  # (batch, heads, queries, keys)
    if inputs.is_causal:
        # the key of column j was divided by exp(level j); row i has one common level, its own
        places = torch.arange(scores.shape[-1], device=scores.device)
        is_future = places > places[:, None]
        scores = scores * (keys.level.mT - keys.level).masked_fill(is_future, -torch.inf).exp()
    total = scores.sum(-1, keepdim=True)
    # an empty sequence gives zeros and not NaN
    return scores / torch.where(total == 0, 1.0, total)
