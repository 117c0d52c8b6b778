"""The data of a run, phase by phase, from the position that the run has reached."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from bertsmith.data.batch import TrainingBatch
from bertsmith.data.loader import Loaded, load_batches
from bertsmith.data.plan import Cursor, Stream
from bertsmith.data.random import key
from bertsmith.training.checkpoint import Progress
from bertsmith.training.meter import Meter


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


@dataclass(frozen=True)
class PreparedBatch:
    """A micro-batch on the device, ready for the training step."""

    prepared: Any
    cursor: Cursor
    real_tokens: int


class Feed:
    """Iterate over one process's share of the micro-batches; `progress` records the position of those taken."""

    def __init__(
        self,
        data: TrainingData,
        progress: Progress,
        prepare: Callable[[TrainingBatch, int], Any],
        *,
        rank: int,
        processes: int,
        workers: int,
        pin: bool,
    ) -> None:
        self.data, self.progress, self.prepare = data, progress, prepare
        self.rank, self.processes = rank, processes
        self.workers, self.pin = workers, pin
        self._batches: Iterator[Loaded] | None = None
        self._ready: deque[PreparedBatch] = deque()

    def take(self, phase: int, count: int, meter: Meter) -> list[PreparedBatch]:
        """Return the next micro-batches of a phase; a new phase begins at the start of its own stream."""
        progress = self.progress
        if phase != progress.phase:
            progress.phase, progress.cursor, progress.skip = phase, (0, 0, 0), 0
            self._batches = None  # ends the loader workers of the last phase
            self._ready.clear()
        self.fetch(phase, count, meter)
        taken = [self._ready.popleft() for _ in range(count)]
        cursor = taken[-1].cursor
        # the cursor is process 0's, the first micro-batch of the round; skip the whole round
        progress.cursor, progress.skip = (cursor.epoch, cursor.window, cursor.index), self.processes
        return taken

    def fetch(self, phase: int, count: int, meter: Meter) -> None:
        """Read and prepare the micro-batches of the next step, unless a new phase begins, while the device is busy."""
        if phase != self.progress.phase:
            return
        if self._batches is None:
            self._batches = self._open()
        seed = key(self.data.phases[phase].seed, 5)
        while len(self._ready) < count:
            with meter.waiting():
                loaded = next(self._batches)
            self._ready.append(PreparedBatch(self.prepare(loaded.batch, seed), loaded.cursor, loaded.batch.real_tokens))

    def _open(self) -> Iterator[Loaded]:
        phase, progress = self.data.phases[self.progress.phase], self.progress
        return load_batches(
            phase.reader,
            phase.plan,
            Cursor(*progress.cursor),
            skip=progress.skip + self.rank,
            every=self.processes,
            workers=self.workers,
            pin=self.pin,
        )
