"""Outputs of a model's head for the items of a task."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from bertsmith.answers.chart import span_tables
from bertsmith.answers.sequences import Features, length_batches
from bertsmith.data.examples import ExampleConfig, ExampleReader, TaskBatch
from bertsmith.data.inference import finish_copies, to_device, to_host, token_budget
from bertsmith.engines.base import Runner

WatchBatch = Callable[[TaskBatch, Tensor], None]
"""Callback, called with each batch and its outputs."""


@torch.no_grad()
def item_outputs(
    model: Runner, features: Features, sequences: ExampleConfig, watch: WatchBatch | None = None
) -> list[np.ndarray]:
    """Return the outputs of every item, as a task's `answers` reads them; `watch` is called with each batch.

    On a GPU the loop does not wait for any batch: the outputs are copied while the next batches are computed.
    """
    reader = ExampleReader(features, sequences, model.require_tokenizer().pad)
    batches = list(length_batches(features.lengths, token_budget(model.device)))
    copies: list[Tensor] = []
    with model.evaluating():
        for items in batches:
            batch = to_device(reader.batch(items), model.device)
            sizes = torch.from_numpy(_sequence_counts(features, items)) if model.has_early_exits else None
            sizes = None if sizes is None else to_device(sizes, model.device)
            outputs = model.outputs(batch.tokens, batch.layout, batch.types, sizes=sizes)
            if watch is not None:
                watch(batch, outputs)
            copies.append(to_host(outputs.float()))
    finish_copies(model.device)
    results: list[np.ndarray] = [np.empty(0)] * len(features)
    for items, outputs in zip(batches, copies, strict=True):
        for item, values in zip(items.tolist(), _split(model, features, items, outputs.numpy()), strict=True):
            results[item] = values
    weights = model.span_weights
    return results if weights is None else span_tables(features, results, weights)


def _sequence_counts(features: Features, items: np.ndarray) -> np.ndarray:
    """Number of sequences of each item."""
    counts: np.ndarray = features.items[items + 1] - features.items[items]
    return counts


def _split(model: Runner, features: Features, items: np.ndarray, values: np.ndarray) -> Sequence[np.ndarray]:
    """Split the outputs of a batch by item.

    Shape: (outputs,) each, (sequences, outputs) where an item has several, (tokens, outputs) from a head for tokens.
    """
    if model.is_for_tokens:
        lengths = features.lengths[items].tolist()  # every item is one sequence
        if values.ndim == 2:  # packed
            ends = np.cumsum(lengths).tolist()
            return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        return [row[:length] for row, length in zip(values, lengths, strict=True)]
    counts = _sequence_counts(features, items)
    if (counts == 1).all():
        return list(values)
    arrays = np.split(values, np.cumsum(counts)[:-1])
    return [array[0] if len(array) == 1 else array for array in arrays]
