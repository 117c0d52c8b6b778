"""Attention of short sequences: a program computes one head of one sequence, whose scores never leave the registers.

Whole rows of scores make a running maximum, and a second pass over the keys, unnecessary. The backward pass computes
the probabilities again, and with them ⟨output, gradient⟩ = Σ_j p_j · dp_j, so the forward pass saves nothing and one
kernel computes all gradients. It has no loop, and with it no pipelined load that a matrix product may still read.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.kernel_dropout import is_kept

LOG2_E = 1.4426950408889634
BACKWARD_REGISTERS: int | None = 128
"""Registers of a thread for 128 tokens: two programs fit on a multiprocessor, and one loads while the other computes.
The compiler alone takes 166, or 234 with dropout."""


@triton.jit
def _weights(
    queries,
    keys,
    position,
    count,
    factor,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return exp(score − maximum of the row) of every pair, 0 where masked."""
    scores = tl.dot(queries, tl.trans(keys)) * factor
    is_attended = (position < count)[None, :]
    distance = position[:, None] - position[None, :]
    if CAUSAL:
        is_attended = is_attended & (distance >= 0)
    if WINDOW > 0:
        is_attended = is_attended & (tl.abs(distance) <= WINDOW)
    # finite, so that rows after the sequence, which may have no key in their window, give no NaN
    scores = tl.where(is_attended, scores, -1e30)
    return tl.exp2(scores - tl.max(scores, 1)[:, None])


