"""Linear attention token by token: a state of fixed size instead of all past keys and values."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bertsmith.ops.favor.features import features, project, row_level, scaled, sequence_level, widened
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
    kernel, matrix = inputs.rule, inputs.matrix
    is_token = None if inputs.key_layout.is_token is None else inputs.key_layout.is_token[:, None, :, None]
    with torch.autocast(inputs.key.device.type, enabled=False):
        keys = project(scaled(inputs.key, matrix).transpose(1, 2), widened(matrix, kernel), kernel, is_token)
        level = sequence_level(keys)
        values = pad(inputs.value.to(matrix.dtype).transpose(1, 2), (0, 1), value=1.0)  # [V 1]
        return FavorState(features(keys, level, inputs.epsilon, is_token).mT @ values, level)


def extended(inputs: FavorInputs, state: FavorState) -> FavorState:
    """The state with one more key and value for every sequence.

    Shape: key and value of the inputs (batch, 1, heads, head_width).
    """
    kernel, matrix = inputs.rule, inputs.matrix
    with torch.autocast(inputs.key.device.type, enabled=False):
        keys = project(scaled(inputs.key, matrix).transpose(1, 2), widened(matrix, kernel), kernel)
        level = torch.maximum(state.level, row_level(keys))
        values = pad(inputs.value.to(matrix.dtype).transpose(1, 2), (0, 1), value=1.0)  # [V 1]
        sums = state.sums * (state.level - level).exp() + features(keys, level, inputs.epsilon).mT @ values
    return FavorState(sums, level)


def read(inputs: FavorInputs, state: FavorState) -> Tensor:
    """What the queries take from the state, in the shape of the query.

    Shape: query of the inputs (batch, length, heads, head_width).
    """
    kernel, matrix = inputs.rule, inputs.matrix
    with torch.autocast(inputs.query.device.type, enabled=False):
        queries = project(scaled(inputs.query, matrix).transpose(1, 2), widened(matrix, kernel), kernel)
        sums = features(queries, row_level(queries), inputs.epsilon) @ state.sums
        total = sums[..., -1:]
        mixed = sums[..., :-1] / torch.where(total == 0, 1.0, total)
    return mixed.transpose(1, 2).to(inputs.query.dtype)
