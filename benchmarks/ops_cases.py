"""Convolutions and activations timed by benchmarks/ops.py, and the class of a case."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops import activation, conv
from bertsmith.ops.conv.reference import DepthwiseInputs, LightConvInputs
from bertsmith.ops.dispatch import Implementations
from bertsmith.ops.kernel_support import SequenceRows, Tile, to_rows


@dataclass(frozen=True)
class Tuned:
    """A kernel to time with several tiles: `launch` takes one of the `tries` as keyword arguments."""

    launch: Callable[..., Any]
    tries: Sequence[dict[str, Any]]
    now: dict[str, Any] | None = None
    """Current tile, if the launch returns gradients: those of other tiles are compared with its own."""


@dataclass(frozen=True)
class Case:
    """One op at one shape."""

    op: Callable[..., Tensor]
    """Function of the tensors and `backend`."""
    tensors: list[Tensor]
    backends: Implementations[Any, Any]
    inputs: Any
    """Inputs for the `unsupported` check of the implementations."""
    compared: list[str]
    """Implementations to compare with."""
    forward_bytes: int
    training_bytes: int
    kernels: Callable[[], dict[str, Tuned]] = dict
    """Kernels whose tiles can be tuned, by name."""
    is_compiled: bool = True
    """Whether the other implementations are also timed compiled."""
    lines: dict[str, Callable[..., Tensor]] = field(default_factory=dict)
    """Other ops on the same tensors by name, for comparison."""
    kernel: str = "triton"
    """Name of the implementation that is timed."""


def light_conv(options: Namespace, length: int, heads: int, head_width: int) -> Case:
    layout, shape = lying(options, length)
    # a slice of one projection, as in a mixer
    value = numbers(options, *shape, 4, heads, head_width).unbind(-3)[3]
    scores = numbers(options, *shape, heads, options.kernel_size)
    size = value.element_size()
    values, kernels = value.numel() * size, scores.numel() * size
    return Case(
        op=partial(conv.light_conv, layout=layout),
        tensors=[value, scores],
        backends=conv.BACKENDS,
        inputs=LightConvInputs(value, scores, layout),
        compared=["taps"],
        forward_bytes=2 * values + kernels,
        training_bytes=5 * values + 3 * kernels,
        kernels=partial(_light_conv_kernels, value, scores, layout),
    )


def _light_conv_kernels(value: Tensor, scores: Tensor, layout: SequenceLayout) -> dict[str, Tuned]:
    from bertsmith.ops.conv import light_kernels as light

    rows, columns = SequenceRows.of(layout, value.device), _columns(value.shape[-1])
    value, scores = to_rows(value, layout), to_rows(scores, layout)
    settings = (rows, None, 0, scores.shape[-1] // 2, 0.0, False)
    mixed, normaliser = light.forward(value, scores, *settings)
    tries = [
        {"tiling": Tile(size // columns, columns, warps)}
        for size, warps in ((512, 1), (1024, 1), (1024, 2), (1024, 4), (2048, 2), (2048, 4), (2048, 8), (4096, 8))
    ]
    return {
        "forward": Tuned(partial(light.forward, value, scores, *settings), tries),
        "backward": Tuned(partial(light.backward, mixed, value, scores, normaliser, *settings), tries),
    }


def depthwise(options: Namespace, length: int, heads: int, head_width: int) -> Case:
    layout, shape = lying(options, length)
    width = 2 * heads * head_width  # as in ConvBERT: half of the heads are convolutions
    hidden, kernel = numbers(options, *shape, width), numbers(options, width, options.kernel_size)
    moved = hidden.numel() * hidden.element_size()
    return Case(
        op=partial(conv.depthwise, layout=layout),
        tensors=[hidden, kernel],
        backends=conv.DEPTHWISE_BACKENDS,
        inputs=DepthwiseInputs(hidden, kernel, layout),
        compared=["taps"],
        forward_bytes=2 * moved,
        training_bytes=5 * moved,
        kernels=partial(_depthwise_kernels, hidden, kernel, layout),
    )


def _depthwise_kernels(hidden: Tensor, kernel: Tensor, layout: SequenceLayout) -> dict[str, Tuned]:
    from bertsmith.ops.conv import depthwise_kernels as kernels

    sequences, kernel_size = SequenceRows.of(layout, hidden.device), kernel.shape[1]
    hidden = to_rows(hidden, layout)
    tries = [
        {"tiling": Tile(rows, columns, warps)}
        for rows, columns, warps in (
            (16, 64, 2),
            (16, 64, 4),
            (32, 64, 4),
            (64, 64, 8),
            (16, 128, 4),
            (32, 128, 8),
            (8, 256, 4),
            (16, 256, 8),
        )
    ]
    sums = [
        {"tiling": Tile(rows, columns, warps), "max_shares": shares}
        for rows, columns, warps in ((1, 256, 4), (2, 256, 4), (2, 256, 8), (4, 128, 4))
        for shares in (61, 127, 251)
    ]
    return {
        "forward": Tuned(
            partial(kernels.convolve, hidden, kernel, sequences, 0, kernel_size // 2, hidden.dtype), tries
        ),
        "kernel's gradient": Tuned(
            partial(kernels.kernel_gradient, hidden, hidden, kernel_size, sequences, kernel_size // 2), sums
        ),
    }


def biased_activation(options: Namespace, length: int, heads: int, head_width: int) -> Case:
    """Bias and GELU of a feed-forward whose neurons are four times heads · head_width."""
    _, shape = lying(options, length)
    product = numbers(options, *shape, 4 * heads * head_width)
    tensors = [product, torch.randn(product.shape[-1], device=options.device)]
    moved = product.numel() * product.element_size()
    return Case(
        op=lambda product, bias, backend: activation.biased_activation(product, bias, "gelu", backend=backend),
        tensors=tensors,
        backends=activation.BACKENDS,
        inputs=activation.ActivationInputs(*tensors, "gelu"),
        compared=["reference"],
        forward_bytes=2 * moved,
        training_bytes=5 * moved,
        kernels=partial(_activation_kernels, *tensors),
    )


def _activation_kernels(product: Tensor, bias: Tensor) -> dict[str, Tuned]:
    from bertsmith.ops.activation import kernels

    rows = product.flatten(0, -2)

    def launch(rows_per_tile: int, columns: int, programs: int) -> object:
        before = kernels.ROWS, kernels.COLUMNS, kernels.PROGRAMS
        kernels.ROWS, kernels.COLUMNS, kernels.PROGRAMS = rows_per_tile, columns, programs
        try:
            return kernels.backward(rows, rows, bias, "gelu")
        finally:
            kernels.ROWS, kernels.COLUMNS, kernels.PROGRAMS = before

    tries = [
        {"rows_per_tile": rows_per_tile, "columns": columns, "programs": programs}
        for rows_per_tile, columns in ((4, 256), (8, 256), (16, 256), (8, 512))
        for programs in (1056, 2048, 4224)
    ]
    return {"backward": Tuned(launch, tries)}


def lying(options: Namespace, length: int) -> tuple[SequenceLayout, tuple[int, ...]]:
    """Return the layout of sequences of equal length, and the leading shape of their tensors."""
    batch = options.tokens // length
    if not options.packed:
        return SequenceLayout.full(batch, length), (batch, length)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=options.device) * length
    return SequenceLayout.packed(starts, length), (batch * length,)


def numbers(options: Namespace, *shape: int) -> Tensor:
    return torch.randn(*shape, device=options.device, dtype=getattr(torch, options.dtype))


def _columns(width: int) -> int:
    """Return the next power of two."""
    return 1 << (width - 1).bit_length()
