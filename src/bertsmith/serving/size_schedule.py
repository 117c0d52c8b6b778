"""The sizes an elastic model may answer in, and the switch that goes down them when work piles up and up again after.

Down is quick: when what waits would take longer than a target at the size of now, or the queue was full, the next batch
is one size smaller.
Up is slow: only after a while in which nothing piled up and the next larger size could have done all that was asked.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.shrinking.elastic_metadata import ElasticRecord
from bertsmith.shrinking.fit.finals import pareto_front

_CALM = 0.5  # of the target: the longest expected wait that counts as quiet
_ROOM = 0.8  # of what a larger size can do: the most that may be asked of it
_PARTS = 20  # of the quiet time in which what is asked is counted
_MEMORY = 0.8  # of what was known of a rate, when a batch tells more of it


@dataclass(frozen=True)
class Size:
    """One size."""

    subnet: Subnet | None
    """None for the whole model."""
    score: float | None = None
    """On dev, by the record's metric; None for a model without a record."""
    speed: float = 1.0
    """How often as fast as the whole model, as it was recorded."""


@dataclass(frozen=True)
class SizeSchedule:
    """The sizes a model may answer in, from the whole one to the smallest that is good enough."""

    sizes: tuple[Size, ...] = (Size(None),)

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of(cls, record: ElasticRecord | None, floor: float | None) -> "SizeSchedule":
        """The sub-networks that keep at least a share `floor` of the whole model's score, none beaten by another.

        Without a floor the whole model answers everything.
        """
        if floor is not None and not 0 < floor <= 1:
            raise InputError(f"floor is {floor}; allowed: a share of the whole model's score, above 0 and up to 1")
        if record is None or floor is None:
            return cls()
        members = list(zip(record.grid, record.subnets, strict=True))
        whole = next((member for member in record.grid if member.width == member.depth == 1), None)
        if whole is None:
            raise InputError("floor is a share of the whole model's score, and elastic.json has no width 1 at depth 1")
        faster = [(member, subnet) for member, subnet in members if member.latency_ms < whole.latency_ms]
        good = [(member, subnet) for member, subnet in faster if member.score >= floor * whole.score]
        front = pareto_front(good, lambda one: one[0].latency_ms, lambda one: one[0].score)
        smaller = [Size(subnet, member.score, whole.latency_ms / member.latency_ms) for member, subnet in front]
        return cls((Size(None, whole.score), *reversed(smaller)))


class SizeController:
    """Chooses the size of every batch from what waits, what is asked and how fast each size is."""

    def __init__(
        self,
        schedule: SizeSchedule,
        *,
        target: float,
        quiet: float,
        tokens_per_second: float,
        clock: Callable[[], float],
    ) -> None:
        """`target` and `quiet` are seconds; `tokens_per_second` is a first guess for the whole model."""
        self.schedule, self.target, self.quiet, self.clock = schedule, target, quiet, clock
        self.level = 0
        self._rates = [tokens_per_second * size.speed for size in schedule.sizes]
        self._asked: deque[tuple[float, int]] = deque()
        self._quiet_since: float | None = None
        self._has_refused = False

    @property
    def size(self) -> Size:
        """The size of now."""
        return self.schedule.sizes[self.level]

    @property
    def tokens_per_second(self) -> float:
        """What can be done at the size of now."""
        return self._rates[self.level]

    def expected_wait(self, tokens: int) -> float:
        """How long so many tokens take at the size of now, in seconds."""
        return tokens / self.tokens_per_second

    def ask(self, tokens: int) -> None:
        """Counts what is asked of the engine, taken or not."""
        now, part = self.clock(), self.quiet / _PARTS
        if self._asked and now - self._asked[-1][0] < part:
            began, before = self._asked[-1]
            self._asked[-1] = (began, before + tokens)
        else:
            self._asked.append((now, tokens))
        while self._asked and self._asked[0][0] <= now - self.quiet:
            self._asked.popleft()

    def refuse(self) -> None:
        """Takes in that the queue was full: however short what waits is, a smaller size would have taken more."""
        self._has_refused = True

    def learn(self, level: int, tokens: float, seconds: float) -> None:
        """Takes in how long a well filled batch took; `tokens` are those all workers did in that time."""
        if seconds > 0 and tokens > 0:
            self._rates[level] = _MEMORY * self._rates[level] + (1 - _MEMORY) * tokens / seconds

    def choose(self, waiting: int) -> int:
        """The level for the next batch, with so many tokens waiting."""
        if self._has_refused or self.expected_wait(waiting) > self.target:
            self._quiet_since, self._has_refused = None, False
            self.level = min(self.level + 1, len(self.schedule) - 1)
            return self.level
        return self.relax(waiting)

    def relax(self, waiting: int) -> int:
        """The level of now, after going up as far as quiet times allow."""
        now = self.clock()
        if self.level == 0:
            return 0
        if not self._is_quiet(waiting, now):
            self._quiet_since = None
            return self.level
        # from when nothing was asked any more, though no batch was there to see it
        last = self._asked[-1][0] if self._asked else now
        self._quiet_since = min(now, last) if self._quiet_since is None else self._quiet_since
        while self.level and now - self._quiet_since >= self.quiet:
            self.level -= 1
            self._quiet_since += self.quiet
        return self.level

    def _is_quiet(self, waiting: int, now: float) -> bool:
        """Whether little waits, and the size above could have done all that was asked lately."""
        asked = sum(tokens for when, tokens in self._asked if when > now - self.quiet)
        above = self._rates[self.level - 1]
        return self.expected_wait(waiting) <= _CALM * self.target and asked / self.quiet <= _ROOM * above
