"""Attention in linear time by random features, FAVOR+ (Choromanski et al. 2021).

`favor` for the output, `favor_map` for the estimate of the probabilities, `favor_start`, `favor_memory`, `favor_step`
and `favor_read` for decoding, `draw` for the random matrix.
"""

import torch
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.errors import InputError, nearest
from bertsmith.ops.dispatch import Form, Forms, choose
from bertsmith.ops.favor import linear, reference, step
from bertsmith.ops.favor.draw import draw
from bertsmith.ops.favor.features import feature_width
from bertsmith.ops.favor.inputs import FavorInputs
from bertsmith.ops.favor.kernels import KERNELS, KernelName
from bertsmith.ops.favor.step import FavorState

__all__ = [
    "FORMS",
    "KERNELS",
    "FavorState",
    "KernelName",
    "draw",
    "favor",
    "favor_map",
    "favor_memory",
    "favor_read",
    "favor_start",
    "favor_step",
    "feature_width",
]

FORMS: Forms[FavorInputs] = {
    "linear": Form(linear.favor, linear.unsupported),
    "reference": Form(reference.favor, reference.unsupported),
}


def favor(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    layout: SequenceLayout,
    *,
    kernel: str = "softmax",
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
    epsilon: float | None = None,
    chunk: int = 128,
    backend: str = "auto",
) -> Tensor:
    """φ(Q)φ(K)ᵀV over its row sums, for the real tokens of each query's own sequence, a row for every query.

    Features, sums and row sums are float32 (float64 for float64 inputs), under autocast too. `epsilon` None is the
    kernel's own; for exponential kernels it is relative to the largest feature of the query, and of the keys of the
    sequence (causal: the keys so far).

    Shape: query, key, value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed; projection
    (features, head_width).
    """
    inputs = _inputs(query, key, value, projection, layout, key_layout, kernel, epsilon, is_causal, chunk)
    return choose(FORMS, backend, inputs).compute(inputs)


def favor_map(
    query: Tensor,
    key: Tensor,
    projection: Tensor,
    layout: SequenceLayout,
    *,
    kernel: str = "softmax",
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
    epsilon: float | None = None,
) -> Tensor:
    """The estimate of the attention probabilities, (batch, heads, queries' longest, keys' longest); pads get 0."""
    inputs = _inputs(query, key, key, projection, layout, key_layout, kernel, epsilon, is_causal, 1)
    with torch.autocast(query.device.type, enabled=False):
        return reference.probabilities(inputs)


def favor_start(
    batch: int, heads: int, projection: Tensor, *, kernel: str = "softmax", value_width: int | None = None
) -> FavorState:
    """The decoding state before the first token; values are as wide as keys unless `value_width` says otherwise."""
    features, head_width = projection.shape
    return step.empty_state(batch, heads, feature_width(kernel, features), value_width or head_width, projection)


def favor_memory(
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    key_layout: SequenceLayout,
    *,
    kernel: str = "softmax",
    epsilon: float | None = None,
) -> FavorState:
    """The state of all keys and values of each sequence, which `favor_read` reads for any number of queries."""
    return step.whole_state(
        _inputs(key, key, value, projection, key_layout, key_layout, kernel, epsilon, False, 1)  # no query yet
    )


def favor_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: FavorState,
    projection: Tensor,
    *,
    kernel: str = "softmax",
    epsilon: float | None = None,
) -> tuple[Tensor, FavorState]:
    """What one new token of every sequence takes from itself and all before it, and the state after it.

    Shape: query, key, value (batch, heads, head_width).
    """
    one = SequenceLayout.full(query.shape[0], 1)
    query, key, value = (tensor[:, None] for tensor in (query, key, value))  # (batch, 1, heads, head_width)
    inputs = _inputs(query, key, value, projection, one, one, kernel, epsilon, True, 1)
    state = step.extended(inputs, state)
    return step.read(inputs, state)[:, 0], state


def favor_read(
    query: Tensor,
    state: FavorState,
    projection: Tensor,
    *,
    kernel: str = "softmax",
    epsilon: float | None = None,
) -> Tensor:
    """What one query of every sequence takes from a state that stays as it is.

    Shape: query (batch, heads, head_width).
    """
    one = SequenceLayout.full(query.shape[0], 1)
    row = query[:, None]
    return step.read(_inputs(row, row, row, projection, one, one, kernel, epsilon, False, 1), state)[:, 0]


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    layout: SequenceLayout,
    key_layout: SequenceLayout | None,
    kernel: str,
    epsilon: float | None,
    is_causal: bool,
    chunk: int,
) -> FavorInputs:
    """The checked record of one call."""
    if kernel not in KERNELS:
        raise InputError(f"kernel is {kernel!r}; {nearest(kernel, KERNELS)}")
    if projection.shape[-1] != query.shape[-1]:
        raise InputError(f"projection has {projection.shape[-1]} columns; allowed: the head width {query.shape[-1]}")
    if is_causal and key_layout is not None and key_layout is not layout:
        raise InputError("is_causal is True and the keys have a layout of their own; allowed: the queries' own keys")
    if chunk < 1:
        raise InputError(f"chunk is {chunk}; allowed: 1 or more")
    epsilon = KERNELS[kernel].epsilon if epsilon is None else epsilon
    return FavorInputs(
        query, key, value, projection, layout, key_layout or layout, kernel, epsilon, is_causal=is_causal, chunk=chunk
    )
