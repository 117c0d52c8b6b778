"""Convolutions by fused Triton kernels, which read every input and write every output once."""

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops import kernel_support as support
from bertsmith.ops.conv.reference import DepthwiseInputs, LightConvInputs, kernel_extent
from bertsmith.ops.dropout import new_seed
from bertsmith.ops.kernel_support import SequenceRows, from_rows, to_rows

MAX_KERNEL_SIZE = 31
"""The loop over taps is unrolled at compile time; longer kernels spill registers."""
MAX_HEAD_WIDTH = 1024
"""A program of `light_conv` holds whole rows of a head."""


def unsupported(inputs: DepthwiseInputs | LightConvInputs) -> str | None:
    convolved, weights = _input_and_weights(inputs)
    reason = support.unsupported(convolved) or support.unsupported(weights)
    if reason is not None:
        return reason
    if weights.shape[-1] > MAX_KERNEL_SIZE:
        return f"the kernel size is {weights.shape[-1]}, but this backend supports at most {MAX_KERNEL_SIZE}"
    if isinstance(inputs, LightConvInputs) and convolved.shape[-1] > MAX_HEAD_WIDTH:
        return f"the head width is {convolved.shape[-1]}, but this backend supports at most {MAX_HEAD_WIDTH}"
    return None


def preferred(inputs: DepthwiseInputs | LightConvInputs) -> bool:
    return support.is_preferred(_input_and_weights(inputs)[0])


def depthwise(inputs: DepthwiseInputs) -> Tensor:
    """Return the convolved hidden states; 0 at padding.

    Under autocast they have its dtype, as with PyTorch's convolutions, because rounding later costs one more pass.
    """
    hidden = _last_axis_contiguous(to_rows(inputs.hidden, inputs.layout))
    spans, min_rows = _positions(inputs, hidden.device)
    before, _ = kernel_extent(inputs.kernel.shape[-1], inputs.is_causal)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    mixed: Tensor = _depthwise(
        hidden, inputs.kernel, spans.first, spans.length, spans.max_length, min_rows, before, dtype
    )
    return from_rows(mixed, inputs.layout)


def light_conv(inputs: LightConvInputs) -> Tensor:
    """Return the convolved values; 0 at padding."""
    value = _last_axis_contiguous(to_rows(inputs.value, inputs.layout))
    is_shared = inputs.scores.dim() == 2
    scores = inputs.scores.expand(value.shape[0], -1, -1) if is_shared else to_rows(inputs.scores, inputs.layout)
    spans, min_rows = _positions(inputs, value.device)
    before, _ = kernel_extent(scores.shape[-1], inputs.is_causal)
    seed = None
    if inputs.dropout > 0:
        seed = new_seed(value.device)
    mixed, _ = _light_conv(
        value,
        _last_axis_contiguous(scores),
        spans.first,
        spans.length,
        seed,
        spans.max_length,
        min_rows,
        before,
        inputs.dropout,
        is_shared,
    )
    return from_rows(mixed, inputs.layout)


def _input_and_weights(inputs: DepthwiseInputs | LightConvInputs) -> tuple[Tensor, Tensor]:
    """Return the tensor to convolve, and the kernel or its scores."""
    if isinstance(inputs, DepthwiseInputs):
        return inputs.hidden, inputs.kernel
    return inputs.value, inputs.scores


def _positions(inputs: DepthwiseInputs | LightConvInputs, device: torch.device) -> tuple[SequenceRows, int]:
    """Return the rows of the sequences, and how many rows of each are written; rows after its tokens become zeros."""
    layout = inputs.layout
    if layout.is_packed:
        return SequenceRows.of(layout, device), 0
    if inputs.legacy_padding:
        layout = SequenceLayout.full(layout.batch, layout.max_length)  # padding counts as tokens
    return SequenceRows.of(layout, device), layout.max_length


def _last_axis_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if its last axis is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _light_conv_forward(
    value: Tensor,
    scores: Tensor,
    first: Tensor,
    length: Tensor,
    seed: Tensor | None,
    max_length: int,
    min_rows: int,
    before: int,
    dropout: float,
    is_shared: bool,
) -> tuple[Tensor, Tensor]:
    from bertsmith.ops.conv import light_kernels

    rows = SequenceRows(first, length, max_length)
    return light_kernels.forward(value, scores, rows, seed, min_rows, before, dropout, is_shared)


def _light_conv_backward(
    gradient: Tensor,
    normaliser: Tensor,
    value: Tensor,
    scores: Tensor,
    first: Tensor,
    length: Tensor,
    seed: Tensor | None,
    max_length: int,
    min_rows: int,
    before: int,
    dropout: float,
    is_shared: bool,
) -> tuple[Tensor, Tensor]:
    from bertsmith.ops.conv import light_kernels

    settings = (SequenceRows(first, length, max_length), seed, min_rows, before, dropout, is_shared)
    return light_kernels.backward(_last_axis_contiguous(gradient), value, scores, normaliser, *settings)


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
    min_rows: int,
    before: int,
    dtype: torch.dtype,
) -> Tensor:
    from bertsmith.ops.conv.depthwise_kernels import convolve

    return convolve(hidden, kernel, SequenceRows(first, length, max_length), min_rows, before, dtype)


def _depthwise_backward(
    gradient: Tensor,
    hidden: Tensor,
    kernel: Tensor,
    first: Tensor,
    length: Tensor,
    max_length: int,
    min_rows: int,
    before: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    from bertsmith.ops.conv.depthwise_kernels import convolve, kernel_gradient

    gradient, rows = _last_axis_contiguous(gradient), SequenceRows(first, length, max_length)
    by_hidden = convolve(gradient, kernel, rows, min_rows, before, hidden.dtype, is_flipped=True)
    by_kernel = kernel_gradient(gradient, hidden, kernel.shape[1], rows, before)
    return by_hidden, by_kernel.to(kernel.dtype).contiguous()


def _fake_depthwise(
    hidden: Tensor,
    kernel: Tensor,
    first: Tensor,
    length: Tensor,
    max_length: int,
    min_rows: int,
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
