"""Linear attention token by token: a state of fixed size instead of all past keys and values."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.favor.features import RandomFeatures, key_side, query_side, with_ones


class FavorState(NamedTuple):
    """Decoding state of linear attention: sums over the keys and values so far.

    Shape: sums (batch, heads, feature width, value width + 1), divided by exp(level); level (batch, heads, 1, 1).
    """

    sums: Tensor
    level: Tensor


def favor_start(batch: int, heads: int, features: RandomFeatures, *, value_width: int | None = None) -> FavorState:
    """Return the state before the first token; `value_width` defaults to the width of keys."""
    matrix = features.random_matrix
    sums = matrix.new_zeros(batch, heads, features.width, (value_width or matrix.shape[-1]) + 1)
    return FavorState(sums, torch.full_like(sums[..., :1, :1], torch.finfo(sums.dtype).min))


def favor_memory(key: Tensor, value: Tensor, features: RandomFeatures, layout: SequenceLayout) -> FavorState:
    """Return the state after all keys and values of each sequence, for `favor_read`.

    Shape: key, value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed.
    """
    key, rows_layout = layout.pad(key)
    value, _ = layout.pad(value)
    with torch.autocast(key.device.type, enabled=False):
        keys = key_side(key, features, rows_layout.is_token, is_causal=False)
        return FavorState(keys.features.mT @ with_ones(value), keys.level)


def favor_step(
    query: Tensor, key: Tensor, value: Tensor, state: FavorState, features: RandomFeatures
) -> tuple[Tensor, FavorState]:
    """Return the attention output of the next token of every sequence, and the new state.

    Shape: query, key, value (batch, heads, head_width).
    """
    state = favor_absorb(key, value, state, features)
    return favor_read(query, state, features), state


def favor_absorb(key: Tensor, value: Tensor, state: FavorState, features: RandomFeatures) -> FavorState:
    """Return the state after the next key and value of every sequence, each (batch, heads, head_width)."""
    with torch.autocast(key.device.type, enabled=False):
        keys = key_side(key[:, None], replace(features, epsilon=0.0), None, is_causal=False)
        level = torch.maximum(state.level, keys.level)
        # ε is relative to the largest feature so far
        new = keys.features * (keys.level - level).exp() + features.added_epsilon
        sums = state.sums * (state.level - level).exp() + new.mT @ with_ones(value[:, None])
    return FavorState(sums, level)


def favor_read(query: Tensor, state: FavorState, features: RandomFeatures) -> Tensor:
    """Return the attention output of one query per sequence, (batch, heads, value width), for an unchanged state.

    Shape: query (batch, heads, head_width).
    """
    with torch.autocast(query.device.type, enabled=False):
        sums = query_side(query[:, None], features).features @ state.sums  # (batch, heads, 1, value width + 1)
        total = sums[..., -1:]
        mixed = sums[..., :-1] / torch.where(total == 0, 1.0, total)
    return mixed[:, :, 0].to(query.dtype)
