"""Linear attention in Triton kernels: features are made where they are used and never written to memory.

In half precision the random matrix is rounded to the precision of the inputs, as any weight under autocast is, and so
are features and their sums where a tensor core multiplies them; all sums, exponents and row sums are float32.
"""

from typing import Any

import torch
from torch import Tensor

from bertsmith.ops import kernel_support as support
from bertsmith.ops.dispatch import is_exporting
from bertsmith.ops.favor.reference import FavorInputs
from bertsmith.ops.kernel_support import Spans, as_laid, by_row


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
    from bertsmith.ops.favor.kernels.causal import read, states
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
    from bertsmith.ops.favor.kernels.causal_backward import key_gradient, query_gradient, sums_after
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


def _keep_causal(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.numbers = inputs[6:]
    # nothing comes back for what the backward pass alone reads
    ctx.set_materialize_grads(False)


def _causal_gradients(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 13
    return *_favor_causal_backward(upstream, *ctx.saved_tensors, *ctx.numbers), *(None,) * 10


favor_causal.register_autograd(_causal_gradients, setup_context=_keep_causal)


_HEAD_WIDTHS = (16, 32, 64, 128)
_MOST_FEATURES = 512
_CHUNK = 32
"""Positions of one causal chunk. Wider ones save states, but from 64 rows on Triton multiplies with the instructions of
a warp group, which read shared memory on their own: the gradients found wrong on a GPU came from such kernels."""


def unsupported(inputs: FavorInputs) -> str | None:
    if is_exporting():
        return "a graph is exported, which cannot hold the kernel"
    features, width, value_width = inputs.features, inputs.query.shape[-1], inputs.value.shape[-1]
    if features.map.curve is not None and features.feature_map != "relu":
        return f"feature_map is {features.feature_map!r} and the kernel knows exponential maps and relu"
    if width not in _HEAD_WIDTHS:
        return f"the head width is {width} and the kernel takes {', '.join(map(str, _HEAD_WIDTHS))}"
    if value_width != width:
        return f"the head width of value, {value_width}, differs from that of key, {width}"
    if not 1 <= features.width <= _MOST_FEATURES:
        return f"there are {features.width} features and the kernel takes 1 to {_MOST_FEATURES}"
    return support.unsupported(inputs.query)


def wanted(inputs: FavorInputs) -> bool:
    return support.is_wanted(inputs.query)


def favor(inputs: FavorInputs) -> Tensor:
    """The mixed values, in the shape of the query; 0 at pads."""
    layout, key_layout, feature_map = inputs.layout, inputs.key_layout, inputs.features.map
    query = _rows(by_row(inputs.query, layout), inputs.query.dtype)
    key, value = (_rows(by_row(tensor, key_layout), query.dtype) for tensor in (inputs.key, inputs.value))
    spans = Spans.of(layout, query.device)
    key_spans = spans if key_layout is layout else Spans.of(key_layout, query.device)
    # head_width^(-1/4) of the queries and keys is in the matrix, so that they are read as they are
    matrix = inputs.features.rows(query.new_empty(0, query.shape[-1], dtype=torch.float32)) * query.shape[-1] ** -0.25
    matrix = matrix.to(query.dtype).contiguous()
    curve = (feature_map.curve is None, feature_map.norm, inputs.features.added)
    if inputs.is_causal:
        # the kernels have chunks of their own: `chunk` changes no number beyond rounding
        sizes = (padded(matrix.shape[0]), _CHUNK)
        has_pads = layout.is_token is not None
        mixed = favor_causal(
            query, key, value, matrix, spans.first, spans.length, spans.longest, has_pads, *sizes, *curve
        )[0]
        return as_laid(mixed.to(inputs.value.dtype), layout)
    mixed = _favor(
        query,
        key,
        value,
        matrix,
        spans.first,
        spans.length,
        key_spans.first,
        key_spans.length,
        spans.longest,
        key_spans.longest,
        layout.is_token is not None,
        key_layout.is_token is not None,
        *curve,
    )[0]
    return as_laid(mixed.to(inputs.value.dtype), layout)


def _rows(states: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernels take any strides but the last, which is 1."""
    states = states.to(dtype)
    return states if states.stride(-1) == 1 else states.contiguous()


def padded(features: int) -> int:
    """Features as the kernels count them: a power of two up to 256, then whole blocks of 128."""
    if features <= 256:
        return max(16, 1 << (features - 1).bit_length())
    return -(-features // 128) * 128


@torch.library.custom_op("bertsmith::favor", mutates_args=())
def _favor(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    key_first: Tensor,
    key_length: Tensor,
    longest: int,
    key_longest: int,
    has_pads: bool,
    key_has_pads: bool,
    is_exponential: bool,
    norm: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(mixed, by_row, epsilon_share, mean, bias, shift, reach), as the kernels name them."""
    from bertsmith.ops.favor.kernels.features import Curve
    from bertsmith.ops.favor.kernels.memory import remembered
    from bertsmith.ops.favor.kernels.reading import read

    curve = Curve(is_exponential, norm, epsilon)
    mean, bias, shift, reach = remembered(
        key, value, matrix, key_first, key_length, key_longest, curve, padded(matrix.shape[0])
    )
    mixed, rows, share = read(query, matrix, first, length, longest, mean, bias, reach, curve, has_pads)
    return mixed, rows, share, mean, bias, shift, reach


@_favor.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, matrix: Tensor, first: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (tokens, heads, width), batch = query.shape, first.shape[0]
    features = padded(matrix.shape[0])
    by_feature = (query.new_empty(batch, heads, features, dtype=torch.float32) for _ in range(2))
    return (
        query.new_empty(tokens, heads, width),
        *(query.new_empty(tokens, heads, dtype=torch.float32) for _ in range(2)),
        query.new_empty(batch, heads, features, width),
        *by_feature,
        query.new_empty(batch, heads, width + 1, dtype=torch.float32),
    )


@torch.library.custom_op("bertsmith::favor_backward", mutates_args=())
def _favor_backward(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    key_first: Tensor,
    key_length: Tensor,
    mixed: Tensor,
    rows: Tensor,
    share: Tensor,
    mean: Tensor,
    bias: Tensor,
    shift: Tensor,
    reach: Tensor,
    longest: int,
    key_longest: int,
    has_pads: bool,
    key_has_pads: bool,
    is_exponential: bool,
    norm: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    from bertsmith.ops.favor.kernels.features import Curve
    from bertsmith.ops.favor.kernels.memory_backward import key_gradient, summed
    from bertsmith.ops.favor.kernels.reading import query_gradient

    curve = Curve(is_exponential, norm, epsilon)
    upstream = _rows(upstream, query.dtype)
    by_query, by_total = query_gradient(
        query, upstream, matrix, first, length, longest, mean, bias, reach, mixed, rows, share, curve, has_pads
    )
    sums, along, floor = summed(
        query, upstream, matrix, first, length, longest, key_length, bias, shift, rows, share, by_total, curve
    )
    by_key, by_value = key_gradient(
        key, value, matrix, key_first, key_length, key_longest, shift, sums, along, floor, curve, key_has_pads
    )
    return by_query, by_key, by_value


@_favor_backward.register_fake
def _(upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    by_query, by_key, by_value = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return by_query, by_key, by_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.numbers = inputs[8:]
    # nothing comes back for what the backward pass alone reads
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 15
    return *_favor_backward(upstream, *ctx.saved_tensors, *ctx.numbers), *(None,) * 12


_favor.register_autograd(_gradients, setup_context=_keep)
