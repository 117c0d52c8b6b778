"""Pairs of texts → batches for an encoder-decoder: pairs of similar length stand together.

The source is `[CLS] x [SEP]`; the decoder reads `[CLS] y` and is to say `y [SEP]`. In every epoch the pairs are
shuffled, sorted by the length of their longer side, cut into micro-batches, and these are shuffled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from bertsmith.answers.sequences import IGNORED, Ragged
from bertsmith.data.batch import packed, padded
from bertsmith.data.examples import ExampleConfig
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.loader import Loaded, SpecialTokens
from bertsmith.data.plan import MicroBatchPlan, Stream
from bertsmith.data.random import shuffled
from bertsmith.errors import InputError
from bertsmith.text.tokenizer import Tokenizer


class PairConfig(ExampleConfig):
    """How pairs of texts become sequences, and how these are stored in memory."""

    length: int = Field(default=256, ge=4)
    """The most tokens of a source or a target, special tokens counted in."""
    too_long: Literal["drop", "cut"] = "drop"
    """What happens to a pair with more tokens: it is left out, or its longer texts lose their ends."""
    order: Literal["by_length"] = "by_length"
    """Pairs of similar length are batched together."""
    micro_tokens: int = Field(default=4096, ge=4)
    """The most tokens (pads counted in) of either side of a micro-batch, what one process computes at a time."""

    @model_validator(mode="after")
    def _check_room(self) -> "PairConfig":
        if self.micro_tokens < self.length:
            raise ValueError(f"micro_tokens {self.micro_tokens} is less than length {self.length}")
        return self


@dataclass(frozen=True)
class PairBatch:
    """Sources, what the decoder reads, and what it is to say.

    Shape: each of source, target and expected (batch, length) or (tokens,) in its layout; sample (batch,). `expected`
    lies as `target` does and is IGNORED at pads.
    """

    source: Tensor
    source_layout: SequenceLayout
    target: Tensor
    target_layout: SequenceLayout
    expected: Tensor
    sample: Tensor
    """The number of each pair in its data."""
    real_tokens: int
    """Tokens of both sides, without pads."""

    def to(self, device: torch.device | str) -> "PairBatch":
        """The same batch on another device."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True), lambda layout: layout.to(device))

    def pin_memory(self) -> "PairBatch":
        """The same batch in page-locked memory, from where a GPU copies without waiting."""
        return self._changed(lambda tensor: tensor.pin_memory(), lambda layout: layout.pin_memory())

    def _changed(
        self, tensor: Callable[[Tensor], Tensor], layout: Callable[[SequenceLayout], SequenceLayout]
    ) -> "PairBatch":
        return replace(
            self,
            source=tensor(self.source),
            source_layout=layout(self.source_layout),
            target=tensor(self.target),
            target_layout=layout(self.target_layout),
            expected=tensor(self.expected),
            sample=tensor(self.sample),
        )


@dataclass(frozen=True)
class Pairs:
    """Tokenised pairs, without special tokens, and what had to be done to over-long ones."""

    source: Ragged
    target: Ragged
    dropped: int = 0
    cut: int = 0

    def __len__(self) -> int:
        return len(self.source.starts) - 1

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of every source, [CLS] and [SEP] counted in, and of what the decoder reads, [CLS] counted in."""
        return np.diff(self.source.starts) + 2, np.diff(self.target.starts) + 1

    @classmethod
    def tokenised(
        cls, sources: Sequence[str], targets: Sequence[str], tokenizer: Tokenizer, config: PairConfig
    ) -> "Pairs":
        """The pairs as token ids, over-long ones left out or cut."""
        room = config.length - 2
        kept: list[tuple[list[int], list[int]]] = []
        dropped = cut = 0
        for pair in zip(tokenizer.encode_plain(sources), tokenizer.encode_plain(targets), strict=True):
            if max(map(len, pair)) <= room:
                kept.append(pair)
            elif config.too_long == "cut":
                kept.append((pair[0][:room], pair[1][:room]))
                cut += 1
            else:
                dropped += 1
        if not kept:
            raise InputError(
                f"no pair has at most sequences.length = {config.length} tokens on both sides; "
                'raise it, or say sequences.too_long = "cut"'
            )
        return cls(Ragged.of([source for source, _ in kept]), Ragged.of([target for _, target in kept]), dropped, cut)


class PairPlan(Stream[np.ndarray]):
    """The endless stream of micro-batches of pairs; the content of a micro-batch is the indices of its pairs."""

    config: PairConfig

    def __init__(self, pairs: Pairs, config: PairConfig, seed: int) -> None:
        self.pairs, self.config, self.seed = pairs, config, seed
        self.windows = 1

    def window(self, epoch: int, window: int) -> tuple[int, Callable[[int], np.ndarray]]:
        source, target = self.pairs.lengths
        order = shuffled(len(self.pairs), self.seed, epoch, 4)
        order = order[np.argsort(np.maximum(source, target)[order], kind="stable")]
        bins = self._bins(source[order], target[order])
        positions = shuffled(len(bins), self.seed, epoch, 3)
        return len(bins), lambda position: order[slice(*bins[positions[position]])]

    def _bins(self, source: np.ndarray, target: np.ndarray) -> list[tuple[int, int]]:
        """Runs of pairs, each as long as the tokens of its fuller side, pads counted in, allow."""
        bins: list[tuple[int, int]] = []
        begin = 0
        max_length, total = [0, 0], [0, 0]
        for index, lengths in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            max_length = [max(pair) for pair in zip(max_length, lengths, strict=True)]
            total = [sum(pair) for pair in zip(total, lengths, strict=True)]
            rows = index + 1 - begin
            fullest = max(total) if self.config.layout == "packed" else rows * max(max_length)
            if fullest > self.config.micro_tokens:
                bins.append((begin, index))
                begin, max_length, total = index, list(lengths), list(lengths)
        bins.append((begin, len(source)))
        return bins


class PairReader(Dataset[Loaded]):
    """Makes the batches of a plan. May run in worker processes; keeps no state."""

    def __init__(self, pairs: Pairs, config: PairConfig, special: SpecialTokens) -> None:
        self.pairs, self.config, self.special = pairs, config, special

    def __getitem__(self, plan: MicroBatchPlan[np.ndarray]) -> Loaded:
        start, end = [self.special.start], [self.special.separator]
        sources = [np.concatenate([start, self.pairs.source[index], end]) for index in plan.sequences]
        targets = [np.concatenate([start, self.pairs.target[index]]) for index in plan.sequences]
        expected = [np.concatenate([self.pairs.target[index], end]) for index in plan.sequences]
        lie = packed if self.config.layout == "packed" else padded
        source, source_layout = lie(sources, self.special.pad)
        target, target_layout = lie(targets, self.special.pad)
        batch = PairBatch(
            source=source,
            source_layout=source_layout,
            target=target,
            target_layout=target_layout,
            expected=lie(expected, IGNORED)[0],
            sample=torch.from_numpy(np.asarray(plan.sequences, dtype=np.int64)),
            real_tokens=sum(map(len, sources)) + sum(map(len, targets)),
        )
        return Loaded(batch, plan.cursor)
