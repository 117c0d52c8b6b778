"""Disentangled attention by Triton kernels: packed and padded, forward and backward, with dropout."""

import torch
from torch import Tensor

from bertsmith.ops import kernel_support as support
from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.dropout import new_seed
from bertsmith.ops.kernel_support import SequenceRows, from_rows, to_rows
from bertsmith.ops.sparse import SOFTMAX_ONLY

HEAD_WIDTHS = (16, 32, 64, 128)
BAND = 2048  # upper bound of the buffer columns for all published relative tables


def unsupported(inputs: DisentangledInputs) -> str | None:
    if inputs.sparse is not None:
        return SOFTMAX_ONLY
    reason = support.unsupported(inputs.query)
    if reason is not None:
        return reason
    width = inputs.query.shape[-1]
    if width not in HEAD_WIDTHS:
        return f"the head width is {width}, but the kernel supports {', '.join(map(str, HEAD_WIDTHS))}"
    if inputs.value.shape[-1] != width:
        return f"values have head width {inputs.value.shape[-1]} and keys {width}, but must have the same"
    if inputs.query_positions is not None and not (inputs.relative and inputs.relative.are_distinct):
        return "query_positions are set, but not known to be distinct positions of keys (are_distinct)"
    max_length, heads = max(inputs.layout.max_length, inputs.key_layout.max_length), inputs.query.shape[-2]
    if max_length * heads * min(max_length, BAND) >= 2**31:
        return f"sequences of {max_length} tokens need indices of more than 32 bits"
    if inputs.layout.max_length == 0 or inputs.key_layout.max_length == 0:
        return "all sequences are empty"
    return None


def preferred(inputs: DisentangledInputs) -> bool:
    return support.is_preferred(inputs.query)


def disentangled(inputs: DisentangledInputs) -> Tensor:
    """Return the attention output in the shape and dtype of the query; 0 at padding."""
    query, dtype = to_rows(inputs.query, inputs.layout), inputs.query.dtype
    key, value = (to_rows(tensor, inputs.key_layout).to(dtype) for tensor in (inputs.key, inputs.value))
    spans = SequenceRows.of(inputs.layout, query.device)
    key_spans = spans if inputs.key_layout is inputs.layout else SequenceRows.of(inputs.key_layout, query.device)
    tables = [
        None if table is None else _by_head(table.to(dtype)) for table in (inputs.position_key, inputs.position_query)
    ]
    has_positions = inputs.position_key is not None or inputs.position_query is not None
    positions = inputs.query_positions if has_positions or inputs.is_causal else None
    mixed, *_ = _disentangled(
        _by_head(query),
        _by_head(key),
        _by_head(value),
        *tables,
        inputs.relative.slots if has_positions and inputs.relative is not None else None,
        spans.first,
        spans.length,
        key_spans.first,
        key_spans.length,
        None if positions is None else positions.flatten(),
        new_seed(query.device) if inputs.dropout else None,
        spans.max_length,
        key_spans.max_length,
        inputs.scale,
        inputs.dropout,
        inputs.is_causal,
        inputs.layout.is_token is not None or inputs.key_layout.is_token is not None,
    )
    return from_rows(mixed, inputs.layout)


def _by_head(tensor: Tensor) -> Tensor:
    """Make the last two axes contiguous; rows may have any stride, as slices of a joint projection have."""
    _, heads, width = tensor.shape
    is_contiguous = tensor.stride(2) == 1 and (tensor.stride(1) == width or heads == 1)
    return tensor if is_contiguous else tensor.contiguous()


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_key: Tensor | None,
    position_query: Tensor | None,
    slots: Tensor | None,
    first: Tensor,
    length: Tensor,
    key_first: Tensor,
    key_length: Tensor,
    positions: Tensor | None,
    seed: Tensor | None,
    max_length: int,
    max_key_length: int,
    scale: float,
    dropout: float,
    is_causal: bool,
    has_padding: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from bertsmith.ops.disentangled.kernels.forward import forward
    from bertsmith.ops.disentangled.kernels.launch import Launch

    launch = Launch(
        query, key, value, position_key, position_query, slots, first, length, key_first, key_length, positions, seed,
        max_length, max_key_length, scale, dropout, is_causal, has_padding,
    )  # fmt: skip
    return forward(launch)


def _fake_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_key: Tensor | None,
    position_query: Tensor | None,
    slots: Tensor | None,
    first: Tensor,
    length: Tensor,
    key_first: Tensor,
    key_length: Tensor,
    positions: Tensor | None,
    seed: Tensor | None,
    max_length: int,
    max_key_length: int,
    *_: object,
) -> tuple[Tensor, ...]:
    from bertsmith.ops.disentangled.kernels.plan import are_saved, buffers

    by_side = buffers(
        max_length, max_key_length, 0 if slots is None else slots.shape[0] // 2, has_positions=positions is not None
    )
    scores = [
        tensor.new_empty(*tensor.shape[:2], buffer.columns)
        if table is not None and are_saved(*by_side)
        else query.new_empty(0)
        for tensor, table, buffer in zip((query, key), (position_key, position_query), by_side, strict=True)
    ]
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32), *scores


def _backward(
    upstream: Tensor,
    mixed: Tensor,
    log_mass: Tensor,
    by_query: Tensor,
    by_key: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_key: Tensor | None,
    position_query: Tensor | None,
    slots: Tensor | None,
    first: Tensor,
    length: Tensor,
    key_first: Tensor,
    key_length: Tensor,
    positions: Tensor | None,
    seed: Tensor | None,
    max_length: int,
    max_key_length: int,
    scale: float,
    dropout: float,
    is_causal: bool,
    has_padding: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from bertsmith.ops.disentangled.kernels.backward import backward
    from bertsmith.ops.disentangled.kernels.launch import Launch

    launch = Launch(
        query, key, value, position_key, position_query, slots, first, length, key_first, key_length, positions, seed,
        max_length, max_key_length, scale, dropout, is_causal, has_padding,
    )  # fmt: skip
    return backward(launch, upstream.contiguous(), mixed, log_mass, by_query, by_key)


def _fake_backward(
    upstream: Tensor,
    mixed: Tensor,
    log_mass: Tensor,
    by_query: Tensor,
    by_key: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_key: Tensor | None,
    position_query: Tensor | None,
    *_: object,
) -> tuple[Tensor, ...]:
    tables = [
        query.new_empty(0) if table is None else table.new_empty(table.shape)
        for table in (position_key, position_query)
    ]
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), *tables


_disentangled = support.register_op(
    "disentangled", forward=_forward, fake_forward=_fake_forward, backward=_backward, fake_backward=_fake_backward
)
