"""Examples of a task → batches: so many examples a step, their sequences packed or padded.

An example gives one item or several (the windows of a long text), and an item one sequence or several that must stand
in one batch (the choices of a question, a text and its like). In every epoch the items are shuffled and cut into
micro-batches. Which items stand together does not depend on how they lie in memory.
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

_POOL = 50  # micro-batches that are sorted by length together


class ExampleConfig(Record):
    """How the examples of a task become sequences, and how these lie in memory."""

    length: int = Field(default=128, ge=4)
    """The most tokens of a sequence, special tokens counted in; longer texts are cut or, for answer spans, split."""
    layout: Literal["packed", "padded"] = "packed"
    """Sequences one after the other without pads, or rows as long as the longest of the batch."""
    order: Literal["shuffled", "by_length"] = "shuffled"
    """Which examples stand together: any, or such as are about as long, which leaves a padded batch few pads."""


@dataclass(frozen=True)
class TaskBatch:
    """Some items of a task.

    Shape: tokens and types (batch, length) or (tokens,), the batch being that of the sequences; item (items,); each of
    targets (items, …), or as the tokens lie, IGNORED at pads.
    """

    tokens: Tensor
    layout: SequenceLayout
    types: Tensor | None
    item: Tensor
    """The number of each item in its data."""
    targets: dict[str, Tensor]
    real_tokens: int
    """Tokens without pads."""

    def to(self, device: torch.device | str) -> "TaskBatch":
        """The same batch on another device."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True), lambda layout: layout.to(device))

    def pin_memory(self) -> "TaskBatch":
        """The same batch in page-locked memory, from where a GPU copies without waiting."""
        return self._changed(lambda tensor: tensor.pin_memory(), lambda layout: layout.pin_memory())

    def _changed(
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
    """The endless stream of micro-batches of items; the content of one is the numbers of its items.

    A batch has so many `examples`, the last one of an epoch what is left, and is divided into `parts`: however many,
    an epoch has the same batches. Only where so little is left that a part would be empty, the batch before has it.
    """

    def __init__(self, features: Features, config: ExampleConfig, examples: int, seed: int, parts: int = 1) -> None:
        if len(features) < parts:
            raise InputError(f"there are {len(features)} examples to learn from; a batch is divided into {parts} parts")
        self.features, self.config, self.examples, self.seed, self.parts = features, config, examples, seed, parts
        self.windows = 1

    @property
    def batches(self) -> int:
        """The batches of an epoch."""
        whole, left = divmod(len(self.features), self.examples)
        return whole + (left >= self.parts)

    def window(self, epoch: int, window: int) -> tuple[int, Callable[[int], np.ndarray]]:
        order = shuffled(len(self.features), self.seed, epoch, 4)
        if self.config.order == "by_length":
            order = self._by_length(order, epoch)
        return self.batches * self.parts, lambda position: self._part(order, *divmod(position, self.parts))

    def _part(self, order: np.ndarray, batch: int, part: int) -> np.ndarray:
        """One part of a batch, as large as the others or by one larger."""
        begin = batch * self.examples
        end = begin + self.examples if batch < self.batches - 1 else len(order)
        items: np.ndarray = np.array_split(order[begin:end], self.parts)[part]
        return items

    def _by_length(self, order: np.ndarray, epoch: int) -> np.ndarray:
        """The order with items of about one length side by side, and the batches in no order of length."""
        lengths, size = self.features.lengths, _POOL * self.examples
        pools = (order[begin : begin + size] for begin in range(0, len(order), size))
        order = np.concatenate([pool[np.argsort(-lengths[pool], kind="stable")] for pool in pools])
        whole = len(order) // self.examples
        batches = order[: whole * self.examples].reshape(whole, self.examples)
        mixed = batches[shuffled(whole, self.seed, epoch, 3)].reshape(-1)
        return np.concatenate([mixed, order[whole * self.examples :]])


class EvaluationPlan(Stream[np.ndarray]):
    """All items once, those of about one length together, as many as a number of tokens allows."""

    def __init__(self, features: Features, micro_tokens: int) -> None:
        self.features = features
        self.windows = 1
        order = np.argsort(-features.lengths, kind="stable")
        self.bins: list[np.ndarray] = []
        begin = 0
        while begin < len(order):
            # the longest item comes first, so a padded batch would be that wide
            count = max(1, micro_tokens // int(features.lengths[order[begin]]))
            self.bins.append(order[begin : begin + count])
            begin += count

    def window(self, epoch: int, window: int) -> tuple[int, Callable[[int], np.ndarray]]:
        return len(self.bins), lambda position: self.bins[position]


class ExampleReader(Dataset[Loaded]):
    """Makes the batches of a plan. May run in worker processes; keeps no state."""

    def __init__(self, features: Features, config: ExampleConfig, pad: int) -> None:
        self.features, self.config, self.pad = features, config, pad

    def __getitem__(self, plan: MicroBatchPlan[np.ndarray]) -> Loaded:
        features, items = self.features, plan.sequences
        ranges = [np.arange(features.items[item], features.items[item + 1]) for item in items.tolist()]
        sequences = np.concatenate(ranges).tolist()
        lie = packed if self.config.layout == "packed" else padded

        def laid(ragged: Ragged, filling: int) -> tuple[Tensor, SequenceLayout]:
            return lie([ragged[sequence] for sequence in sequences], filling)

        tokens, layout = laid(features.tokens, self.pad)
        targets = {
            name: laid(target, IGNORED)[0] if isinstance(target, Ragged) else torch.from_numpy(target[items])
            for name, target in features.targets.items()
        }
        batch = TaskBatch(
            tokens=tokens,
            layout=layout,
            types=None if features.types is None else laid(features.types, 0)[0],
            item=torch.from_numpy(items.astype(np.int64)),
            targets=targets,
            real_tokens=int(features.tokens.lengths[sequences].sum()),
        )
        return Loaded(batch, plan.cursor)
