"""Inputs and reference of attention, differentiable in any dtype; fast implementations are tested against it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertsmith.errors import InputError
from bertsmith.ops.attention.bias import RelativeBias
from bertsmith.ops.query_key_value import QueryKeyValueInputs, through_padding
from bertsmith.ops.rounded_softmax import SoftmaxRounding, rounded_softmax
from bertsmith.ops.sparse import SparseMap, sparse_probabilities


@dataclass(frozen=True)
class AttentionInputs(QueryKeyValueInputs):
    """Inputs of attention; with `sparse`, the weights are sparse instead of a softmax, with `rounding`, rounded.

    A `bias` is added to the scores. `joint`, (…, 3, heads, head_width), holds query, key and value if they are slices
    of one tensor.
    """

    dropout: float = 0.0
    window: int | None = None
    sparse: SparseMap | None = None
    rounding: SoftmaxRounding | None = None
    bias: RelativeBias | None = None
    joint: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and not self.has_order:
            raise InputError(
                f"window is {self.window}, but key_layout differs from the queries' layout; allowed: self-attention"
            )

    def is_near(self) -> Tensor | None:
        """Return the mask of keys in each query's window, (max_length, max_length); None without a window."""
        if self.window is None:
            return None
        position = torch.arange(self.layout.max_length, device=self.query.device)
        return (position[:, None] - position).abs() <= self.window

    def bias_matrix(self, dtype: torch.dtype) -> Tensor | None:
        """Return the bias of every pair of padded inputs, (heads, queries, keys); None without a bias."""
        if self.bias is None:
            return None
        return self.bias.matrix(self.layout.max_length, self.key_layout.max_length, dtype)


def unsupported(inputs: AttentionInputs) -> str | None:
    return None


@through_padding
def attention(inputs: AttentionInputs) -> Tensor:
    """Return the attention output in the layout of the query."""
    weights = torch.dropout(probabilities(inputs), inputs.dropout, train=inputs.dropout > 0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, inputs.value)


def probabilities(inputs: AttentionInputs) -> Tensor:
    """Return the probabilities of padded inputs (Vaswani et al. 2017, eq. 1): (batch, heads, queries, keys)."""
    scores, allowed = _scores(inputs)
    if inputs.sparse is not None:
        return sparse_probabilities(scores, allowed, inputs.sparse)
    if inputs.rounding is not None:
        return rounded_softmax(scores, allowed, inputs.layout.is_token, inputs.rounding)
    # finite, so that an empty sequence gives zeros and not NaN
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~allowed, 0.0)


def scores(inputs: AttentionInputs) -> Tensor:
    """Return the scores of padded inputs, at least in float32; -inf at masked pairs and at padding."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        wide = torch.promote_types(inputs.query.dtype, torch.float32)
        scores, allowed = _scores(replace(inputs, query=inputs.query.to(wide), key=inputs.key.to(wide)))
        if inputs.layout.is_token is not None:
            allowed = allowed & inputs.layout.is_token[:, None, :, None]
        return scores.masked_fill(~allowed, -torch.inf)


def _scores(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return scores and attention mask of padded inputs, (batch, heads or 1, queries, keys)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs.query, inputs.key) / inputs.query.shape[-1] ** 0.5
    bias = inputs.bias_matrix(scores.dtype)
    scores = scores if bias is None else scores + bias
    allowed = torch.ones_like(scores[:, :1], dtype=torch.bool)
    if inputs.key_layout.is_token is not None:
        allowed = allowed & inputs.key_layout.is_token[:, None, None, :]
    is_near = inputs.is_near()
    if is_near is not None:
        allowed = allowed & is_near
    if inputs.is_causal:
        allowed = allowed.tril()
    return scores, allowed
