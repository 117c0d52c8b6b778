"""The finalists: candidates that promise to keep the budget are written, scored and timed again and again."""

import statistics
from collections.abc import Callable
from typing import Any

from bertsmith.layers.subnet import Subnet
from bertsmith.shrinking.fit.bench import Bench
from bertsmith.shrinking.fit.budget import Costs
from bertsmith.shrinking.fit.candidates import SLACK, Candidate, Estimates
from bertsmith.shrinking.fit.choose import is_better, miss_of, promising, verdict
from bertsmith.shrinking.fit.settings import FitSettings

TRIED_IN_VAIN = 3  # candidates that are measured although no estimate keeps the budget
FEW_TIMINGS = 3  # where the latency is not limited
Watch = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""


class Finals:
    """Measures candidates for real, the most promising first, until no other one can be better."""

    def __init__(
        self,
        settings: FitSettings,
        bench: Bench,
        estimates: Estimates,
        candidates: list[Candidate],
        notices: list[str],
        watch: Watch,
    ) -> None:
        self.settings, self.budget, self.bench = settings, settings.budget, bench
        self.estimates, self.candidates, self.notices, self.watch = estimates, candidates, notices, watch
        self._on_all: set[Subnet] = set()

    def best(self, reference: Candidate) -> Candidate | None:
        """The best candidate that keeps the budget for good; the reference is measured in any case."""
        self.watch(f"measured for real: {reference.words}", 0, self.settings.measure.finalists)
        self._try(reference)
        best = reference if reference.holds else None
        tried = in_vain = 0
        while best is None or tried < self.settings.measure.finalists:
            queue = self._queue(best)
            if not queue and best is None and in_vain < TRIED_IN_VAIN:
                rest = [one for one in self.candidates if one.measured is None]
                queue, in_vain = sorted(rest, key=lambda one: miss_of(one, self.budget)), in_vain + 1
            if not queue:
                break
            candidate = queue[0]
            if not self._has_whole_score(candidate):
                continue  # its score on all of dev may put it elsewhere in the queue
            tried += 1
            self.watch(f"measured for real: {candidate.words}", tried, max(tried, self.settings.measure.finalists))
            if not self._try(candidate):
                continue
            if candidate.holds and (best is None or is_better(candidate, best, self.budget, self.settings.prefer)):
                best, dropped = candidate, best
            else:
                dropped = candidate
            if dropped is not None:
                self.bench.discard(dropped)
        return best

    def _queue(self, best: Candidate | None) -> list[Candidate]:
        """What may keep the budget and be better, as far as is known now."""
        prefer = self.settings.prefer
        return [
            one
            for one in promising(self.candidates, self.budget, prefer, best, SLACK)
            if not self.budget.misses(one.costs, self.estimates.slack(self.candidates, one.way))
        ]

    def _has_whole_score(self, candidate: Candidate) -> bool:
        """Whether its ranking is the score on all of dev; if not, it is so afterwards."""
        if self.bench.quality.is_whole or candidate.subnet in self._on_all:
            return True
        score = self.bench.subnet_score(candidate.subnet, on_all=True)
        self._on_all.add(candidate.subnet)
        for one in self.candidates:
            if one.subnet == candidate.subnet:
                one.ranking = score
        return False

    def _try(self, candidate: Candidate) -> bool:
        """Whether a candidate could be measured; one that could not is no candidate any more."""
        try:
            size = self.bench.size_mb(candidate)
            candidate.timings = [self.bench.timing(candidate, 0)]
            candidate.judged = self.bench.judged(candidate)
            self._note(candidate, size)
            self._settle(candidate)
        except OSError:  # a full disk is nothing of the candidate
            raise
        except Exception as error:  # engines raise what the packages below them raise
            self.notices.append(f"{candidate.words} is left out: {first_line(error)}")
            self.candidates.remove(candidate)
            candidate.measured = None
            return False
        self.estimates.correct(self.candidates, candidate.way)
        return True

    def _settle(self, candidate: Candidate) -> None:
        """Finds out whether it keeps the budget for good, by as many fresh processes as that takes."""
        assert candidate.measured is not None
        size, repeats, limit = candidate.measured.size_mb, self.settings.measure.repeats, self.budget.latency_ms
        while not self.budget.misses(candidate.measured._replace(latency_ms=None)):
            latencies = [self._latency(timing) for timing in candidate.timings]
            if limit is not None:
                candidate.holds = verdict(latencies, limit, repeats)
            elif len(latencies) >= min(FEW_TIMINGS, repeats):
                candidate.holds = True
            if candidate.holds is not None:
                return
            candidate.timings.append(self.bench.timing(candidate, len(candidate.timings)))
            self._note(candidate, size)
        candidate.holds = False

    def _note(self, candidate: Candidate, size: float | None) -> None:
        """What all its timings so far tell: their middle latency, the most memory."""
        latency = statistics.median(self._latency(timing) for timing in candidate.timings)
        memory = max(float(timing["memory_mb"]) for timing in candidate.timings)
        candidate.measured = Costs(latency, size, memory, float(candidate.judged["score"]))

    def _latency(self, timing: dict[str, Any]) -> float:
        return max(float(found[f"p{self.budget.percentile}"]) for found in timing["latency"].values())


def first_line(error: Exception) -> str:
    """The first line of what an exception says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
