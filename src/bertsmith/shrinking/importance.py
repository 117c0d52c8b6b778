"""Importance of heads and neurons: first-order change of the loss if a unit is removed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from bertsmith.data.examples import TaskBatch
from bertsmith.layers.elementwise import LayerGates
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.objectives.supervised import Supervised
from bertsmith.settings import Record

Gradients = Literal["per_batch", "cumulative"]


class ImportanceConfig(Record):
    """Measurement of importance."""

    examples: int = Field(default=2048, gt=0)
    """Number of random training examples; all if there are fewer."""
    batch: int = Field(default=8, gt=0)
    """Examples whose gradients are summed before the absolute value is taken."""
    gradients: Gradients = "per_batch"
    """"cumulative" accumulates gradients over batches before each absolute value is taken, as the released DynaBERT
    code does by not zeroing them."""


@dataclass(frozen=True)
class Importance:
    """Importance scores of all units of every layer; Shape: heads[layer] (heads,), neurons[layer] (neurons,)."""

    heads: tuple[Tensor, ...]
    neurons: tuple[Tensor, ...]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Importance":
        """Return the scores with every layer's changed."""
        return Importance(tuple(map(change, self.heads)), tuple(map(change, self.neurons)))


def importance(
    model: Model, task: Supervised, batches: Iterable[TaskBatch], gradients: Gradients = "per_batch"
) -> Importance:
    """Return the importance of all heads and neurons for a task, in eval mode (Hou et al. 2020, section 2.1).

    The score of a head is the gradient of a gate on its input to the output projection; the score of a neuron is the
    sum over a gate before and a gate after its activation. By the product rule these gradients equal the sum of
    weight · gradient over the weights of the unit, as the released code computes it. Absolute values are taken batch
    by batch.
    """
    gates = [
        LayerGates(*(torch.ones(count, device=model.device, requires_grad=True) for count in counts))
        for counts in ((units.heads, units.neurons, units.neurons) for units in model.encoder.units)
    ]
    flat = [gate for layer in gates for gate in (layer.heads, layer.neurons, layer.inner) if gate is not None]
    running = [torch.zeros_like(gate) for gate in flat]
    scores = [torch.zeros_like(gate) for gate in flat]
    task = task.for_model(model)
    with model.evaluating(), torch.enable_grad():
        for batch in batches:
            batch = batch.to(model.device)
            inputs = EncoderInputs(batch.tokens, batch.layout, batch.types, gates=gates)
            loss = task.sums(model.run(inputs, Want(task=True)).outputs, batch).loss / task.count(batch).clamp(min=1)
            for index, gradient in enumerate(torch.autograd.grad(loss, flat)):
                running[index] = gradient if gradients == "per_batch" else running[index] + gradient
                scores[index] += running[index].abs()
    by_layer = [scores[first : first + 3] for first in range(0, len(scores), 3)]
    return Importance(
        tuple(heads.cpu() for heads, _, _ in by_layer), tuple((after + before).cpu() for _, after, before in by_layer)
    )


def summed_over_uses(scores: Sequence[Tensor], *, is_shared: bool) -> tuple[Tensor, ...]:
    """Sum the scores over layers if they share their units, else return them unchanged."""
    return tuple(scores) if not is_shared else (torch.stack(list(scores)).sum(0),) * len(scores)


Order = Literal["importance", "random", "reversed", "none"]


@dataclass(frozen=True)
class Orders:
    """Old indices of the units in their new order, per layer.

    Shape: heads[layer] (heads,), neurons[layer] (neurons,).
    """

    heads: tuple[Tensor, ...]
    neurons: tuple[Tensor, ...]


def orders(model: Model, scores: Importance, order: Order = "importance", seed: int = 0) -> Orders:
    """Return the order of all units: most important first, or a baseline (reversed, random or unchanged)."""
    config = model.config.encoder
    heads = summed_over_uses(scores.heads, is_shared=config.shares_mixer)
    neurons = summed_over_uses(scores.neurons, is_shared=config.shares_feedforward)
    generator = torch.Generator().manual_seed(seed)
    cache: dict[int, Tensor] = {}

    def order_of(values: Tensor) -> Tensor:
        if id(values) not in cache:  # layers that share their units share the order
            cache[id(values)] = _sorted(values, order, generator)
        return cache[id(values)]

    return Orders(tuple(map(order_of, heads)), tuple(map(order_of, neurons)))


def rewire(model: Model, orders: Orders) -> None:
    """Reorder the units in place; the outputs of the whole model do not change."""
    model.encoder.reorder(
        [order.to(model.device) for order in orders.heads], [order.to(model.device) for order in orders.neurons]
    )


def _sorted(values: Tensor, order: Order, generator: torch.Generator) -> Tensor:
    if order == "none":
        return torch.arange(len(values))
    if order == "random":
        return torch.randperm(len(values), generator=generator)
    return values.argsort(descending=order == "importance", stable=True)
