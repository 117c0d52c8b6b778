"""What a model's head says of all items of some features, in their order."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from bertsmith.batches.examples import EvaluationPlan, ExampleConfig, ExampleReader, Features, TaskBatch
from bertsmith.engines.base import Runner
from bertsmith.engines.exit_runner import ExitRunner

MICRO_TOKENS = 8192  # of one batch where nothing is learned


@torch.no_grad()
def item_outputs(
    model: Runner, features: Features, config: ExampleConfig, watch: Callable[[TaskBatch, Tensor], None] | None = None
) -> list[np.ndarray]:
    """The outputs of every item, as a task's `answers` reads them; `watch` sees each batch and what was said of it."""
    found: list[np.ndarray] = [np.empty(0)] * len(features)
    reader = ExampleReader(features, config, model.require_tokenizer().pad)
    with model.evaluating():
        for plan in EvaluationPlan(features, MICRO_TOKENS).one_epoch():
            batch = reader[plan].batch
            assert isinstance(batch, TaskBatch)
            batch = batch.to(model.device)
            outputs = _said(model, features, batch)
            if watch is not None:
                watch(batch, outputs)
            for item, own in zip(plan.sequences.tolist(), _split(model, features, batch, outputs), strict=True):
                found[item] = own
    return found


def _said(model: Runner, features: Features, batch: TaskBatch) -> Tensor:
    """What is said of a batch; one who may stop early must know which sequences are answered together."""
    if not isinstance(model, ExitRunner):
        return model.outputs(batch.tokens, batch.layout, batch.types)
    sizes = torch.from_numpy(_sequences(features, batch.item.cpu().numpy())).to(model.device)
    return model.outputs(batch.tokens, batch.layout, batch.types, sizes=sizes)


def _sequences(features: Features, items: np.ndarray) -> np.ndarray:
    """How many sequences each of some items has."""
    counts: np.ndarray = features.items[items + 1] - features.items[items]
    return counts


def _split(model: Runner, features: Features, batch: TaskBatch, outputs: Tensor) -> Sequence[np.ndarray]:
    """The outputs of a batch item by item.

    Shape: (outputs,) each, (sequences, outputs) where an item has several, (tokens, outputs) from a head for tokens.
    """
    values, items = outputs.float().cpu().numpy(), batch.item.cpu().numpy()
    if model.is_for_tokens:
        lengths = batch.layout.lengths().tolist()
        if batch.layout.is_packed:
            return np.split(values, np.cumsum(lengths)[:-1])
        return [row[:length] for row, length in zip(values, lengths, strict=True)]
    parts = np.split(values, np.cumsum(_sequences(features, items))[:-1])
    return [part[0] if len(part) == 1 else part for part in parts]
