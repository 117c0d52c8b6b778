"""How an engine fared in the last seconds: counts since the start, and windows whose memory is bounded."""

from collections import deque
from collections.abc import Callable

import numpy as np

WINDOW = 10.0  # seconds that rates and times are of
_LATENCIES = 4096  # the most that are kept for percentiles: the last ones
_SLOTS = 100  # of the window


class Throughput:
    """Counts what happens. It has no lock of its own: its owner holds one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.began = clock()
        self.answered = self.refused = self.late = self.dropped = self.failed = 0
        self.batches = self.batched_sequences = self.batched_tokens = 0
        self._slots: deque[tuple[float, int, int]] = deque(maxlen=_SLOTS + 1)
        self._latencies: deque[tuple[float, float]] = deque(maxlen=_LATENCIES)

    @property
    def usual_tokens(self) -> int:
        """The mean of all sequences, at least 1."""
        return max(1, self.batched_tokens // max(1, self.batched_sequences))

    def batch(self, sequences: int, tokens: int) -> None:
        """Counts a batch that was answered."""
        self.batches += 1
        self.batched_sequences += sequences
        self.batched_tokens += tokens
        now = self.clock()
        if self._slots and now - self._slots[-1][0] < WINDOW / _SLOTS:
            when, some, more = self._slots.pop()
            self._slots.append((when, some + sequences, more + tokens))
        else:
            self._slots.append((now, sequences, tokens))

    def answer(self, seconds: float) -> None:
        """Counts a call that was answered, and how long it took from being asked."""
        self.answered += 1
        self._latencies.append((self.clock(), seconds))

    def per_second(self) -> tuple[float, float]:
        """Sequences and tokens per second of the window, or of the time since the start if that is shorter."""
        now = self.clock()
        lately = [(sequences, tokens) for when, sequences, tokens in self._slots if when > now - WINDOW]
        seconds = max(1e-3, min(WINDOW, now - self.began))
        return sum(some for some, _ in lately) / seconds, sum(more for _, more in lately) / seconds

    def percentiles(self) -> tuple[float, float] | None:
        """The median and the 99th percentile of the window's times; None if nothing was answered in it."""
        now = self.clock()
        times = [seconds for when, seconds in self._latencies if when > now - WINDOW]
        if not times:
            return None
        median, slowest = np.percentile(times, [50, 99]).tolist()
        return median, slowest
