"""Sums between two rows of the log."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from bertsmith.objectives.base import Sums


class Meter:
    """Adds up what an objective reports, on the device: reading it at every step would make the loop wait."""

    def __init__(self, terms: Mapping[str, tuple[str, ...]], device: torch.device) -> None:
        self.loss = dict.fromkeys(terms, torch.zeros((), device=device))
        nothing = torch.zeros((), dtype=torch.long, device=device)  # hits stay whole numbers
        self.count = dict.fromkeys(terms, nothing)
        self.others = {f"{term}_{name}": nothing for term, names in terms.items() for name in names}
        self.tokens = 0
        self._begin = time.perf_counter()

    def add(self, sums: dict[str, Sums], counts: dict[str, Tensor], tokens: int) -> None:
        for term, value in sums.items():
            self.loss[term] = self.loss[term] + value.loss.detach()
            self.count[term] = self.count[term] + counts[term]
            for name, other in value.others.items():
                self.others[f"{term}_{name}"] = self.others[f"{term}_{name}"] + other.detach()
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
