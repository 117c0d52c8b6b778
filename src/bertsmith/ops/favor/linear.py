"""Linear attention in linear time and memory: no matrix over pairs of positions, no tensor (length, features, width).

The backward pass recomputes features and states, so that training saves only query, key, value and the output.
With V1 = [V 1], φ the features, and the row sums in the last column of O1 (Choromanski et al. 2021, section 3):

    bidirectional     S = φ(K)ᵀV1,  O1 = φ(Q)S
    causal, chunk c   S_c = Σ_{b<c} φ(K_b)ᵀV1_b,  O1_c = φ(Q_c)S_c + tril(φ(Q_c)φ(K_c)ᵀ)V1_c

A causal key is divided by exp(level), the largest exponent up to it. Products between positions of different levels are
multiplied by exp(difference) ≤ 1: nothing overflows, and no token depends on later ones.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bertsmith.ops.dispatch import is_exporting
from bertsmith.ops.favor.features import RandomFeatures, SideFeatures, gradient, key_side, query_side, with_ones
from bertsmith.ops.favor.reference import FavorInputs
from bertsmith.ops.query_key_value import through_padding


def unsupported(inputs: FavorInputs) -> str | None:
    if inputs.is_causal and is_exporting() and not isinstance(inputs.layout.max_length, int):
        return "causal attention needs the number of chunks, but a graph is exported with a dynamic length"
    return None


@through_padding
def favor(inputs: FavorInputs) -> Tensor:
    """Return the attention output in the shape of the query."""
    features = inputs.features
    mixed, _ = _Linear.apply(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.key_layout.is_token,
        features.random_matrix,
        features.feature_map,
        features.epsilon,
        _chunk(inputs) if inputs.is_causal else 0,
    )
    return mixed


def _chunk(inputs: FavorInputs) -> int:
    """Return the positions per chunk; a short sequence is one chunk."""
    return max(1, min(inputs.key.shape[1], inputs.chunk))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_token: Tensor | None,
        random_matrix: Tensor,
        feature_map: str,
        epsilon: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        # built here, because only tensor arguments can be saved for the backward pass
        features = RandomFeatures(random_matrix, feature_map, epsilon)
        with torch.autocast(query.device.type, enabled=False):
            values = with_ones(value)
            if chunk:
                keys = key_side(key, features, is_token, is_causal=True)
                sums = _causal(query_side(query, features), keys, values, chunk)
            else:
                # the features of the keys are freed before the features of the queries are computed
                state = key_side(key, features, is_token, is_causal=False).features.mT @ values
                sums = query_side(query, features).features @ state
            total = sums[..., -1:]  # (batch, heads, length, 1)
            total = torch.where(total == 0, 1.0, total)
            mixed = (sums[..., :-1] / total).transpose(1, 2)
            if mixed.dtype != value.dtype:
                # no `to` without effect: in compiled code such an output of an autograd function has no gradient (2.11)
                mixed = mixed.to(value.dtype)
        ctx.save_for_backward(query, key, value, is_token, random_matrix, mixed, total)
        ctx.feature_map, ctx.epsilon, ctx.chunk = feature_map, epsilon, chunk
        ctx.mark_non_differentiable(total)
        return mixed, total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, is_token, random_matrix, mixed, total = ctx.saved_tensors
        features = RandomFeatures(random_matrix, ctx.feature_map, ctx.epsilon)
        with torch.autocast(query.device.type, enabled=False):
            queries = query_side(query, features)
            keys = key_side(key, features, is_token, is_causal=ctx.chunk > 0)
            values = with_ones(value)
            by_mixed = upstream.to(values.dtype).transpose(1, 2) / total
            by_total = -(by_mixed * mixed.to(values.dtype).transpose(1, 2)).sum(-1, keepdim=True)
            by_sums = torch.cat([by_mixed, by_total], -1)
            if ctx.chunk:
                by_queries, by_keys, by_values = _causal_gradient(queries, keys, values, by_sums, ctx.chunk)
            else:
                state, by_state = keys.features.mT @ values, queries.features.mT @ by_sums
                by_queries, by_keys, by_values = by_sums @ state.mT, values @ by_state.mT, keys.features @ by_state
            by_query = gradient(queries, features, by_queries, query)
            by_key = gradient(keys, features, by_keys, key)
            by_value = by_values[..., :-1].transpose(1, 2).to(value.dtype)
        return by_query, by_key, by_value, None, None, None, None, None


class _Chunks(NamedTuple):
    """Inputs of the causal products by chunk, and the factors between the levels of their positions.

    Shape: queries, keys (batch, heads, chunks, chunk, width), values (…, chunk, head_width + 1), within (…, chunk,
    chunk), entering and leaving (…, chunk, 1), between (batch, heads, chunks, chunks).
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    within: Tensor
    """Factor from key to query of one chunk; 0 for future keys."""
    entering: Tensor
    """Factor from the state before the chunk to each query."""
    leaving: Tensor
    """Factor from each key to the end of its chunk."""
    between: Tensor
    """Factor from the end of chunk b (column) to the state before chunk c (row); 0 unless b < c."""


