"""What a graph is compared with its model on as it is written: real texts of every length, and the task's own data."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.base import Inputs
from bertsmith.engines.onnx_graph import longest_input
from bertsmith.engines.onnx_session import GraphHead
from bertsmith.models.model import Model
from bertsmith.text.support_desk import messages
from bertsmith.text.tokenizer import Tokenizer

LONGEST = 2048  # tokens of a probe: attention of more takes gigabytes
_RAGGED = 128  # the longest of a batch of several
_MESSAGES = 6
_SAMPLES = 4  # batches of the samples


class Difference(NamedTuple):
    """How far a graph is from its model at most, and on what that was measured."""

    absolute: float
    relative: float
    """As a share of the model's largest output in the batch."""
    largest_output: float
    sequences: int
    shortest: int
    longest: int
    inputs: str
    """What was read, for a sentence."""


def probes(model: Model, head: GraphHead | None, samples: Sequence[Inputs]) -> tuple[list[Inputs], str]:
    """Batches of padded rows from one token to the model's limit, and some of the samples; and what they are."""
    # where any length goes, that to which texts are cut
    limit = min(longest_input(model.config, head) or model.config.encoder.embedding.longest, LONGEST)
    generator = np.random.default_rng(0)
    tokenizer, vocabulary = model.tokenizer, model.config.encoder.vocabulary
    stream = generator.integers(0, vocabulary, limit) if tokenizer is None else _stream(tokenizer, limit)

    def cut(length: int) -> np.ndarray:
        """So many tokens of the texts, between the tokenizer's marks."""
        if tokenizer is None:
            return stream[:length]
        ends = [tokenizer.start], [tokenizer.separator]
        return np.concatenate([ends[0], stream[: max(0, length - 2)], ends[1]])[:length]

    some = min(limit, _RAGGED)
    batches = [[cut(length) for length in lengths] for lengths in ((1,), (2, 1), (some, 1, (some + 1) // 2), (limit,))]
    if tokenizer is not None:
        batches.append([row[:limit] for row in tokenizer.encode(list(_some()), padding=False)["input_ids"]])
    said = "random token ids, as the model has no tokenizer" if tokenizer is None else "English messages of ours"
    if samples:
        said += " and rows of the task's data"
    types = model.config.encoder.embedding.types
    return [*(_laid(rows, types) for rows in batches), *samples[:_SAMPLES]], said


def compared(
    batches: Iterable[Inputs], said: str, wants: Callable[[Inputs], Tensor], finds: Callable[[Inputs], Tensor]
) -> Difference:
    """The largest difference between what a model wants and what a graph finds, both (…, outputs) of real tokens."""
    absolute, relative, largest = [], [], []
    lengths: list[int] = []
    for batch in batches:
        wanted, found = wants(batch), finds(batch)
        apart, size = float((found - wanted).abs().max()), float(wanted.abs().max())
        absolute.append(apart)
        relative.append(apart / max(size, 1e-12))
        largest.append(size)
        lengths += batch.layout.lengths().tolist()
    # a difference that is no number is the largest there is
    worst = max(absolute, key=lambda apart: float("inf") if apart != apart else apart)
    share = max(relative, key=lambda apart: float("inf") if apart != apart else apart)
    return Difference(worst, share, max(largest), len(lengths), min(lengths), max(lengths), said)


def _stream(tokenizer: Tokenizer, count: int) -> np.ndarray:
    """The tokens of messages one after the other, so many."""
    found: list[int] = []
    texts = list(messages())
    for begin in range(0, len(texts), 64):
        for ids in tokenizer.encode_plain(texts[begin : begin + 64]):
            found += ids
        if len(found) >= count:
            break
    return np.resize(np.array(found or [tokenizer.unknown]), count)


def _some() -> Iterable[str]:
    """Messages of different lengths."""
    return islice(messages(), 0, 40 * _MESSAGES, 40)


def _laid(rows: Sequence[np.ndarray], types: int) -> Inputs:
    """Sequences as padded rows; where a model knows types, the second half of each is of the second one."""
    lengths = torch.tensor([len(row) for row in rows])
    place = torch.arange(int(lengths.max()))
    is_token = place < lengths[:, None]
    tokens = torch.zeros(is_token.shape, dtype=torch.long)
    tokens[is_token] = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    kinds = ((place >= (lengths / 2)[:, None]) & is_token).long() if types > 1 else None
    return Inputs(tokens, SequenceLayout.padded(is_token), kinds)
