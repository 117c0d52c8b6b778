"""Multi-linear attention without the third-order tensor: the sequence makes one (rank, width) matrix for all queries.

out[i] = Σ_r Q[i, r] · M[r] with M[r] = Σ_{j,m} K[j, r] V[m, r] W[j, m]. If it is causal, M is a running sum over the
tokens.
"""

import torch
from torch import Tensor

from bertsmith.ops.cumulative_sum import cumulative_sum
from bertsmith.ops.multi_linear.reference import MultiLinearInputs
from bertsmith.ops.query_key_value import through_padding


def unsupported(inputs: MultiLinearInputs) -> str | None:
    return None


@through_padding
def multi_linear(inputs: MultiLinearInputs) -> Tensor:
    """Return the output in the layout of the query."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        query, key, value, pairs = inputs.rows()
        mixed = _causal(query, key, value, pairs) if inputs.is_causal else query @ _memory(key, value, pairs)
        return (mixed / inputs.counts()).to(inputs.query.dtype)


def _memory(key: Tensor, value: Tensor, pairs: Tensor) -> Tensor:
    """Return M of each sequence, (batch, rank, width)."""
    key, value = key.mT, value.mT  # (batch, length, rank) -> (batch, rank, length)
    by_pair = (key[..., :, None] * value[..., None, :]).flatten(-2)  # (batch, rank, length · length)
    return by_pair @ pairs.flatten(0, 1)


def _causal(query: Tensor, key: Tensor, value: Tensor, pairs: Tensor) -> Tensor:
    """Return the sums over j, m ≤ i, (batch, length, width): token i adds the pairs whose later token it is."""
    position = torch.arange(pairs.shape[0], device=pairs.device)
    is_key_last = (position[:, None] >= position)[..., None]  # (length, length, 1): m ≤ j
    by_key = torch.einsum("bmr,jmo->bjro", value, pairs.where(is_key_last, 0.0))
    by_value = torch.einsum("bjr,jmo->bmro", key, pairs.where(~is_key_last, 0.0))
    # (batch, length, rank, width)
    memory = cumulative_sum(key[..., None] * by_key + value[..., None] * by_value, 1)
    return torch.einsum("bir,biro->bio", query, memory)
