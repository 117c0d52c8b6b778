"""Linear attention written out with the whole matrix of products: quadratic, obvious, differentiable in any dtype."""

import torch
from torch import Tensor

from bertsmith.ops.favor.features import features, project, row_level, running_level, scaled, sequence_level, widened
from bertsmith.ops.favor.inputs import FavorInputs, padded, through_padding


def unsupported(inputs: FavorInputs) -> str | None:
    return None


def favor(inputs: FavorInputs) -> Tensor:
    """The mixed values, in the shape of the query."""
    if inputs.layout.is_packed or inputs.key_layout.is_packed:
        return through_padding(favor, inputs)
    with torch.autocast(inputs.query.device.type, enabled=False):
        weights = probabilities(inputs)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, inputs.value.to(weights.dtype))
    return mixed.to(inputs.value.dtype)


def probabilities(inputs: FavorInputs) -> Tensor:
    """φ(Q)φ(K)ᵀ over its row sums (Choromanski et al. 2021, eq. 4): (batch, heads, queries' longest, keys' longest)."""
    inputs = padded(inputs)
    kernel, matrix = inputs.rule, inputs.matrix
    small = widened(matrix, kernel)
    is_token = None if inputs.key_layout.is_token is None else inputs.key_layout.is_token[:, None, :, None]
    # (batch, length, heads, head_width) -> (batch, heads, length, head_width)
    queries = project(scaled(inputs.query, matrix).transpose(1, 2), small, kernel)
    keys = project(scaled(inputs.key, matrix).transpose(1, 2), small, kernel, is_token)
    level = running_level(keys) if inputs.is_causal else sequence_level(keys)
    left = features(queries, row_level(queries), inputs.epsilon)
    right = features(keys, level, inputs.epsilon, is_token)
    scores = left @ right.mT  # (batch, heads, queries, keys)
    if inputs.is_causal:
        # the key of column j was divided by exp(level j); row i has one common level, its own
        places = torch.arange(scores.shape[-1], device=scores.device)
        is_future = places > places[:, None]
        scores = scores * (level.mT - level).masked_fill(is_future, -torch.inf).exp()
    total = scores.sum(-1, keepdim=True)
    # an empty sequence gives zeros and not NaN
    return scores / torch.where(total == 0, 1.0, total)
