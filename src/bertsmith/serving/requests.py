"""What the endpoints ask of an engine, and what it answers: sequences in, arrays out."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bertsmith.layers.subnet import Subnet

Operation = Literal["task", "vectors", "fill_mask"]
"""What the task's head says; one vector for each text; what may stand at places that are masked."""


@dataclass(frozen=True)
class TokenSequence:
    """One sequence to be worked on, marks of the tokenizer included.

    Shape: tokens, types (length,); places (places,), the masks of fill_mask. All int64.
    """

    tokens: np.ndarray
    types: np.ndarray | None = None
    places: np.ndarray | None = None


@dataclass(frozen=True)
class RequestResult:
    """What the engine says of the sequences of one call, in their order.

    Shape: outputs are float32, for each sequence (outputs,) from a head for sequences, (length, outputs) from one for
    tokens, (width,) for vectors, (places, vocabulary) of probabilities for fill_mask.
    """

    outputs: list[np.ndarray]
    subnet: Subnet | None
    """The sub-network that answered; None for the whole model."""
    queued_seconds: float
    computed_seconds: float


class SchedulerError(Exception):
    """The engine did not take the work, or did not finish it."""


class QueueFull(SchedulerError):
    """The queue is full."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the queue is full; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class DeadlineExceeded(SchedulerError):
    """The answer was not there in the time allowed."""


class BatchFailed(SchedulerError):
    """The model broke on the batch in which the work was; others are worked on as before."""


class ShuttingDown(SchedulerError):
    """The service is ending and takes nothing new."""


@dataclass(frozen=True)
class SchedulerStats:
    """How an engine fares right now; rates and times are of the last seconds."""

    waiting_sequences: int
    waiting_tokens: int
    running_tokens: int
    sequences_per_second: float
    tokens_per_second: float
    median_seconds: float | None
    """From being asked to being answered; None if nothing was answered lately."""
    slowest_seconds: float | None
    """Of 99 in 100."""
    subnet: Subnet | None
    """The sub-network that answers now; None for the whole model."""
    answered: int
    refused: int
    late: int
    """Since the start."""
    batches: int = 0
    """Batches run since the start …"""
    batched_sequences: int = 0
    """… the sequences in them …"""
    batched_tokens: int = 0
    """… and their tokens: what a metric of batch sizes is made of."""
