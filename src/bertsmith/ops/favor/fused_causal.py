"""The causal ops of the fused form: chunks within which pairs are multiplied out, and a state before each of them."""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("bertsmith::favor_causal", mutates_args=())
def favor_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    longest: int,
    has_pads: bool,
    padded: int,
    chunk: int,
    is_exponential: bool,
    norm: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(mixed, by_row, query_level, own, level, level_before, mean, size, size_after), as the kernels name them."""
    from bertsmith.ops.favor.kernels.causal import read
    from bertsmith.ops.favor.kernels.causal_states import states
    from bertsmith.ops.favor.kernels.features import Curve

    curve = Curve(is_exponential, norm, epsilon)
    mean, size, size_after, own, level, level_before = states(
        key, value, matrix, first, length, longest, curve, padded, chunk
    )
    mixed, by_row, query_level = read(
        query, key, value, matrix, first, length, longest,
        mean, size, own, level, level_before, curve, has_pads, chunk,
    )  # fmt: skip
    return mixed, by_row, query_level, own, level, level_before, mean, size, size_after


@favor_causal.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    longest: int,
    has_pads: bool,
    padded: int,
    chunk: int,
    *rest: Any,
) -> tuple[Tensor, ...]:
    (tokens, heads, width), slots = query.shape, query.shape[0] // chunk + first.shape[0]
    return (
        query.new_empty(tokens, heads, width),
        *(query.new_empty(tokens, heads, dtype=torch.float32) for _ in range(4)),
        query.new_empty(slots, heads, dtype=torch.float32),
        query.new_empty(slots, heads, padded, width),
        *(query.new_empty(slots, heads, padded, dtype=torch.float32) for _ in range(2)),
    )


@torch.library.custom_op("bertsmith::favor_causal_backward", mutates_args=())
def _favor_causal_backward(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    mixed: Tensor,
    by_row: Tensor,
    query_level: Tensor,
    own: Tensor,
    level: Tensor,
    level_before: Tensor,
    mean: Tensor,
    size: Tensor,
    size_after: Tensor,
    longest: int,
    has_pads: bool,
    padded: int,
    chunk: int,
    is_exponential: bool,
    norm: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    from bertsmith.ops.favor.kernels.causal_backward import key_gradient, query_gradient
    from bertsmith.ops.favor.kernels.causal_sums import sums_after
    from bertsmith.ops.favor.kernels.features import Curve

    curve = Curve(is_exponential, norm, epsilon)
    upstream = upstream.to(query.dtype)
    upstream = upstream if upstream.stride(-1) == 1 else upstream.contiguous()
    by_query, by_total = query_gradient(
        query, key, value, upstream, mixed, matrix, first, length, longest,
        mean, size, own, level, by_row, query_level, curve, has_pads, chunk,
    )  # fmt: skip
    later, later_along = sums_after(
        query, upstream, matrix, first, length, longest,
        size, size_after, level_before, by_row, query_level, by_total, curve, chunk,
    )  # fmt: skip
    by_key, by_value = key_gradient(
        query, key, value, upstream, matrix, first, length, longest,
        size_after, later, later_along, own, level, by_row, query_level, by_total, curve, has_pads, chunk,
    )  # fmt: skip
    return by_query, by_key, by_value


@_favor_causal_backward.register_fake
def _(upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    by_query, by_key, by_value = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return by_query, by_key, by_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.numbers = inputs[6:]
    # nothing comes back for what the backward pass alone reads
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 13
    return *_favor_causal_backward(upstream, *ctx.saved_tensors, *ctx.numbers), *(None,) * 10


favor_causal.register_autograd(_gradients, setup_context=_keep)
