"""Sums between two rows of the log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bertsmith.objectives.base import Sums


class Meter:
    """Adds up losses, hits and targets on the device: reading them at every step would make the loop wait."""

    def __init__(self, terms: tuple[str, ...], others: tuple[str, ...], device: torch.device) -> None:
        self.loss = dict.fromkeys(terms, torch.zeros((), device=device))
        self.correct = dict.fromkeys(terms, torch.zeros((), dtype=torch.long, device=device))
        self.count = dict.fromkeys(terms, torch.zeros((), dtype=torch.long, device=device))
        self.others = {name: dict.fromkeys(terms, torch.zeros((), device=device)) for name in others}
        self.tokens = 0
        self._begin = time.perf_counter()

    def add(self, sums: dict[str, Sums], counts: dict[str, Tensor], tokens: int) -> None:
        for term, value in sums.items():
            self.loss[term] = self.loss[term] + value.loss.detach()
            self.correct[term] = self.correct[term] + value.correct
            self.count[term] = self.count[term] + counts[term]
            for name, sums_so_far in self.others.items():
                sums_so_far[term] = sums_so_far[term] + value.others[name].detach()
        self.tokens += tokens

    def seconds(self) -> float:
        """The time since the meter was made, without pauses."""
        return time.perf_counter() - self._begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves what happens inside, an evaluation or a checkpoint, out of the time."""
        begin = time.perf_counter()
        yield
        self._begin += time.perf_counter() - begin
