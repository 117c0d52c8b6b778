"""Load the batches of a plan from the corpus in worker processes."""

import math
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from bertsmith.data.batch import TokenBatch, TrainingBatch
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.nested import as_arrays, as_tensors
from bertsmith.data.parent import exit_with_parent
from bertsmith.data.plan import Cursor, MicroBatchPlan, SequenceConfig, Stream
from bertsmith.data.sequences import Sequences

START = Cursor()


class TokenSource(Protocol):
    """Documents of tokens; a TokenCorpus is one."""

    def read(self, document: int, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens that the loader inserts."""

    pad: int
    start: int
    separator: int


@dataclass(frozen=True)
class Loaded:
    """A batch and its position in the stream."""

    batch: TrainingBatch
    cursor: Cursor

    def pin_memory(self) -> "Loaded":
        return Loaded(self.batch.pin_memory(), self.cursor)


class BatchReader(Dataset[Loaded]):
    """Reads the batches of a plan. Stateless; may run in worker processes."""

    def __init__(self, corpus: TokenSource, config: SequenceConfig, special: SpecialTokens, slots: int | None) -> None:
        self.corpus, self.config, self.special = corpus, config, special
        self.slots = slots
        """Number of sequences that packed batches are padded to, for a fixed shape; None for no such padding."""

    def __getitem__(self, plan: MicroBatchPlan[Sequences]) -> Loaded:
        read = self._packed if self.config.layout == "packed" else self._padded
        return Loaded(read(plan.sequences), plan.cursor)

    def _packed(self, sequences: Sequences) -> TokenBatch:
        capacity, max_length = self.config.micro_tokens, self.config.length
        lengths = sequences.lengths
        used, count = int(lengths.sum()), len(lengths)
        # the rest of the batch is padded with sequences of padding tokens, which no other sequence sees
        padding = (
            np.diff(np.append(np.arange(used, capacity, max_length), capacity)) if used < capacity else lengths[:0]
        )
        starts = np.concatenate([[0], np.cumsum(np.concatenate([lengths, padding]))])
        if self.slots is not None:
            # room for the padding sequences; unused slots are empty sequences
            slots = self.slots + -(-capacity // max_length)
            starts = np.concatenate([starts, np.full(slots + 1 - len(starts), capacity)])
        tokens, types = self._assemble(sequences, starts[:count], (capacity,))
        layout = SequenceLayout.packed(torch.from_numpy(starts.astype(np.int32)), max_length)
        return self._batch(tokens, layout, sequences, layout.batch, used, types)

    def _padded(self, sequences: Sequences) -> TokenBatch:
        rows, length = self.config.micro_tokens // self.config.length, self.config.length
        lengths = np.zeros(rows, dtype=np.int64)
        lengths[: len(sequences)] = sequences.lengths
        tokens, types = self._assemble(sequences, np.arange(len(sequences)) * length, (rows, length))
        is_token = torch.from_numpy(np.arange(length) < lengths[:, None])
        used = int(lengths.sum())
        return self._batch(tokens, SequenceLayout.padded(is_token), sequences, rows, used, types)

    def _assemble(
        self, sequences: Sequences, begins: np.ndarray, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the tokens of a batch, with sequences starting at `begins`, and their types, if any.

        A sequence is [CLS] a [SEP] or [CLS] a [SEP] b [SEP], with type 1 from b on; the rest is padding. Joined
        documents have a [SEP] between them in a.

        Shape: begins (sequences,), positions in the flattened batch.
        """
        size = math.prod(shape)
        tokens = np.full(size, self.special.pad, dtype=np.int64)
        sizes = sequences.run_lengths
        before = np.cumsum(sizes) - sizes
        before -= before[sequences.offsets[:-1]][sequences.owner]  # relative to the sequence
        positions = begins[sequences.owner] + 1 + before + sequences.is_second
        if sequences.breaks is not None:
            tokens[positions[sequences.breaks]] = self.special.separator
            positions = positions + sequences.breaks
        runs = (sequences.document, sequences.start, sequences.stop, positions)
        for document, start, stop, position in zip(*(array.tolist() for array in runs), strict=True):
            tokens[position : position + stop - start] = self.corpus.read(document, start, stop)
        first, second = sequences.segment_lengths.T
        ends = begins + 1 + first
        tokens[begins], tokens[ends] = self.special.start, self.special.separator
        ends, second_ends = ends[second > 0], (ends + 1 + second)[second > 0]
        tokens[second_ends] = self.special.separator
        if not self.config.has_types:
            return tokens.reshape(shape), None
        steps = np.zeros(size, dtype=np.int64)
        steps[ends + 1] = 1
        steps[second_ends[second_ends + 1 < size] + 1] = -1
        return tokens.reshape(shape), np.cumsum(steps).reshape(shape)

    def _batch(
        self,
        tokens: np.ndarray,
        layout: SequenceLayout,
        sequences: Sequences,
        slots: int,
        used: int,
        types: np.ndarray | None,
    ) -> TokenBatch:
        return TokenBatch(
            tokens=torch.from_numpy(tokens),
            layout=layout,
            sample=torch.from_numpy(_pad_to(sequences.sample, slots, 0)),
            real_tokens=used,
            types=None if types is None else torch.from_numpy(types),
            is_next=None if sequences.is_next is None else torch.from_numpy(_pad_to(sequences.is_next, slots, -100)),
        )


@dataclass(frozen=True)
class _WorkerBatch:
    """A batch as NumPy arrays, which a worker sends faster than tensors: every tensor is a shared memory of its own.

    The loader calls `pin_memory` in a thread if batches are pinned.
    """

    arrays: Loaded

    def unpack(self) -> Loaded:
        return as_tensors(self.arrays)

    def pin_memory(self) -> Loaded:
        return self.unpack().pin_memory()


class _Batches(IterableDataset[Loaded | _WorkerBatch]):
    """Plans and reads batches. Every worker plans all of them, since plans are cheap, and reads its own share."""

    def __init__(self, reader: Dataset[Loaded], plan: Stream[Any], cursor: Cursor, skip: int, every: int) -> None:
        self.reader, self.plan, self.cursor, self.skip, self.every = reader, plan, cursor, skip, every

    def __iter__(self) -> Iterator[Loaded | _WorkerBatch]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        skip, every = self.skip + number * self.every, self.every * workers
        for plan in self.plan.from_cursor(self.cursor, skip=skip, every=every):
            batch = self.reader[plan]
            yield batch if worker is None else _WorkerBatch(as_arrays(batch))


def load_batches(
    reader: Dataset[Loaded],
    plan: Stream[Any],
    cursor: Cursor = START,
    *,
    skip: int = 0,
    every: int = 1,
    workers: int = 0,
    pin: bool = False,
) -> Iterator[Loaded]:
    """Yield the batches of a plan as `Stream.from_cursor` orders them, for any number of workers.

    There is at most one worker per core.
    """
    workers = min(workers, _cores())
    loader = DataLoader(
        _Batches(reader, plan, cursor, skip, every),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=pin,
        multiprocessing_context=_fork_server() if workers else None,
        worker_init_fn=partial(_start_worker, os.getpid()) if workers else None,
    )
    for batch in loader:
        yield batch.unpack() if isinstance(batch, _WorkerBatch) else batch


def _cores() -> int:
    """Return the number of cores this process may use; PyTorch warns about more workers."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _fork_server() -> BaseContext:
    """Return a context whose processes end with this one even while they import PyTorch."""
    context = multiprocessing.get_context("forkserver")
    # without effect if another part of the process has started the fork server: then workers watch after their imports
    context.set_forkserver_preload(["bertsmith.data.fork_server"])
    return context


def _start_worker(main: int, worker: int) -> None:
    """Leave the signals of a terminal to the main process, and end with it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent(main)


def _pad_to(array: np.ndarray, slots: int, value: int) -> np.ndarray:
    return np.concatenate([array, np.full(slots - len(array), value, dtype=array.dtype)])
