"""The order of the data: the assignment of sequences to micro-batches, as a pure function of the seed.

Documents are shuffled once per epoch and processed in windows. The sequences of a window are shuffled and packed into
micro-batches. The stream of micro-batches is the same for any number of processes: of N processes, process p takes
the micro-batches with number ≡ p (mod N).
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from pydantic import Field, model_validator

from bertsmith.data.joined import full_sentences, windows
from bertsmith.data.random import shuffled
from bertsmith.data.segments import inverted_segments, segments
from bertsmith.data.sequences import Documents, Sequences, chunks, sentence_pairs
from bertsmith.errors import InputError
from bertsmith.settings import Record


def pack(lengths: np.ndarray, capacity: int, most: int, *, open_bins: int = 16) -> list[np.ndarray]:
    """Best-fit packing: return the indices of the sequences in each bin, bins in the order they were closed.

    Each sequence, in the given order, goes to the open bin with the least sufficient room. A bin holds at most `most`
    sequences. If too many bins are open, the fullest is closed.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        raise InputError(f"a sequence of {int(lengths.max())} tokens does not fit a micro-batch of {capacity} tokens")
    closed: list[np.ndarray] = []
    members: dict[int, list[int]] = {}
    rooms: list[tuple[int, int]] = []  # (room, bin), least room first
    fresh = 0
    for index, length in enumerate(lengths.tolist()):
        found = bisect_left(rooms, (length, -1))
        if found == len(rooms):
            room, number = capacity, fresh
            members[number] = []
            fresh += 1
        else:
            room, number = rooms.pop(found)
        members[number].append(index)
        room -= length
        if room == 0 or len(members[number]) == most:
            closed.append(np.array(members.pop(number)))
        else:
            insort(rooms, (room, number))
        if len(rooms) > open_bins:
            closed.append(np.array(members.pop(rooms.pop(0)[1])))
    return closed + [np.array(members[number]) for _, number in rooms]


_WINDOW_TOKENS = 1 << 20
_CUTS = {
    "chunks": chunks,
    "sentence_pairs": sentence_pairs,
    "segments": segments,
    "convbert_segments": inverted_segments,
}
_JOINED_CUTS = {"windows": windows, "full_sentences": full_sentences}


class SequenceConfig(Record):
    """Sequence length, cut, layout and micro-batch size of a corpus."""

    length: int = Field(default=128, ge=16)
    """Maximum sequence length, including special tokens."""
    cut: Literal["chunks", "sentence_pairs", "segments", "convbert_segments", "windows", "full_sentences"] = "chunks"
    """Consecutive chunks of a document; BERT's segment pairs for next-sentence prediction; ELECTRA's examples of one or
    two segments; or ConvBERT's variant of these, whose code has two conditions inverted: nearly always one segment.
    Segments differ in their token type, if the model has types, and are separated by [SEP].
    "windows" joins documents, with a [SEP] between them, and cuts at exactly this length; "full_sentences" joins them,
    too, and cuts at sentence ends (RoBERTa)."""
    crosses_documents: bool = True
    """For cut = "windows" and "full_sentences": one sequence may contain several documents. If false, the cuts are the
    same, but every document in them is a sequence of its own, without attention to the others."""
    layout: Literal["packed", "padded"] = "packed"
    """Concatenated sequences without padding, or rows padded to one length."""
    micro_tokens: int = Field(default=8192, ge=16)
    """Tokens of a micro-batch, including padding: what one process computes at a time."""

    @model_validator(mode="after")
    def _check_room(self) -> "SequenceConfig":
        if self.micro_tokens < self.length:
            raise ValueError(f"micro_tokens {self.micro_tokens} is less than length {self.length}")
        return self

    @model_validator(mode="after")
    def _check_crossing(self) -> "SequenceConfig":
        if not self.crosses_documents and self.cut not in _JOINED_CUTS:
            raise ValueError(
                f"crosses_documents is false and cut {self.cut!r} never crosses documents; omit it, or set cut to "
                "'windows' or 'full_sentences'"
            )
        return self

    @property
    def has_types(self) -> bool:
        """Whether tokens have a type: 0 in the first segment, 1 in the second."""
        return self.cut in ("sentence_pairs", "segments", "convbert_segments")


@dataclass(frozen=True)
class Cursor:
    """A position in the stream of micro-batches."""

    epoch: int = 0
    window: int = 0
    index: int = 0


Content = TypeVar("Content")


@dataclass(frozen=True)
class MicroBatchPlan(Generic[Content]):
    """The sequences of one micro-batch and its position in the stream."""

    sequences: Content
    cursor: Cursor