def _chunks(query: SideFeatures, key: SideFeatures, values: Tensor, chunk: int) -> _Chunks:
    queries, keys, values = (_split(tensor, chunk) for tensor in (query.features, key.features, values))
    # the last level is repeated in the padding, whose keys are 0, so that levels never decrease
    missing = keys.shape[2] * chunk - key.level.shape[-2]
    last = key.level[..., -1:, :]
    level = torch.cat([key.level, last.expand(*last.shape[:-2], missing, 1)], -2)
    level = level.unflatten(-2, (-1, chunk))  # (batch, heads, length, 1) -> (batch, heads, chunks, chunk, 1)
    ends = level[..., -1, 0]  # (batch, heads, chunks)
    starts = torch.cat([level[:, :, :1, 0, 0], ends[..., :-1]], -1)
    count = torch.arange(chunk, device=level.device)
    is_future = count > count[:, None]
    count = torch.arange(ends.shape[-1], device=level.device)
    is_not_before = count >= count[:, None]
    return _Chunks(
        queries,
        keys,
        values,
        within=(level.mT - level).masked_fill(is_future, -torch.inf).exp(),
        entering=(starts[..., None, None] - level).exp(),
        leaving=(level - ends[..., None, None]).exp(),
        between=(ends[..., None, :] - starts[..., None]).masked_fill(is_not_before, -torch.inf).exp(),
    )


def _split(tensor: Tensor, chunk: int) -> Tensor:
    """Split into chunks, padded with zeros: (batch, heads, length, …) -> (batch, heads, chunks, chunk, …)."""
    length = tensor.shape[2]
    missing = (length + chunk - 1) // chunk * chunk - length
    return pad(tensor, (0, 0, 0, missing)).unflatten(2, (-1, chunk))


def _carried(between: Tensor, sums: Tensor) -> Tensor:
    """Return every chunk's weighted sum over other chunks: (batch, heads, chunks, width, head_width + 1)."""
    return (between @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])


def _causal(queries: SideFeatures, keys: SideFeatures, values: Tensor, chunk: int) -> Tensor:
    """Return sums of [V 1] over all keys up to each query: (batch, heads, length, head_width + 1)."""
    c = _chunks(queries, keys, values, chunk)
    states = _carried(c.between, (c.keys * c.leaving).mT @ c.values)
    sums = (c.queries @ c.keys.mT * c.within) @ c.values + c.entering * (c.queries @ states)
    return sums.flatten(2, 3)[:, :, : values.shape[2]]


def _causal_gradient(
    queries: SideFeatures, keys: SideFeatures, values: Tensor, by_sums: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the features of queries and keys, and of [V 1]."""
    c, by_sums = _chunks(queries, keys, values, chunk), _split(by_sums, chunk)
    states = _carried(c.between, (c.keys * c.leaving).mT @ c.values)
    by_states = _carried(c.between.mT, (c.queries * c.entering).mT @ by_sums)
    pairs = c.queries @ c.keys.mT * c.within
    by_pairs = by_sums @ c.values.mT * c.within
    by_queries = by_pairs @ c.keys + c.entering * (by_sums @ states.mT)
    by_keys = by_pairs.mT @ c.queries + c.leaving * (c.values @ by_states.mT)
    by_values = pairs.mT @ by_sums + c.leaving * (c.keys @ by_states)
    length = values.shape[2]
    by_queries, by_keys, by_values = (
        tensor.flatten(2, 3)[:, :, :length] for tensor in (by_queries, by_keys, by_values)
    )
    return by_queries, by_keys, by_values
