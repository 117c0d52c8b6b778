"""Convolutions by kernels of their own: what moves is what comes in and what goes out, once each."""

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops import kernel_support as support
from bertsmith.ops.conv.reference import DepthwiseInputs, LightConvInputs, reach
from bertsmith.ops.dropout import fresh_seed
from bertsmith.ops.kernel_support import SequenceRows, as_laid, by_row

MAX_KERNEL_SIZE = 31
"""The kernels are written out tap by tap when they are compiled; with more of them registers run out."""
WIDEST_HEAD = 1024
"""A program of the light convolution holds whole rows of a head."""


def unsupported(inputs: DepthwiseInputs | LightConvInputs) -> str | None:
    taken, kernel_size = _parts(inputs)
    reason = support.unsupported(taken) or support.unsupported(kernel_size)
    if reason is not None:
        return reason
    if kernel_size.shape[-1] > MAX_KERNEL_SIZE:
        return f"there are {kernel_size.shape[-1]} taps and the kernel takes {MAX_KERNEL_SIZE} at most"
    if isinstance(inputs, LightConvInputs) and taken.shape[-1] > WIDEST_HEAD:
        return f"the head width is {taken.shape[-1]} and the kernel takes {WIDEST_HEAD} at most"
    return None


def wanted(inputs: DepthwiseInputs | LightConvInputs) -> bool:
    return support.is_wanted(_parts(inputs)[0])


def depthwise(inputs: DepthwiseInputs) -> Tensor:
    """The convolved states, in the shape of `hidden`; 0 at pads.

    Under autocast they come in its dtype, as from PyTorch's own convolutions: to be rounded later is one more pass.
    """
    hidden = _gapless(by_row(inputs.hidden, inputs.layout))
    spans, room = _positions(inputs, hidden.device)
    before, _ = reach(inputs.kernel.shape[-1], inputs.is_causal)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    mixed: Tensor = _depthwise(hidden, inputs.kernel, spans.first, spans.length, spans.max_length, room, before, dtype)
    return as_laid(mixed, inputs.layout)


def light_conv(inputs: LightConvInputs) -> Tensor:
    """The convolved values, in the shape of `value`; 0 at pads."""
    value = _gapless(by_row(inputs.value, inputs.layout))
    is_shared = inputs.scores.dim() == 2
    scores = inputs.scores.expand(value.shape[0], -1, -1) if is_shared else by_row(inputs.scores, inputs.layout)
    spans, room = _positions(inputs, value.device)
    before, _ = reach(scores.shape[-1], inputs.is_causal)
    seed = None
    if inputs.dropout > 0:
        seed = fresh_seed(value.device)
    mixed, _ = _light_conv(
        value,
        _gapless(scores),
        spans.first,
        spans.length,
        seed,
        spans.max_length,
        room,
        before,
        inputs.dropout,
        is_shared,
    )
    return as_laid(mixed, inputs.layout)


def _parts(inputs: DepthwiseInputs | LightConvInputs) -> tuple[Tensor, Tensor]:
    """What is convolved, and what its taps are made of."""
    if isinstance(inputs, DepthwiseInputs):
        return inputs.hidden, inputs.kernel
    return inputs.value, inputs.scores


def _positions(inputs: DepthwiseInputs | LightConvInputs, device: torch.device) -> tuple[SequenceRows, int]:
    """Where sequences lie, and how many rows each has at least: those beyond its tokens are written as zeros."""
    layout = inputs.layout
    if layout.is_packed:
        return SequenceRows.of(layout, device), 0
    if inputs.legacy_padding:
        layout = SequenceLayout.full(layout.batch, layout.max_length)  # pads are as good as tokens
    return SequenceRows.of(layout, device), layout.max_length


def _gapless(tensor: Tensor) -> Tensor:
    """The tensor itself if the numbers of its last axis are neighbours in memory, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _light_conv_forward(
    value: Tensor,
    scores: Tensor,
    first: Tensor,
    length: Tensor,
    seed: Tensor | None,
    max_length: int,
    room: int,
    before: int,
    dropout: float,
    is_shared: bool,
) -> tuple[Tensor, Tensor]:
    from bertsmith.ops.conv import light_kernels

    rows = SequenceRows(first, length, max_length)
    return light_kernels.forward(value, scores, rows, seed, room, before, dropout, is_shared)


def _light_conv_backward(
    gradient: Tensor,
    normaliser: Tensor,
    value: Tensor,
    scores: Tensor,
    first: Tensor,
    length: Tensor,
    seed: Tensor | None,
    max_length: int,
    room: int,
    before: int,
    dropout: float,
    is_shared: bool,
) -> tuple[Tensor, Tensor]:
    from bertsmith.ops.conv import light_kernels

    settings = (SequenceRows(first, length, max_length), seed, room, before, dropout, is_shared)
    return light_kernels.backward(_gapless(gradient), value, scores, normaliser, *settings)


def _fake_light_conv(value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), value.new_empty(value.shape[:2], dtype=torch.float32)


def _fake_light_conv_gradients(
    gradient: Tensor, normaliser: Tensor, value: Tensor, scores: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), scores.new_empty(scores.shape)


_light_conv = support.register_op(
    "light_conv",
    forward=_light_conv_forward,
    fake_forward=_fake_light_conv,
    backward=_light_conv_backward,
    fake_backward=_fake_light_conv_gradients,
    saves_result=False,
)


def _depthwise_forward(
    hidden: Tensor,
    kernel: Tensor,
    first: Tensor,
    length: Tensor,
    max_length: int,
    room: int,
    before: int,
    dtype: torch.dtype,
) -> Tensor:
    from bertsmith.ops.conv.depthwise_kernels import convolve

    return convolve(hidden, kernel, SequenceRows(first, length, max_length), room, before, dtype)


def _depthwise_backward(
    gradient: Tensor,
    hidden: Tensor,
    kernel: Tensor,
    first: Tensor,
    length: Tensor,
    max_length: int,
    room: int,
    before: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    from bertsmith.ops.conv.depthwise_kernels import convolve, kernel_gradient

    gradient, rows = _gapless(gradient), SequenceRows(first, length, max_length)
    turned = convolve(gradient, kernel, rows, room, before, hidden.dtype, is_turned=True)
    summed = kernel_gradient(gradient, hidden, kernel.shape[1], rows, before)
    return turned, summed.to(kernel.dtype).contiguous()


def _fake_depthwise(
    hidden: Tensor,
    kernel: Tensor,
    first: Tensor,
    length: Tensor,
    max_length: int,
    room: int,
    before: int,
    dtype: torch.dtype,
) -> Tensor:
    return hidden.new_empty(hidden.shape, dtype=dtype)


def _fake_depthwise_gradients(gradient: Tensor, hidden: Tensor, kernel: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), kernel.new_empty(kernel.shape)


_depthwise = support.register_op(
    "depthwise",
    forward=_depthwise_forward,
    fake_forward=_fake_depthwise,
    backward=_depthwise_backward,
    fake_backward=_fake_depthwise_gradients,
    saves_result=False,
)