class Stream(ABC, Generic[Content]):
    """An endless, deterministic stream of micro-batches: epochs of `windows` windows each."""

    windows: int

    @abstractmethod
    def window(self, epoch: int, window: int) -> tuple[int, Callable[[int], Content]]:
        """Return the number of micro-batches of a window, and a function that returns the content of one."""

    def from_cursor(self, cursor: Cursor, *, skip: int = 0, every: int = 1) -> Iterator[MicroBatchPlan[Content]]:
        """Yield micro-batches from a cursor on, endlessly: skip the first `skip`, then take one of `every`."""
        number = 0
        empty = 0
        epoch, window, index = cursor.epoch, cursor.window, cursor.index
        while True:
            count, content = self.window(epoch, window)
            empty = 0 if count else empty + 1
            if empty > self.windows:
                raise InputError("it is too small to make a sequence")
            for position in range(index, count):
                if number >= skip and (number - skip) % every == 0:
                    yield MicroBatchPlan(content(position), Cursor(epoch, window, position))
                number += 1
            window, index = window + 1, 0
            if window == self.windows:
                epoch, window = epoch + 1, 0

    def one_epoch(self) -> Iterator[MicroBatchPlan[Content]]:
        """Yield the micro-batches of the first epoch."""
        for batch in self.from_cursor(Cursor()):
            if batch.cursor.epoch:
                return
            yield batch


class Plan(Stream[Sequences]):
    """The endless stream of micro-batches of a corpus."""

    config: SequenceConfig

    def __init__(
        self, corpus: Documents, config: SequenceConfig, seed: int, *, window_tokens: int | None = None
    ) -> None:
        self.corpus, self.config, self.seed = corpus, config, seed
        documents = len(corpus.lengths)
        total = int(corpus.lengths.sum())
        if total == 0:
            raise InputError("the corpus split has no tokens")
        # enough micro-batches that the last one of a window, which is not full, has little effect
        target = window_tokens or max(_WINDOW_TOKENS, 64 * config.micro_tokens)
        self.window_documents = max(1, round(documents * target / total))
        self.windows = -(-documents // self.window_documents)
        self.slots = self._slots()

    def __getstate__(self) -> dict[str, Any]:
        # loader workers compute the order of their epochs themselves: it may be as large as the corpus's index
        return {name: value for name, value in self.__dict__.items() if name != "_cached_order"}

    def _slots(self) -> int:
        """Return the maximum number of sequences of a micro-batch: 25 % above the expected number."""
        if self.config.layout == "padded":
            return self.config.micro_tokens // self.config.length
        body = self.config.length - 2
        sizes = self.corpus.lengths
        if self.config.cut in _JOINED_CUTS:
            # two neighbours of whole sentences fill more than one body, or they would be one sequence
            filled = body if self.config.cut == "windows" else body // 2
            borders = 0 if self.config.crosses_documents else len(sizes)
            sequences = -(-int(sizes.sum()) // filled) + borders
        else:
            sequences = int((-(-sizes // body)).sum())
        mean = int(sizes.sum()) / max(1, sequences) + 2
        return int(1.25 * self.config.micro_tokens / mean) + 8

    def check(self, split: str) -> "Plan":
        """Return the plan; raise InputError if this split has no micro-batch."""
        try:
            next(self.from_cursor(Cursor()))
        except InputError as error:
            raise InputError(f"{split} split: {error} with sequences.cut = {self.config.cut!r}") from None
        return self

    def window(self, epoch: int, window: int) -> tuple[int, Callable[[int], Sequences]]:
        order = self._order(epoch)
        documents = order[window * self.window_documents : (window + 1) * self.window_documents]
        sequences = self._cut(documents, epoch)
        sequences = sequences.take(shuffled(len(sequences), self.seed, epoch, window, 3))
        if self.config.layout == "packed":
            bins = pack(sequences.lengths, self.config.micro_tokens, self.slots)
        else:
            whole = range(0, len(sequences), self.slots)
            bins = [np.arange(i, min(i + self.slots, len(sequences))) for i in whole]
        return len(bins), lambda position: sequences.take(bins[position])

    def _cut(self, documents: np.ndarray, epoch: int) -> Sequences:
        inputs, cut = (self.corpus, documents, self.config.length, self.seed, epoch), self.config.cut
        if cut in _JOINED_CUTS:
            return _JOINED_CUTS[cut](*inputs, crosses_documents=self.config.crosses_documents)
        return _CUTS[cut](*inputs)

    def _order(self, epoch: int) -> np.ndarray:
        """Return the order of the documents in an epoch; the last order is cached."""
        cached = getattr(self, "_cached_order", None)
        if cached is None or cached[0] != epoch:
            cached = self._cached_order = (epoch, shuffled(len(self.corpus.lengths), self.seed, epoch, 4))
        return cached[1]
