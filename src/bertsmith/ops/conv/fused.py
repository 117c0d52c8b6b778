"""Convolutions by kernels of their own: what moves is what comes in and what goes out, once each."""

from typing import Any

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops import kernel_support as support
from bertsmith.ops.conv.reference import DepthwiseInputs, LightConvInputs, reach
from bertsmith.ops.dropout import fresh_seed
from bertsmith.ops.kernel_support import Spans, as_laid, by_row

MOST_TAPS = 31
"""The kernels are written out tap by tap when they are compiled; with more of them registers run out."""
WIDEST_HEAD = 1024
"""A program of the light convolution holds whole rows of a head."""


def unsupported(inputs: DepthwiseInputs | LightConvInputs) -> str | None:
    taken, taps = _parts(inputs)
    reason = support.unsupported(taken) or support.unsupported(taps)
    if reason is not None:
        return reason
    if taps.shape[-1] > MOST_TAPS:
        return f"there are {taps.shape[-1]} taps and the kernel takes {MOST_TAPS} at most"
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
    spans, room = _places(inputs, hidden.device)
    before, _ = reach(inputs.kernel.shape[-1], inputs.is_causal)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    mixed = _depthwise(hidden, inputs.kernel, spans.first, spans.length, spans.longest, room, before, dtype)
    return as_laid(mixed, inputs.layout)


def light_conv(inputs: LightConvInputs) -> Tensor:
    """The convolved values, in the shape of `value`; 0 at pads."""
    value = _gapless(by_row(inputs.value, inputs.layout))
    is_shared = inputs.scores.dim() == 2
    scores = inputs.scores.expand(value.shape[0], -1, -1) if is_shared else by_row(inputs.scores, inputs.layout)
    spans, room = _places(inputs, value.device)
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
        spans.longest,
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


def _places(inputs: DepthwiseInputs | LightConvInputs, device: torch.device) -> tuple[Spans, int]:
    """Where sequences lie, and how many rows each has at least: those beyond its tokens are written as zeros."""
    layout = inputs.layout
    if layout.is_packed:
        return Spans.of(layout, device), 0
    if inputs.legacy_padding:
        layout = SequenceLayout.full(layout.batch, layout.longest)  # pads are as good as tokens
    return Spans.of(layout, device), layout.longest


def _gapless(tensor: Tensor) -> Tensor:
    """The tensor itself if the numbers of its last axis are neighbours in memory, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@torch.library.custom_op("bertsmith::light_conv", mutates_args=())
def _light_conv(
    value: Tensor,
    scores: Tensor,
    first: Tensor,
    length: Tensor,
    seed: Tensor | None,
    longest: int,
    room: int,
    before: int,
    dropout: float,
    is_shared: bool,
) -> tuple[Tensor, Tensor]:
    from bertsmith.ops.conv import light_kernels as light

    return light.forward(value, scores, first, length, seed, longest, room, before, dropout, is_shared)


@_light_conv.register_fake
def _(value: Tensor, scores: Tensor, *places: Any) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), value.new_empty(value.shape[:2], dtype=torch.float32)


@torch.library.custom_op("bertsmith::light_conv_backward", mutates_args=())
def _light_conv_backward(
    gradient: Tensor,
    value: Tensor,
    scores: Tensor,
    normaliser: Tensor,
    first: Tensor,
    length: Tensor,
    seed: Tensor | None,
    longest: int,
    room: int,
    before: int,
    dropout: float,
    is_shared: bool,
) -> tuple[Tensor, Tensor]:
    from bertsmith.ops.conv import light_kernels as light

    places = (first, length, seed, longest, room, before, dropout, is_shared)
    return light.backward(_gapless(gradient), value, scores, normaliser, *places)


@_light_conv_backward.register_fake
def _(gradient: Tensor, value: Tensor, scores: Tensor, *places: Any) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), scores.new_empty(scores.shape)


def _keep_light_conv(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    value, scores, first, length, seed, *ctx.numbers = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(value, scores, output[1], first, length, seed)


def _light_conv_gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _light_conv_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *gradients, *[None] * (3 + len(ctx.numbers))


_light_conv.register_autograd(_light_conv_gradients, setup_context=_keep_light_conv)


@torch.library.custom_op("bertsmith::depthwise", mutates_args=())
def _depthwise(
    hidden: Tensor,
    kernel: Tensor,
    first: Tensor,
    length: Tensor,
    longest: int,
    room: int,
    before: int,
    dtype: torch.dtype,
) -> Tensor:
    from bertsmith.ops.conv.depthwise_kernels import convolve

    return convolve(hidden, kernel, first, length, longest, room, before, dtype)


@_depthwise.register_fake
def _(
    hidden: Tensor,
    kernel: Tensor,
    first: Tensor,
    length: Tensor,
    longest: int,
    room: int,
    before: int,
    dtype: torch.dtype,
) -> Tensor:
    return hidden.new_empty(hidden.shape, dtype=dtype)


@torch.library.custom_op("bertsmith::depthwise_backward", mutates_args=())
def _depthwise_backward(
    gradient: Tensor,
    hidden: Tensor,
    kernel: Tensor,
    first: Tensor,
    length: Tensor,
    longest: int,
    room: int,
    before: int,
) -> tuple[Tensor, Tensor]:
    from bertsmith.ops.conv.depthwise_kernels import convolve, kernel_gradient

    gradient = _gapless(gradient)
    turned = convolve(gradient, kernel, first, length, longest, room, before, hidden.dtype, is_turned=True)
    summed = kernel_gradient(gradient, hidden, kernel.shape[1], first, length, longest, before)
    return turned, summed.to(kernel.dtype).contiguous()


@_depthwise_backward.register_fake
def _(gradient: Tensor, hidden: Tensor, kernel: Tensor, *places: Any) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), kernel.new_empty(kernel.shape)


def _keep_depthwise(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.longest, ctx.room, ctx.before, _ = inputs
    ctx.save_for_backward(*tensors)


def _depthwise_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _depthwise_backward(gradient, *ctx.saved_tensors, ctx.longest, ctx.room, ctx.before)
    return *gradients, *[None] * 6


_depthwise.register_autograd(_depthwise_gradients, setup_context=_keep_depthwise)
