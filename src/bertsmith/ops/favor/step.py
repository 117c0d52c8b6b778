"""Linear attention token by token: a state of fixed size instead of all past keys and values."""

from typing import NamedTuple

import torch
from torch import Tensor

from bertsmith.ops.favor.features import key_side, query_side, with_ones
from bertsmith.ops.favor.inputs import FavorInputs, padded


class FavorState(NamedTuple):
    """What linear attention keeps of the keys and values it has seen.

    Shape: sums (batch, heads, feature width, value width + 1), level (batch, heads, 1, 1): the sums are divided by its
    exponential.
    """

    sums: Tensor
    level: Tensor


def empty_state(batch: int, heads: int, width: int, value_width: int, like: Tensor) -> FavorState:
    """The state before the first token, in the precision and on the device of `like`."""
    sums = torch.zeros(batch, heads, width, value_width + 1, dtype=like.dtype, device=like.device)
    level = torch.full((batch, heads, 1, 1), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
    return FavorState(sums, level)


def whole_state(inputs: FavorInputs) -> FavorState:
    """The state after all keys and values of each sequence, for queries that see every one of them."""
    inputs = padded(inputs)
    with torch.autocast(inputs.key.device.type, enabled=False):
        is_token = inputs.key_layout.is_token
        keys = key_side(inputs.key, inputs.rows, inputs.rule, inputs.epsilon, is_token, is_causal=False)
        return FavorState(keys.features.mT @ with_ones(inputs.value, inputs.rows), keys.level)


def extended(inputs: FavorInputs, state: FavorState) -> FavorState:
    """The state with one more key and value for every sequence.

    Shape: key and value of the inputs (batch, 1, heads, head_width).
    """
    with torch.autocast(inputs.key.device.type, enabled=False):
        keys = key_side(inputs.key, inputs.rows, inputs.rule, 0.0, None, is_causal=False)
        level = torch.maximum(state.level, keys.level)
        # ε is relative to the largest feature so far
        features = keys.features * (keys.level - level).exp() + inputs.epsilon
        sums = state.sums * (state.level - level).exp() + features.mT @ with_ones(inputs.value, inputs.rows)
    return FavorState(sums, level)


def read(inputs: FavorInputs, state: FavorState) -> Tensor:
    """What the queries take from the state: (batch, length, heads, value width).

    Shape: query of the inputs (batch, length, heads, head_width).
    """
    with torch.autocast(inputs.query.device.type, enabled=False):
        queries = query_side(inputs.query, inputs.rows, inputs.rule, inputs.epsilon)
        sums = queries.features @ state.sums
        total = sums[..., -1:]
        mixed = sums[..., :-1] / torch.where(total == 0, 1.0, total)
    return mixed.transpose(1, 2).to(inputs.query.dtype)
