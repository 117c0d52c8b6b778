"""Inputs and reference of attention: short, differentiable in any dtype; fast implementations are tested against it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertsmith.errors import InputError
from bertsmith.ops.attending import AttendingInputs, through_padding


@dataclass(frozen=True)
class AttentionInputs(AttendingInputs):
    """One call of attention."""

    dropout: float = 0.0
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and not self.has_order:
            raise InputError(
                f"window is {self.window} and the keys have a layout of their own; allowed: the queries' own keys"
            )

    def is_near(self) -> Tensor | None:
        """Which keys stand in a query's window, in padded rows: (longest, longest); None where all do."""
        if self.window is None:
            return None
        position = torch.arange(self.layout.max_length, device=self.query.device)
        return (position[:, None] - position).abs() <= self.window


def unsupported(inputs: AttentionInputs) -> str | None:
    return None


@through_padding
def attention(inputs: AttentionInputs) -> Tensor:
    """The attention output, in the layout of the query."""
    weights = torch.dropout(probabilities(inputs), inputs.dropout, train=inputs.dropout > 0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, inputs.value)


def probabilities(inputs: AttentionInputs) -> Tensor:
    """Vaswani et al. 2017, eq. 1, without the value, in padded rows: (batch, heads, longest, longest key)."""
    scores, allowed = _scores(inputs)
    # a finite floor, so that an empty sequence gives zeros and not NaN
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~allowed, 0.0)


def scores(inputs: AttentionInputs) -> Tensor:
    """What that softmax is taken of, in at least float32; -inf where a query does not look, and at pads."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        wide = torch.promote_types(inputs.query.dtype, torch.float32)
        found, allowed = _scores(replace(inputs, query=inputs.query.to(wide), key=inputs.key.to(wide)))
        if inputs.layout.is_token is not None:
            allowed = allowed & inputs.layout.is_token[:, None, :, None]
        return found.masked_fill(~allowed, -torch.inf)


def _scores(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The scores of padded rows, (batch, heads, queries, keys), and which keys a query may look at."""
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs.query, inputs.key) / inputs.query.shape[-1] ** 0.5
    allowed = torch.ones_like(scores[:, :1], dtype=torch.bool)
    if inputs.key_layout.is_token is not None:
        allowed = allowed & inputs.key_layout.is_token[:, None, None, :]
    is_near = inputs.is_near()
    if is_near is not None:
        allowed = allowed & is_near
    if inputs.is_causal:
        allowed = allowed.tril()
    return scores, allowed
