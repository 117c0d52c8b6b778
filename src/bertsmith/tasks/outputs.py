"""Outputs of a model's head for the items of a task."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from bertsmith.answers.chart import span_tables
from bertsmith.answers.sequences import Features
from bertsmith.data.examples import EvaluationPlan, ExampleConfig, ExampleReader, TaskBatch
from bertsmith.engines.base import Runner

EVALUATION_TOKENS = 8192
"""Maximum number of tokens per batch in evaluation and prediction."""
WatchBatch = Callable[[TaskBatch, Tensor], None]
"""Callback, called with each batch and its outputs."""


@torch.no_grad()
def item_outputs(
    model: Runner, features: Features, sequences: ExampleConfig, watch: WatchBatch | None = None
) -> list[np.ndarray]:
    """Return the outputs of every item, as a task's `answers` reads them; `watch` is called with each batch."""
    results: list[np.ndarray] = [np.empty(0)] * len(features)
    reader = ExampleReader(features, sequences, model.require_tokenizer().pad)
    with model.evaluating():
        for plan in EvaluationPlan(features, EVALUATION_TOKENS).one_epoch():
            batch = reader[plan].batch
            assert isinstance(batch, TaskBatch)
            batch = batch.to(model.device)
            sizes = torch.from_numpy(_sequence_counts(features, batch.item.cpu().numpy())).to(model.device)
            outputs = model.outputs(batch.tokens, batch.layout, batch.types, sizes=sizes)
            if watch is not None:
                watch(batch, outputs)
            for item, values in zip(plan.sequences.tolist(), _split(model, features, batch, outputs), strict=True):
                results[item] = values
    weights = model.span_weights
    return results if weights is None else span_tables(features, results, weights)


def _sequence_counts(features: Features, items: np.ndarray) -> np.ndarray:
    """Number of sequences of each item."""
    counts: np.ndarray = features.items[items + 1] - features.items[items]
    return counts


def _split(model: Runner, features: Features, batch: TaskBatch, outputs: Tensor) -> Sequence[np.ndarray]:
    """Split the outputs of a batch by item.

    Shape: (outputs,) each, (sequences, outputs) where an item has several, (tokens, outputs) from a head for tokens.
    """
    values, items = outputs.float().cpu().numpy(), batch.item.cpu().numpy()
    if model.is_for_tokens:
        lengths = batch.layout.lengths().tolist()
        if batch.layout.is_packed:
            return np.split(values, np.cumsum(lengths)[:-1])
        return [row[:length] for row, length in zip(values, lengths, strict=True)]
    arrays = np.split(values, np.cumsum(_sequence_counts(features, items))[:-1])
    return [array[0] if len(array) == 1 else array for array in arrays]
