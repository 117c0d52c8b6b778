"""Disentangled attention by Triton kernels: packed and padded, both directions of the gradient, dropout inside."""

import torch
from torch import Tensor

from bertsmith.ops import kernel_support as support
from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.dropout import fresh_seed
from bertsmith.ops.kernel_support import SequenceRows, from_rows, to_rows

HEAD_WIDTHS = (16, 32, 64, 128)
BAND = 2048  # more columns than the buffer of any relative table in use has


def unsupported(inputs: DisentangledInputs) -> str | None:
    reason = support.unsupported(inputs.query)
    if reason is not None:
        return reason
    width = inputs.query.shape[-1]
    if width not in HEAD_WIDTHS:
        return f"the head width is {width} and the kernel takes {', '.join(map(str, HEAD_WIDTHS))}"
    if inputs.value.shape[-1] != width:
        return f"the head width of value, {inputs.value.shape[-1]}, differs from that of key, {width}"
    if inputs.query_positions is not None and not (inputs.relative and inputs.relative.are_distinct):
        return "queries have places of their own that are not known to be distinct places of keys"
    max_length, heads = max(inputs.layout.max_length, inputs.key_layout.max_length), inputs.query.shape[-2]
    if max_length * heads * min(max_length, BAND) >= 2**31:
        return f"a sequence may have {max_length} tokens, and places in it are numbers of 32 bits"
    if inputs.layout.max_length == 0 or inputs.key_layout.max_length == 0:
        return "all sequences are empty"
    return None


def preferred(inputs: DisentangledInputs) -> bool:
    return support.is_preferred(inputs.query)


def disentangled(inputs: DisentangledInputs) -> Tensor:
    """The attention output, in the shape and dtype of the query; 0 at pads."""
    query, dtype = to_rows(inputs.query, inputs.layout), inputs.query.dtype
    key, value = (to_rows(states, inputs.key_layout).to(dtype) for states in (inputs.key, inputs.value))
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
        fresh_seed(query.device) if inputs.dropout else None,
        spans.max_length,
        key_spans.max_length,
        inputs.scale,
        inputs.dropout,
        inputs.is_causal,
        inputs.layout.is_token is not None or inputs.key_layout.is_token is not None,
    )
    return from_rows(mixed, inputs.layout)


def _by_head(states: Tensor) -> Tensor:
    """The states with heads and widths in one run of memory; rows may be apart, as those of a joint projection are."""
    _, heads, width = states.shape
    is_laid = states.stride(2) == 1 and (states.stride(1) == width or heads == 1)
    return states if is_laid else states.contiguous()


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
    has_pads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from bertsmith.ops.disentangled.kernels.forward import forward
    from bertsmith.ops.disentangled.kernels.launch import Launch

    launch = Launch(
        query, key, value, position_key, position_query, slots, first, length, key_first, key_length, positions, seed,
        max_length, max_key_length, scale, dropout, is_causal, has_pads,
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
    from bertsmith.ops.disentangled.kernels.plan import are_kept, buffers

    held = buffers(
        max_length, max_key_length, 0 if slots is None else slots.shape[0] // 2, has_positions=positions is not None
    )
    kept = [
        states.new_empty(*states.shape[:2], buffer.columns)
        if table is not None and are_kept(*held)
        else query.new_empty(0)
        for states, table, buffer in zip((query, key), (position_key, position_query), held, strict=True)
    ]
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32), *kept


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
    has_pads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from bertsmith.ops.disentangled.kernels.backward import backward
    from bertsmith.ops.disentangled.kernels.launch import Launch

    launch = Launch(
        query, key, value, position_key, position_query, slots, first, length, key_first, key_length, positions, seed,
        max_length, max_key_length, scale, dropout, is_causal, has_pads,
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
