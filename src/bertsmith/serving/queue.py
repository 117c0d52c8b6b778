"""What waits to be worked on, in the order it came: calls, each of some sequences, and the batches taken from them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bertsmith.layers.subnet import Subnet
from bertsmith.serving.requests import Operation, TokenSequence

_PLACE = 8192  # entries of the vocabulary that count like one token, where probabilities of all of it are given


@dataclass(eq=False)
class QueuedRequest:
    """One call and how far it is."""

    work: Operation
    asked: Sequence[TokenSequence]
    costs: list[int]
    """The tokens of every sequence, or what counts as many."""
    subnet: Subnet | None
    """The sub-network it asked for; None leaves the choice."""
    future: "asyncio.Future[None]"
    """Done when all sequences are answered."""
    came: float
    outputs: list[np.ndarray | None] = field(default_factory=list)
    taken: int = 0
    """Sequences that are answered or in a batch."""
    answered: int = 0
    level: int | None = None
    """The size it is answered on, which its first batch settles; None before, and where it asked for a size."""
    is_settled: bool = False
    """Whether it is known what its caller is told: it was answered, it failed, or its caller is gone."""
    error: Exception | None = None
    began: float = 0.0
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.outputs = [None] * len(self.asked)

    @property
    def waiting_tokens(self) -> int:
        return sum(self.costs[self.taken :])

    @property
    def waiting_sequences(self) -> int:
        return len(self.asked) - self.taken


@dataclass(frozen=True)
class Batch:
    """Sequences that are worked on together: of one work and one size."""

    work: Operation
    subnet: Subnet | None
    level: int | None
    members: list[tuple[QueuedRequest, int]]
    """Each is a call and the number of the sequence in it."""
    tokens: int

    @property
    def asked(self) -> list[TokenSequence]:
        return [call.asked[index] for call, index in self.members]


def cost(work: Operation, asked: TokenSequence, vocabulary: int) -> int:
    """How many tokens a sequence counts as: what is said of a mask is as long as the vocabulary."""
    if work != "fill_mask" or asked.places is None:
        return len(asked.tokens)
    return len(asked.tokens) + len(asked.places) * -(-vocabulary // _PLACE)


class Queue:
    """Calls in the order they came. It has no lock of its own: its owner holds one."""

    def __init__(self) -> None:
        self._calls: dict[QueuedRequest, None] = {}
        self.tokens = 0
        self.sequences = 0

    def __len__(self) -> int:
        """Calls of which something waits."""
        return len(self._calls)

    def put(self, call: QueuedRequest) -> None:
        self._calls[call] = None
        self.tokens += call.waiting_tokens
        self.sequences += call.waiting_sequences

    def drop(self, call: QueuedRequest) -> bool:
        """Forgets what still waits of a call, and says whether there was anything."""
        if call not in self._calls:
            return False
        del self._calls[call]
        self.tokens -= call.waiting_tokens
        self.sequences -= call.waiting_sequences
        return True

    def first(self) -> QueuedRequest:
        """The call that is next."""
        return next(iter(self._calls))

    def take(self, most: int, level: int | None, subnet: Subnet | None) -> Batch:
        """The first call's next sequences, and those of later calls that can stand with them, up to `most` tokens.

        They come in strictly as they came, so that a long one is never passed by: the first that does not fit ends the
        batch. One that is longer than `most` by itself has a batch of its own. `level` and `subnet` are those of the
        first call; a call that may be answered at any size joins it.
        """
        head = self.first()
        members: list[tuple[QueuedRequest, int]] = []
        tokens = 0
        emptied: list[QueuedRequest] = []
        for call in self._calls:
            if call is not head and not _may_join(call, head, level):
                continue
            begin = call.taken
            while call.taken < len(call.asked) and (not members or tokens + call.costs[call.taken] <= most):
                members.append((call, call.taken))
                tokens += call.costs[call.taken]
                call.taken += 1
            self.sequences -= call.taken - begin
            if call.taken > begin and call.subnet is None:
                call.level = level
            if call.taken < len(call.asked):
                break
            emptied.append(call)
        self.tokens -= tokens
        for call in emptied:
            del self._calls[call]
        return Batch(head.work, subnet, level, members, tokens)


def _may_join(call: QueuedRequest, head: QueuedRequest, level: int | None) -> bool:
    """Whether a call can be worked on in the batch that begins with another."""
    if call.work != head.work or call.subnet != head.subnet:
        return False
    return call.level is None or call.level == level
