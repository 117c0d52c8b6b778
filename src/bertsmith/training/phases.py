"""The parts of a run: BERT learns from sequences of 128 tokens for nine tenths of it, then from 512."""

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
    """A later part of a run, with other sequences."""

    begin: float = Field(gt=0, lt=1)
    """Share of the steps after which it begins."""
    length: int = Field(ge=16)
    """The most tokens of a sequence from then on."""
    micro_tokens: int | None = Field(default=None, ge=16)
    """Tokens of a micro-batch; None for as many as before."""
    batch_tokens: int | None = Field(default=None, gt=0)
    """Tokens of an optimiser step; None for as many as before."""


@dataclass(frozen=True)
class Phase(ABC):
    """A part of a run: the first one has `begin` 0."""

    begin: float
    length: int

    @abstractmethod
    def micro_batches(self, step: int, steps: int, processes: int) -> int:
        """The micro-batches of one step on each process."""

    @abstractmethod
    def check(self, number: int, processes: int) -> None:
        """Raises a sentence if a step of phase `number` cannot be divided among the processes."""


@dataclass(frozen=True)
class TokenPhase(Phase):
    """A step sees so many tokens, as pre-training counts."""

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
    """A step sees so many examples, as fine-tuning counts."""

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
    """The first phase and the later ones, each with what it takes over from the one before."""
    phases = [TokenPhase(0.0, length, micro_tokens, batch)]
    for config in later:
        before = phases[-1]
        tokens = config.batch_tokens or before.batch.tokens
        micro = config.micro_tokens or before.micro_tokens
        phases.append(TokenPhase(config.begin, config.length, micro, before.batch.changed(tokens=tokens)))
    return tuple(phases)


def borders(phases: Sequence[Phase], steps: int) -> list[int]:
    """The step, counted from 0, with which each phase begins, then the number of steps."""
    return [*(round(phase.begin * steps) for phase in phases), steps]


def timetable(phases: Sequence[Phase], steps: int, processes: int) -> tuple[Counter[int], ...]:
    """Of each phase, how many of its steps have how many micro-batches on each process."""
    return tuple(
        _counts(partial(phase.micro_batches, steps=steps, processes=processes), first, last)
        for phase, (first, last) in zip(phases, pairwise(borders(phases, steps)), strict=True)
    )


def _counts(micro_batches: Callable[[int], int], first: int, last: int) -> Counter[int]:
    """How often each number of micro-batches occurs from one step to another."""
    counts: Counter[int] = Counter()
    while first < last:
        same = _same(micro_batches, first, last)
        counts[micro_batches(first)] += same
        first += same
    return counts


def _same(micro_batches: Callable[[int], int], first: int, last: int) -> int:
    """How many steps from the first on have as many micro-batches as it: a batch grows steadily or stays."""
    count = micro_batches(first)
    return bisect_left(range(first, last), True, key=lambda step: micro_batches(step) != count)