@triton.jit
def _forward(
    joint,
    mixed,
    first,
    end,
    seed,
    factor,
    rate,
    joint_row,
    joint_part,
    joint_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DROPS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """mixed = softmax(factor · query·keyᵀ) · value for one head of one sequence of at most LENGTH tokens."""
    head, sequence = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    row = tl.load(first + sequence).to(tl.int64)
    count = (tl.load(end + sequence).to(tl.int64) - row).to(tl.int32)
    if count <= 0:
        return
    joint += row * joint_row + head * joint_head
    mixed += (row * HEADS + head) * WIDTH
    width, position = tl.arange(0, WIDTH)[None, :], tl.arange(0, LENGTH)
    is_token = (position < count)[:, None]
    where = position[:, None] * joint_row + width
    queries = tl.load(joint + where, mask=is_token, other=0.0)
    keys = tl.load(joint + joint_part + where, mask=is_token, other=0.0)
    values = tl.load(joint + 2 * joint_part + where, mask=is_token, other=0.0)
    weights = _weights(queries, keys, position, count, factor, CAUSAL, WINDOW)
    scale = 1.0 / tl.sum(weights, 1)
    if DROPS:
        keep = is_kept(tl.load(seed), sequence * HEADS + head, position[:, None], position[None, :], rate)
        weights = tl.where(keep, weights, 0.0)
        scale = scale / (1.0 - rate)
    total = tl.dot(weights.to(values.dtype), values) * scale[:, None]
    out = position[:, None] * (HEADS * WIDTH) + width
    tl.store(mixed + out, total.to(mixed.dtype.element_ty), mask=is_token)


@triton.jit
def _backward(
    upstream,
    joint,
    by_joint,
    first,
    end,
    seed,
    factor,
    rate,
    scale,
    upstream_row,
    upstream_head,
    joint_row,
    joint_part,
    joint_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DROPS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Gradients of query, key and value for one head of one sequence, in a tensor shaped like `joint`."""
    head, sequence = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    row = tl.load(first + sequence).to(tl.int64)
    count = (tl.load(end + sequence).to(tl.int64) - row).to(tl.int32)
    if count <= 0:
        return
    upstream += row * upstream_row + head * upstream_head
    joint += row * joint_row + head * joint_head
    by_joint += (row * (3 * HEADS) + head) * WIDTH
    width, position = tl.arange(0, WIDTH)[None, :], tl.arange(0, LENGTH)
    is_token = (position < count)[:, None]
    where = position[:, None] * joint_row + width
    keys = tl.load(joint + joint_part + where, mask=is_token, other=0.0)
    queries = tl.load(joint + where, mask=is_token, other=0.0)
    weights = _weights(queries, keys, position, count, factor, CAUSAL, WINDOW)
    weights = (weights * (1.0 / tl.sum(weights, 1))[:, None]).to(queries.dtype)
    gradient = tl.load(upstream + position[:, None] * upstream_row + width, mask=is_token, other=0.0)
    kept = weights
    if DROPS:
        keep = is_kept(tl.load(seed), sequence * HEADS + head, position[:, None], position[None, :], rate)
        weights = tl.where(keep, weights, -weights)  # the sign keeps the mask, without more registers
        kept = tl.where(keep, weights, 0.0).to(weights.dtype)
    out = position[:, None] * (3 * HEADS * WIDTH) + width
    total = tl.dot(tl.trans(kept), gradient)
    if DROPS:
        total *= 1.0 / (1.0 - rate)
    tl.store(by_joint + 2 * HEADS * WIDTH + out, total.to(by_joint.dtype.element_ty), mask=is_token)

    values = tl.load(joint + 2 * joint_part + where, mask=is_token, other=0.0)
    by_weight = tl.dot(gradient, tl.trans(values))
    if DROPS:
        by_weight = tl.where(weights > 0.0, by_weight * (1.0 / (1.0 - rate)), 0.0)
        weights = tl.abs(weights)
    weights = weights.to(tl.float32)
    by_score = weights * (by_weight - tl.sum(weights * by_weight, 1)[:, None])
    by_score = by_score.to(queries.dtype)
    total = tl.dot(by_score, keys) * scale
    tl.store(by_joint + out, total.to(by_joint.dtype.element_ty), mask=is_token)
    total = tl.dot(tl.trans(by_score), queries) * scale
    tl.store(by_joint + HEADS * WIDTH + out, total.to(by_joint.dtype.element_ty), mask=is_token)


@dataclass(frozen=True)
class ShortLaunch:
    """Sequences and settings of one call; sequence i has the rows first[i] : end[i].

    Shape: first, end (batch,), seed (1,), int32.
    """

    first: Tensor
    end: Tensor
    seed: Tensor | None
    max_length: int
    dropout: float
    is_causal: bool
    window: int

    @property
    def where(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.first, self.end, self.first if self.seed is None else self.seed

    def constants(self, joint: Tensor) -> dict[str, Any]:
        length = max(16, triton.next_power_of_2(self.max_length))  # matrix products have at least 16 rows
        return {
            "HEADS": joint.shape[2],
            "WIDTH": joint.shape[3],
            "CAUSAL": self.is_causal,
            "WINDOW": self.window,
            "DROPS": self.dropout > 0,
            "LENGTH": length,
            "num_warps": max(1, length // 16),
            "num_stages": 1,
        }


def forward(joint: Tensor, mixed: Tensor, launch: ShortLaunch) -> None:
    """Write the attention output of every token to `mixed`, (tokens, heads, head_width), contiguous.

    Shape: joint (tokens, 3, heads, head_width), last axis contiguous: queries, keys and values.
    """
    _forward[(len(launch.first) * joint.shape[2],)](
        joint,
        mixed,
        *launch.where,
        joint.shape[3] ** -0.5 * LOG2_E,
        launch.dropout,
        *joint.stride()[:3],
        **launch.constants(joint),
    )


def backward(upstream: Tensor, joint: Tensor, gradient: Tensor, launch: ShortLaunch) -> None:
    """Write the gradient of `joint` to `gradient`, contiguous."""
    constants = launch.constants(joint)
    if constants["LENGTH"] == 128 and constants["WIDTH"] <= 64:
        constants["maxnreg"] = BACKWARD_REGISTERS
    _backward[(len(launch.first) * joint.shape[2],)](
        upstream,
        joint,
        gradient,
        *launch.where,
        joint.shape[3] ** -0.5 * LOG2_E,
        launch.dropout,
        joint.shape[3] ** -0.5,
        *upstream.stride()[:2],
        *joint.stride()[:3],
        **constants,
    )
