"""Attention of sequences of at most 128 tokens by Triton kernels: packed and padded, with dropout."""

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops import kernel_support as support
from bertsmith.ops.attention.bias import NO_BIAS
from bertsmith.ops.attention.reference import AttentionInputs
from bertsmith.ops.dropout import new_seed
from bertsmith.ops.kernel_support import SequenceRows, from_rows, to_rows
from bertsmith.ops.rounded_softmax import FUSED
from bertsmith.ops.sparse import SOFTMAX_ONLY

HEAD_WIDTHS = (16, 32, 64, 128)
MAX_LENGTH = 128
DTYPES = (torch.float16, torch.bfloat16)


def unsupported(inputs: AttentionInputs) -> str | None:
    if inputs.rounding is not None:
        return FUSED
    if inputs.sparse is not None:
        return SOFTMAX_ONLY
    if inputs.bias is not None:
        return NO_BIAS
    reason = support.unsupported(inputs.query)
    if reason is not None:
        return reason
    if inputs.query.dtype not in DTYPES:  # a score matrix in float32 does not fit in the registers
        return f"the tensors are {inputs.query.dtype}, but the kernel supports float16 and bfloat16"
    if not inputs.has_order:
        return "key_layout differs from the queries' layout, but the kernel is for self-attention"
    width = inputs.query.shape[-1]
    if width not in HEAD_WIDTHS:
        return f"the head width is {width}, but the kernel supports {', '.join(map(str, HEAD_WIDTHS))}"
    if inputs.value.shape[-1] != width:
        return f"values have head width {inputs.value.shape[-1]} and keys {width}, but must have the same"
    if not 0 < inputs.layout.max_length <= MAX_LENGTH:
        return f"max_length is {inputs.layout.max_length}, but the kernel supports 1 to {MAX_LENGTH}"
    return None


def preferred(inputs: AttentionInputs) -> bool:
    return support.is_preferred(inputs.query)


def attention(inputs: AttentionInputs) -> Tensor:
    """Return the attention output in the layout of the query; 0 at padding."""
    layout, device = inputs.layout, inputs.query.device
    joint = inputs.joint
    if joint is None:
        parts = (inputs.query, inputs.key, inputs.value)
        joint = torch.stack([part.to(inputs.query.dtype) for part in parts], dim=-3)
    mixed = _short_attention(
        _last_axis_contiguous(to_rows(joint, layout)),
        *_bounds(layout, device),
        new_seed(device) if inputs.dropout else None,
        layout.max_length,
        inputs.dropout,
        inputs.is_causal,
        inputs.window or 0,
        layout.is_token is not None,
    )
    return from_rows(mixed, layout)


def _bounds(layout: SequenceLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first row of every sequence and the row after its last, (batch,), int32; views if packed."""
    if layout.starts is not None:
        starts = layout.starts.to(torch.int32)
        return starts[:-1], starts[1:]
    rows = SequenceRows.of(layout, device)
    return rows.first, rows.first + rows.length


def _last_axis_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if its last axis is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _memory(joint: Tensor, *shape: int, has_padding: bool) -> Tensor:
    """Return memory for an output; zeros if there is padding, which no kernel writes."""
    return joint.new_zeros(shape) if has_padding else joint.new_empty(shape)


def _forward(
    joint: Tensor,
    first: Tensor,
    end: Tensor,
    seed: Tensor | None,
    max_length: int,
    dropout: float,
    is_causal: bool,
    window: int,
    has_padding: bool,
) -> Tensor:
    from bertsmith.ops.attention import short_kernels

    mixed = _memory(joint, joint.shape[0], *joint.shape[2:], has_padding=has_padding)
    launch = short_kernels.ShortLaunch(first, end, seed, max_length, dropout, is_causal, window)
    short_kernels.forward(joint, mixed, launch)
    return mixed


def _backward(
    upstream: Tensor,
    joint: Tensor,
    first: Tensor,
    end: Tensor,
    seed: Tensor | None,
    max_length: int,
    dropout: float,
    is_causal: bool,
    window: int,
    has_padding: bool,
) -> tuple[Tensor]:
    from bertsmith.ops.attention import short_kernels

    gradient = _memory(joint, *joint.shape, has_padding=has_padding)
    launch = short_kernels.ShortLaunch(first, end, seed, max_length, dropout, is_causal, window)
    short_kernels.backward(_last_axis_contiguous(upstream), joint, gradient, launch)
    return (gradient,)


def _fake_forward(joint: Tensor, *_: object) -> Tensor:
    return joint.new_empty(joint.shape[0], *joint.shape[2:])


def _fake_backward(upstream: Tensor, joint: Tensor, *_: object) -> tuple[Tensor]:
    return (joint.new_empty(joint.shape),)


_short_attention = support.register_op(
    "short_attention",
    forward=_forward,
    fake_forward=_fake_forward,
    backward=_backward,
    fake_backward=_fake_backward,
    saves_result=False,
)
