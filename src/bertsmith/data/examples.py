"""Batches of task examples, with packed or padded sequences.

An example has one or more items (windows of a long text), and an item has one or more sequences that must be in one
batch (choices of a question, a pair of texts). In every epoch the items are shuffled and split into micro-batches.
The assignment of items to batches does not depend on the layout.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from bertsmith.answers.sequences import IGNORED, Features, Ragged
from bertsmith.data.batch import packed, padded
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.loader import Loaded
from bertsmith.data.plan import MicroBatchPlan, Stream
from bertsmith.data.random import shuffled
from bertsmith.errors import InputError
from bertsmith.settings import Record
from bertsmith.text.word_cache import concatenated_ranges

_POOL_BATCHES = 50  # batches that are sorted by length together


class ExampleConfig(Record):
    """Sequence length, layout and order of task examples."""

    length: int = Field(default=128, ge=4)
    """Maximum sequence length including special tokens; longer texts are truncated or, for answer spans, split."""
    layout: Literal["packed", "padded"] = "packed"
    """Concatenated sequences without padding, or rows padded to the longest of the batch."""
    order: Literal["shuffled", "by_length"] = "shuffled"
    """Batch examples at random, or by similar length, which reduces padding."""


@dataclass(frozen=True)
class TaskBatch:
    """A batch of items of a task.

    Shape: tokens and types (sequences, length) or (tokens,); item (items,); each target (items, …), or shaped like the
    tokens and IGNORED at padding.
    """

    tokens: Tensor
    layout: SequenceLayout
    types: Tensor | None
    item: Tensor
    """Index of each item in its data."""
    targets: dict[str, Tensor]
    real_tokens: int
    """Number of tokens without padding."""

    def to(self, device: torch.device | str) -> "TaskBatch":
        """Return the batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True), lambda layout: layout.to(device))

    def pin_memory(self) -> "TaskBatch":
        """Return the batch in pinned memory, for asynchronous copies to a GPU."""
        return self._map(lambda tensor: tensor.pin_memory(), lambda layout: layout.pin_memory())

    def _map(
        self, tensor: Callable[[Tensor], Tensor], layout: Callable[[SequenceLayout], SequenceLayout]
    ) -> "TaskBatch":
        return replace(
            self,
            tokens=tensor(self.tokens),
            layout=layout(self.layout),
            types=None if self.types is None else tensor(self.types),
            item=tensor(self.item),
            targets={name: tensor(value) for name, value in self.targets.items()},
        )


class ExamplePlan(Stream[np.ndarray]):
    """The endless stream of micro-batches of a task; the content of one is the indices of its items.

    A batch has `examples` items, the last one of an epoch the remainder, and is divided into `parts`; the batches do
    not depend on the number of parts. If the remainder is smaller than that number, the batch before it takes it.
    """

    def __init__(self, features: Features, config: ExampleConfig, examples: int, seed: int, parts: int = 1) -> None:
        if len(features) < parts:
            raise InputError(f"the training data has {len(features)} examples, but a batch has {parts} parts")
        self.features, self.config, self.examples, self.seed, self.parts = features, config, examples, seed, parts
        self.windows = 1

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        whole, left = divmod(len(self.features), self.examples)
        return whole + (left >= self.parts)

    def window(self, epoch: int, window: int) -> tuple[int, Callable[[int], np.ndarray]]:
        order = shuffled(len(self.features), self.seed, epoch, 4)
        if self.config.order == "by_length":
            order = self._by_length(order, epoch)
        return self.batches * self.parts, lambda position: self._part(order, *divmod(position, self.parts))

    def _part(self, order: np.ndarray, batch: int, part: int) -> np.ndarray:
        """Return one part of a batch; the sizes of parts differ by at most one."""
        begin = batch * self.examples
        end = begin + self.examples if batch < self.batches - 1 else len(order)
        items: np.ndarray = np.array_split(order[begin:end], self.parts)[part]
        return items

    def _by_length(self, order: np.ndarray, epoch: int) -> np.ndarray:
        """Return the order with items of similar length in a batch, and the batches shuffled."""
        lengths, size = self.features.lengths, _POOL_BATCHES * self.examples
        pools = (order[begin : begin + size] for begin in range(0, len(order), size))
        order = np.concatenate([pool[np.argsort(-lengths[pool], kind="stable")] for pool in pools])
        whole = len(order) // self.examples
        batches = order[: whole * self.examples].reshape(whole, self.examples)
        mixed = batches[shuffled(whole, self.seed, epoch, 3)].reshape(-1)
        return np.concatenate([mixed, order[whole * self.examples :]])


class ExampleReader(Dataset[Loaded]):
    """Builds the batches of a plan. Stateless; may run in worker processes."""

    def __init__(self, features: Features, config: ExampleConfig, pad: int) -> None:
        self.features, self.config, self.pad = features, config, pad

    def __getitem__(self, plan: MicroBatchPlan[np.ndarray]) -> Loaded:
        return Loaded(self.batch(plan.sequences), plan.cursor)

    def batch(self, items: np.ndarray) -> TaskBatch:
        """Return the batch of some items, given by index."""
        features = self.features
        first = features.items[items]
        sequences = concatenated_ranges(first, features.items[items + 1] - first)
        collate = packed if self.config.layout == "packed" else padded

        def batched(ragged: Ragged, padding: int) -> tuple[Tensor, SequenceLayout]:
            return collate(ragged.take(sequences), padding)

        tokens, layout = batched(features.tokens, self.pad)
        targets = {
            name: batched(target, IGNORED)[0] if isinstance(target, Ragged) else torch.from_numpy(target[items])
            for name, target in features.targets.items()
        }
        return TaskBatch(
            tokens=tokens,
            layout=layout,
            types=None if features.types is None else batched(features.types, 0)[0],
            item=torch.from_numpy(items.astype(np.int64)),
            targets=targets,
            real_tokens=int(features.tokens.lengths[sequences].sum()),
        )
