"""Inputs, results and errors of requests to a scheduler."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from bertsmith.layers.subnet import Subnet

Operation = Literal["task", "vectors", "fill_mask"]
"""Run the task head, embed, or predict the tokens at masks."""


def _no_positions() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class TokenSequence:
    """One input of the model, special tokens included.

    Shape: tokens and types (length,), mask_positions (masks,), int64.
    """

    tokens: np.ndarray
    types: np.ndarray | None = None
    mask_positions: np.ndarray = field(default_factory=_no_positions)
    """Positions at which fill_mask predicts tokens."""


@dataclass(frozen=True)
class RequestResult:
    """Outputs of one request.

    Shape of each output, in float32: (outputs,) for a sequence head, (length, outputs) for a token head, (width,) for
    vectors, (masks, vocabulary) for the probabilities of fill_mask.
    """

    outputs: list[np.ndarray]
    subnet: Subnet | None
    """The sub-network that was used; None for the whole model."""
    queued_seconds: float
    computed_seconds: float


class SchedulerError(Exception):
    """The request was rejected or not finished."""


class QueueFull(SchedulerError):
    """The queue is full."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the queue is full; try again in {max(1, math.ceil(retry_after))} s")
        self.retry_after = retry_after


class DeadlineExceeded(SchedulerError):
    """The request took longer than its timeout."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BatchFailed(SchedulerError):
    """The model raised an exception on the batch of this request."""


class ShuttingDown(SchedulerError):
    """The service is shutting down and accepts no new requests."""


@dataclass(frozen=True)
class SchedulerStats:
    """State of a scheduler: rates and latencies over the last seconds, counts since the start."""

    waiting_sequences: int
    waiting_tokens: int
    running_tokens: int
    sequences_per_second: float
    tokens_per_second: float
    median_seconds: float | None
    """Median latency of requests; None if no request was answered in the last seconds."""
    slowest_seconds: float | None
    """99th percentile of the latency."""
    subnet: Subnet | None
    """The sub-network in use; None for the whole model."""
    answered: int
    refused: int
    late: int
    batches: int = 0
    batched_sequences: int = 0
    batched_tokens: int = 0
