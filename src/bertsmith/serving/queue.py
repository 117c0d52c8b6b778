"""The queue of a scheduler: requests in order of arrival, and the batches taken from it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bertsmith.layers.subnet import Subnet
from bertsmith.serving.requests import Operation, TokenSequence

_VOCABULARY_PER_TOKEN = 8192  # the probabilities of this many vocabulary entries cost as much as one token


@dataclass(eq=False)
class QueuedRequest:
    """One request and its progress."""

    operation: Operation
    sequences: Sequence[TokenSequence]
    costs: list[int]
    """Cost of every sequence in tokens (`cost`)."""
    subnet: Subnet | None
    """The requested sub-network; None leaves the choice to the scheduler."""
    future: "asyncio.Future[None]"
    """Done when all sequences are computed."""
    submitted_at: float
    outputs: list[np.ndarray | None] = field(default_factory=list)
    taken: int = 0
    """Number of sequences that have left the queue."""
    computed: int = 0
    level: int | None = None
    """Index into the size schedule, set by the first batch; stays None if a sub-network was requested."""
    is_finished: bool = False
    """Whether the request was computed, failed or was cancelled."""
    error: Exception | None = None
    started_at: float = 0.0
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.outputs = [None] * len(self.sequences)

    @property
    def waiting_tokens(self) -> int:
        return sum(self.costs[self.taken :])

    @property
    def waiting_sequences(self) -> int:
        return len(self.sequences) - self.taken


@dataclass(frozen=True)
class Batch:
    """Sequences that are computed together: the same operation with the same network."""

    operation: Operation
    subnet: Subnet | None
    level: int | None
    members: list[tuple[QueuedRequest, int]]
    """Pairs of a request and the index of one of its sequences."""
    tokens: int

    @property
    def sequences(self) -> list[TokenSequence]:
        return [request.sequences[index] for request, index in self.members]


def cost(operation: Operation, sequence: TokenSequence, vocabulary: int) -> int:
    """Return the cost of a sequence in tokens; every mask adds the probabilities of the whole vocabulary."""
    if operation != "fill_mask":
        return len(sequence.tokens)
    return len(sequence.tokens) + len(sequence.mask_positions) * -(-vocabulary // _VOCABULARY_PER_TOKEN)


class Queue:
    """Requests in order of arrival. Not thread-safe: the scheduler holds a lock."""

    def __init__(self) -> None:
        self._requests: dict[QueuedRequest, None] = {}
        self.tokens = 0
        self.sequences = 0

    def __len__(self) -> int:
        """Number of requests with waiting sequences."""
        return len(self._requests)

    def put(self, request: QueuedRequest) -> None:
        self._requests[request] = None
        self.tokens += request.waiting_tokens
        self.sequences += request.waiting_sequences

    def drop(self, request: QueuedRequest) -> None:
        """Remove the waiting sequences of a request, if any."""
        if request in self._requests:
            del self._requests[request]
            self.tokens -= request.waiting_tokens
            self.sequences -= request.waiting_sequences

    def first(self) -> QueuedRequest:
        return next(iter(self._requests))

    def take(self, max_tokens: int, level: int | None, subnet: Subnet | None) -> Batch:
        """Take the next sequences of the first request, and of later requests that can share its batch.

        Sequences are taken strictly in order of arrival: the first that does not fit ends the batch, so that long ones
        are never overtaken. A sequence longer than `max_tokens` gets a batch of its own. `level` and `subnet` apply to
        the first request.
        """
        first = self.first()
        members: list[tuple[QueuedRequest, int]] = []
        tokens = 0
        emptied: list[QueuedRequest] = []
        for request in self._requests:
            if request is not first and not _can_share(request, first, level):
                continue
            start = request.taken
            while request.waiting_sequences and (not members or tokens + request.costs[request.taken] <= max_tokens):
                members.append((request, request.taken))
                tokens += request.costs[request.taken]
                request.taken += 1
            self.sequences -= request.taken - start
            if request.taken > start and request.subnet is None:
                request.level = level
            if request.waiting_sequences:
                break
            emptied.append(request)
        self.tokens -= tokens
        for request in emptied:
            del self._requests[request]
        return Batch(first.operation, subnet, level, members, tokens)


def _can_share(request: QueuedRequest, first: QueuedRequest, level: int | None) -> bool:
    """Whether a request can be computed in the batch of another one."""
    if request.operation != first.operation or request.subnet != first.subnet:
        return False
    return request.level is None or request.level == level
