"""The data of a run, phase by phase, from the position that the run has reached."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from bertsmith.data.loader import Loaded, load_batches
from bertsmith.data.plan import Cursor, Stream
from bertsmith.training.checkpoint import Progress


@dataclass(frozen=True)
class PhaseData:
    """The data stream of one phase of a run."""

    plan: Stream[Any]
    reader: Dataset[Loaded]
    flops_per_token: float
    seed: int
    """Seed of the order, masks and dropout."""


@dataclass(frozen=True)
class TrainingData:
    """Training data of each phase, and the held-out split."""

    phases: tuple[PhaseData, ...]
    held_out_plan: Stream[Any] | None
    held_out_reader: Dataset[Loaded] | None
    has_one_shape: bool = False
    """Whether all micro-batches of a phase have the same shape."""


class Feed:
    """Iterate over one process's share of the micro-batches; `progress` records the position."""

    def __init__(
        self, data: TrainingData, progress: Progress, *, rank: int, processes: int, workers: int, pin: bool
    ) -> None:
        self.data, self.progress = data, progress
        self.rank, self.processes = rank, processes
        self.workers, self.pin = workers, pin
        self._batches: Iterator[Loaded] | None = None

    def take(self, phase: int, count: int) -> list[Loaded]:
        """Return the next micro-batches of a phase; a new phase begins at the start of its own stream."""
        progress = self.progress
        if phase != progress.phase:
            progress.phase, progress.cursor, progress.skip = phase, (0, 0, 0), 0
            self._batches = None  # ends the loader workers of the last phase
        if self._batches is None:
            self._batches = self._open()
        loaded = [next(self._batches) for _ in range(count)]
        cursor = loaded[-1].cursor
        # the cursor is process 0's, the first micro-batch of the round; skip the whole round
        progress.cursor, progress.skip = (cursor.epoch, cursor.window, cursor.index), self.processes
        return loaded

    def _open(self) -> Iterator[Loaded]:
        phase, progress = self.data.phases[self.progress.phase], self.progress
        plans = phase.plan.from_cursor(Cursor(*progress.cursor), skip=progress.skip + self.rank, every=self.processes)
        return iter(load_batches(phase.reader, plans, workers=self.workers, pin=self.pin))
