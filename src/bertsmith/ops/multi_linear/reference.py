"""Inputs and reference of multi-linear attention: the whole third-order tensor of every sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.ops.query_key_value import QueryKeyValueInputs, through_padding


@dataclass(frozen=True, kw_only=True)
class MultiLinearInputs(QueryKeyValueInputs):
    """Inputs of multi-linear attention.

    Shape: query, key, value (batch, length, rank), or (tokens, rank) when packed; pairs (max_length, max_length, …).
    """

    pairs: Tensor

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return query, key, value and the pairs of padded inputs, at least in float32; 0 at padding.

        Products of three factors leave the range of half precision.
        """
        wide, length = torch.promote_types(self.query.dtype, torch.float32), self.layout.max_length
        query, key, value = (tensor.to(wide) for tensor in masked(self))
        return query, key, value, self.pairs[:length, :length].to(wide)

    def counts(self) -> Tensor:
        """Return the number of pairs of each query of padded inputs, (batch, length or 1, 1)."""
        if self.is_causal:
            return torch.arange(1, self.layout.max_length + 1, device=self.query.device).square()[None, :, None]
        # an empty sequence has no pairs
        return self.layout.lengths(self.query.device).clamp_min(1).square()[:, None, None]


def masked(inputs: MultiLinearInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of padded inputs, 0 at padding."""
    is_token = inputs.layout.is_token
    if is_token is None:
        return inputs.query, inputs.key, inputs.value
    query, key, value = (tensor.where(is_token[..., None], 0.0) for tensor in (inputs.query, inputs.key, inputs.value))
    return query, key, value


def unsupported(inputs: MultiLinearInputs) -> str | None:
    return None


@through_padding
def multi_linear(inputs: MultiLinearInputs) -> Tensor:
    """Return the output in the layout of the query (Ma et al. 2019, eq. 7, with one core inside the query)."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        query, key, value, pairs = inputs.rows()
        tensor = torch.einsum("bir,bjr,bmr->bijm", query, key, value)  # (batch, length, length, length)
        if inputs.is_causal:
            position = torch.arange(tensor.shape[1], device=tensor.device)
            is_past = position[:, None] >= position  # (queries, keys)
            tensor = tensor.where(is_past[:, :, None] & is_past[:, None, :], 0.0)
        mixed = torch.einsum("bijm,jmo->bio", tensor, pairs) / inputs.counts()
        return mixed.to(inputs.query.dtype)
