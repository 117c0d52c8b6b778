"""The sizes in which an elastic model is served, and the controller that picks one of them by load.

Down is fast: if the expected wait exceeds a target, or a request was rejected, the next batch runs one size smaller.
Up is slow: only after a quiet period in which the next larger size could have handled all requests.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.shrinking.elastic_metadata import ElasticMetadata
from bertsmith.shrinking.fit.candidates import pareto_front

_QUIET_WAIT = 0.5  # maximum expected wait of a quiet period, as a share of the target
_MAX_UTILISATION = 0.8  # maximum demand of a quiet period, as a share of the next larger size's speed
_SLOTS = 20  # time slots of a quiet period, each with its requested tokens
_SMOOTHING = 0.8  # weight of the old estimate in the moving average of a speed


@dataclass(frozen=True)
class ServedSize:
    """One entry of a size schedule."""

    subnet: Subnet | None
    """None for the whole model."""
    score: float | None = None
    """Score on the dev split in the metric of elastic.json; None for a model that is not elastic."""
    speed: float = 1.0
    """Recorded speed relative to the whole model."""


@dataclass(frozen=True)
class SizeSchedule:
    """The sizes of a model, from the whole one down to the smallest that is good enough."""

    sizes: tuple[ServedSize, ...] = (ServedSize(None),)

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of(cls, record: ElasticMetadata | None, floor: float | None) -> "SizeSchedule":
        """Return the Pareto-optimal sub-networks that keep at least the share `floor` of the whole model's score.

        Without a floor, return the whole model alone.
        """
        if floor is not None and not 0 < floor <= 1:
            raise InputError(f"floor is {floor}; allowed: a share of the whole model's score, above 0 and up to 1")
        if record is None or floor is None:
            return cls()
        entries = list(zip(record.grid, record.subnets, strict=True))
        whole = next((entry for entry in record.grid if entry.width == entry.depth == 1), None)
        if whole is None:
            raise InputError("floor is a share of the whole model's score, and elastic.json has no width 1 at depth 1")
        faster = [(entry, subnet) for entry, subnet in entries if entry.latency_ms < whole.latency_ms]
        good = [(entry, subnet) for entry, subnet in faster if entry.score >= floor * whole.score]
        front = pareto_front(good, lambda pair: pair[0].latency_ms, lambda pair: pair[0].score)
        smaller = [ServedSize(subnet, entry.score, whole.latency_ms / entry.latency_ms) for entry, subnet in front]
        return cls((ServedSize(None, whole.score), *reversed(smaller)))


class SizeController:
    """Chooses the size of every batch from the waiting tokens, the recent demand and the measured speeds."""

    def __init__(
        self,
        schedule: SizeSchedule,
        *,
        target: float,
        quiet: float,
        tokens_per_second: float,
        clock: Callable[[], float],
    ) -> None:
        """`target` and `quiet` are seconds; `tokens_per_second` is a first estimate for the whole model."""
        self.schedule, self.target, self.quiet, self.clock = schedule, target, quiet, clock
        self.level = 0
        self._speeds = [tokens_per_second * size.speed for size in schedule.sizes]
        self._demand: deque[tuple[float, int]] = deque()
        self._quiet_since: float | None = None
        self._has_refused = False

    @property
    def size(self) -> ServedSize:
        """The current size."""
        return self.schedule.sizes[self.level]

    @property
    def tokens_per_second(self) -> float:
        """The estimated speed of the current size."""
        return self._speeds[self.level]

    def expected_wait(self, tokens: int) -> float:
        """Return the seconds in which the current size computes this many tokens."""
        return tokens / self.tokens_per_second

    def count_demand(self, tokens: int) -> None:
        """Count the tokens of a request, accepted or rejected."""
        now, duration = self.clock(), self.quiet / _SLOTS
        if self._demand and now - self._demand[-1][0] < duration:
            start, slot_tokens = self._demand[-1]
            self._demand[-1] = (start, slot_tokens + tokens)
        else:
            self._demand.append((now, tokens))
        while self._demand and self._demand[0][0] <= now - self.quiet:
            self._demand.popleft()

    def count_refusal(self) -> None:
        """Record that the queue was full: the next batch runs at a smaller size, however short the queue is then."""
        self._has_refused = True

    def update_speed(self, level: int, tokens: float, seconds: float) -> None:
        """Update the speed of a size after a batch; `tokens` counts all workers in these seconds."""
        if seconds > 0 and tokens > 0:
            self._speeds[level] = _SMOOTHING * self._speeds[level] + (1 - _SMOOTHING) * tokens / seconds

    def choose(self, waiting: int) -> int:
        """Return the level of the next batch, given the number of waiting tokens."""
        if self._has_refused or self.expected_wait(waiting) > self.target:
            self._quiet_since, self._has_refused = None, False
            self.level = min(self.level + 1, len(self.schedule) - 1)
            return self.level
        return self.relax(waiting)

    def relax(self, waiting: int) -> int:
        """Go up one size for every quiet period that has passed, and return the level."""
        now = self.clock()
        if self.level == 0:
            return 0
        if not self._is_quiet(waiting, now):
            self._quiet_since = None
            return self.level
        # the period began with the last request, even if no batch has run since
        last = self._demand[-1][0] if self._demand else now
        self._quiet_since = min(now, last) if self._quiet_since is None else self._quiet_since
        while self.level and now - self._quiet_since >= self.quiet:
            self.level -= 1
            self._quiet_since += self.quiet
        return self.level

    def _is_quiet(self, waiting: int, now: float) -> bool:
        """Whether few tokens wait and the next larger size could have handled the recent demand."""
        demand = sum(tokens for start, tokens in self._demand if start > now - self.quiet) / self.quiet
        larger = self._speeds[self.level - 1]
        return self.expected_wait(waiting) <= _QUIET_WAIT * self.target and demand <= _MAX_UTILISATION * larger
