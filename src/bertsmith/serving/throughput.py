"""Counts since the start, and rates and latencies over the last seconds, in bounded memory."""

import math
from collections import deque
from collections.abc import Callable

import numpy as np

WINDOW = 10.0  # seconds over which rates and latencies are computed
_MAX_LATENCIES = 4096
_MEDIAN_SECONDS = 0.5  # between two computations of the median
_SLOTS = 100  # time slots of the window, each with its counts


class Throughput:
    """Counters of one scheduler. Not thread-safe: the scheduler holds a lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.started_at = clock()
        self.answered = self.refused = self.late = self.cancelled = self.failed = 0
        self.batches = self.batched_sequences = self.batched_tokens = 0
        self._slots: deque[tuple[float, int, int]] = deque(maxlen=_SLOTS + 1)
        self._median_at, self._median = -math.inf, 0.0
        self._latencies: deque[tuple[float, float]] = deque(maxlen=_MAX_LATENCIES)

    @property
    def mean_tokens(self) -> int:
        """Mean length of all sequences so far, at least 1."""
        return max(1, self.batched_tokens // max(1, self.batched_sequences))

    def count_batch(self, sequences: int, tokens: int) -> None:
        """Count a computed batch."""
        self.batches += 1
        self.batched_sequences += sequences
        self.batched_tokens += tokens
        now = self.clock()
        if self._slots and now - self._slots[-1][0] < WINDOW / _SLOTS:
            start, slot_sequences, slot_tokens = self._slots.pop()
            self._slots.append((start, slot_sequences + sequences, slot_tokens + tokens))
        else:
            self._slots.append((now, sequences, tokens))

    def count_answer(self, seconds: float) -> None:
        """Count an answered request and its latency."""
        self.answered += 1
        self._latencies.append((self.clock(), seconds))

    def per_second(self) -> tuple[float, float]:
        """Return sequences and tokens per second over the window, or since the start if that is shorter."""
        now = self.clock()
        recent = [(sequences, tokens) for start, sequences, tokens in self._slots if start > now - WINDOW]
        seconds = max(1e-3, min(WINDOW, now - self.started_at))
        return sum(sequences for sequences, _ in recent) / seconds, sum(tokens for _, tokens in recent) / seconds

    def recent_latency(self) -> float:
        """Return the median latency over the window, at most half a second old; 0 if nothing was answered."""
        now = self.clock()
        if now - self._median_at >= _MEDIAN_SECONDS:
            self._median_at, self._median = now, (self.latency_percentiles() or (0.0, 0.0))[0]
        return self._median

    def latency_percentiles(self) -> tuple[float, float] | None:
        """Return the median and the 99th percentile over the window; None if nothing was answered in it."""
        now = self.clock()
        latencies = [seconds for when, seconds in self._latencies if when > now - WINDOW]
        if not latencies:
            return None
        median, slowest = np.percentile(latencies, [50, 99]).tolist()
        return median, slowest
