"""Phases of a run: BERT, for example, trains on 128 tokens for 90 % of the steps, then on 512."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from pydantic import Field

from bertsmith.errors import InputError
from bertsmith.settings import Record
from bertsmith.training.optimizer import BatchConfig


class PhaseConfig(Record):
    """A later phase of a run, with other sequences."""

    begin: float = Field(gt=0, lt=1)
    """Share of the steps after which the phase begins."""
    length: int = Field(ge=16)
    """Maximum sequence length in tokens."""
    micro_tokens: int | None = Field(default=None, ge=16)
    """Tokens of a micro-batch; None for the previous phase's."""
    batch_tokens: int | None = Field(default=None, gt=0)
    """Tokens of an optimiser step; None for the previous phase's."""


@dataclass(frozen=True)
class Phase(ABC):
    """A phase of a run; the first one has `begin` 0."""

    begin: float
    length: int

    @abstractmethod
    def micro_batches(self, step: int, steps: int, processes: int) -> int:
        """Return the number of micro-batches of one step on each process."""

    @abstractmethod
    def check(self, number: int, processes: int) -> None:
        """Raise InputError if a step of phase `number` cannot be divided among the processes."""


@dataclass(frozen=True)
class TokenPhase(Phase):
    """Phase with a batch size in tokens (pre-training)."""

    micro_tokens: int
    batch: BatchConfig

    def micro_batches(self, step: int, steps: int, processes: int) -> int:
        return self.batch.micro_batches(step, steps, self.micro_tokens, processes)

    def check(self, number: int, processes: int) -> None:
        micro, whole = self.micro_tokens, self.batch.tokens
        if whole % (micro * processes):
            names = (f"phases.{number - 1}: batch_tokens", "") if number else ("batch.tokens", "sequences.")
            raise InputError(
                f"{names[0]} is {whole}, which is not a multiple of {names[1]}micro_tokens {micro} times the "
                f"number of processes, {processes}; change one of them"
            )


@dataclass(frozen=True)
class ExamplePhase(Phase):
    """Phase with a batch size in examples (fine-tuning)."""

    examples: int
    micro_examples: int

    def micro_batches(self, step: int, steps: int, processes: int) -> int:
        return self.examples // (self.micro_examples * processes)

    def check(self, number: int, processes: int) -> None:
        if self.examples % (self.micro_examples * processes):
            raise InputError(
                f"batch.examples is {self.examples}, which is not a multiple of batch.micro_examples "
                f"{self.micro_examples} times the number of processes, {processes}; change one of them"
            )


def all_phases(
    length: int, micro_tokens: int, batch: BatchConfig, later: tuple[PhaseConfig, ...]
) -> tuple[TokenPhase, ...]:
    """Return all phases; a later one inherits unset values from the previous one."""
    phases = [TokenPhase(0.0, length, micro_tokens, batch)]
    for config in later:
        before = phases[-1]
        tokens = config.batch_tokens or before.batch.tokens
        micro = config.micro_tokens or before.micro_tokens
        phases.append(TokenPhase(config.begin, config.length, micro, before.batch.changed(tokens=tokens)))
    return tuple(phases)


def borders(phases: Sequence[Phase], steps: int) -> list[int]:
    """Return the first step of each phase, counted from 0, then the number of steps."""
    return [*(round(phase.begin * steps) for phase in phases), steps]


def timetable(phases: Sequence[Phase], steps: int, processes: int) -> tuple[Counter[int], ...]:
    """Count the steps of each phase by their number of micro-batches on each process."""
    return tuple(
        _counts(partial(phase.micro_batches, steps=steps, processes=processes), first, last)
        for phase, (first, last) in zip(phases, pairwise(borders(phases, steps)), strict=True)
    )


def _counts(micro_batches: Callable[[int], int], first: int, last: int) -> Counter[int]:
    """Count the steps in [first, last) by their number of micro-batches."""
    counts: Counter[int] = Counter()
    while first < last:
        same = _equal_steps(micro_batches, first, last)
        counts[micro_batches(first)] += same
        first += same
    return counts


def _equal_steps(micro_batches: Callable[[int], int], first: int, last: int) -> int:
    """Count the steps from the first on with its number of micro-batches, which never decreases."""
    count = micro_batches(first)
    return bisect_left(range(first, last), True, key=lambda step: micro_batches(step) != count)
