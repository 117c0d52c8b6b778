"""Batches of text pairs for an encoder-decoder, grouped by similar length.

The source is `[CLS] x [SEP]`; the decoder reads `[CLS] y` and predicts `y [SEP]`. In every epoch the pairs are
shuffled, sorted by the length of their longer side and split into micro-batches, which are shuffled.
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
    """Sequence length, layout and micro-batches of text pairs."""

    length: int = Field(default=256, ge=4)
    """Maximum length of a source or target, including special tokens."""
    too_long: Literal["drop", "cut"] = "drop"
    """Drop pairs with more tokens, or truncate their texts."""
    order: Literal["by_length"] = "by_length"
    """Pairs of similar length are batched together."""
    micro_tokens: int = Field(default=4096, ge=4)
    """Maximum number of tokens, including padding, on either side of a micro-batch."""

    @model_validator(mode="after")
    def _check_room(self) -> "PairConfig":
        if self.micro_tokens < self.length:
            raise ValueError(f"micro_tokens {self.micro_tokens} is less than length {self.length}")
        return self


@dataclass(frozen=True)
class PairBatch:
    """Sources, decoder inputs (`target`) and decoder targets (`expected`).

    Shape: source, target and expected (batch, length) or (tokens,); sample (batch,). `expected` has the layout of
    `target` and is IGNORED at padding.
    """

    source: Tensor
    source_layout: SequenceLayout
    target: Tensor
    target_layout: SequenceLayout
    expected: Tensor
    sample: Tensor
    """Index of each pair in its data."""
    real_tokens: int
    """Number of tokens of both sides, without padding."""

    def to(self, device: torch.device | str) -> "PairBatch":
        """Return the batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True), lambda layout: layout.to(device))

    def pin_memory(self) -> "PairBatch":
        """Return the batch in pinned memory, for asynchronous copies to a GPU."""
        return self._map(lambda tensor: tensor.pin_memory(), lambda layout: layout.pin_memory())

    def _map(
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
    """Tokenised pairs without special tokens, and the numbers of dropped and truncated ones."""

    source: Ragged
    target: Ragged
    dropped: int = 0
    cut: int = 0

    def __len__(self) -> int:
        return len(self.source.starts) - 1

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of the sources, including [CLS] and [SEP], and of the decoder inputs, including [CLS]."""
        return np.diff(self.source.starts) + 2, np.diff(self.target.starts) + 1

    @classmethod
    def tokenise(
        cls, sources: Sequence[str], targets: Sequence[str], tokenizer: Tokenizer, config: PairConfig
    ) -> "Pairs":
        """Tokenise pairs; drop or truncate pairs that are too long."""
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
                'increase it, or set sequences.too_long = "cut"'
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
        """Return ranges of consecutive pairs whose fuller side, including padding, fits `micro_tokens`."""
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
    """Builds the batches of a plan. Stateless; may run in worker processes."""

    def __init__(self, pairs: Pairs, config: PairConfig, special: SpecialTokens) -> None:
        self.pairs, self.config, self.special = pairs, config, special

    def __getitem__(self, plan: MicroBatchPlan[np.ndarray]) -> Loaded:
        start, end = [self.special.start], [self.special.separator]
        sources = [np.concatenate([start, self.pairs.source[index], end]) for index in plan.sequences]
        targets = [np.concatenate([start, self.pairs.target[index]]) for index in plan.sequences]
        expected = [np.concatenate([self.pairs.target[index], end]) for index in plan.sequences]
        collate = packed if self.config.layout == "packed" else padded
        source, source_layout = collate(sources, self.special.pad)
        target, target_layout = collate(targets, self.special.pad)
        batch = PairBatch(
            source=source,
            source_layout=source_layout,
            target=target,
            target_layout=target_layout,
            expected=collate(expected, IGNORED)[0],
            sample=torch.from_numpy(np.asarray(plan.sequences, dtype=np.int64)),
            real_tokens=sum(map(len, sources)) + sum(map(len, targets)),
        )
        return Loaded(batch, plan.cursor)
