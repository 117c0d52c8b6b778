"""Rewiring: the units of every layer in the order of their importance, so that a prefix is the best small layer."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bertsmith.models.model import Model
from bertsmith.shrinking.importance import Importance, summed_over_uses

Order = Literal["importance", "random", "reversed", "none"]


@dataclass(frozen=True)
class Orders:
    """The old numbers of the units in their new order, layer by layer.

    Shape: heads[layer] (heads,), neurons[layer] (neurons,).
    """

    heads: tuple[Tensor, ...]
    neurons: tuple[Tensor, ...]


def orders(model: Model, scores: Importance, order: Order = "importance", seed: int = 0) -> Orders:
    """The order of all units: the most important first, or, to compare with, last, at random, or as they are."""
    config = model.config.encoder
    heads = summed_over_uses(scores.heads, is_shared=config.shares_mixer)
    neurons = summed_over_uses(scores.neurons, is_shared=config.shares_feedforward)
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, Tensor] = {}

    def order_of(values: Tensor) -> Tensor:
        if id(values) not in found:  # layers that share their units have one order
            found[id(values)] = _sorted(values, order, generator)
        return found[id(values)]

    return Orders(tuple(map(order_of, heads)), tuple(map(order_of, neurons)))


def rewire(model: Model, found: Orders) -> None:
    """Puts the units in these orders, in place; the whole model's outputs do not change."""
    model.encoder.reorder(
        [order.to(model.device) for order in found.heads], [order.to(model.device) for order in found.neurons]
    )


def _sorted(values: Tensor, order: Order, generator: torch.Generator) -> Tensor:
    if order == "none":
        return torch.arange(len(values))
    if order == "random":
        return torch.randperm(len(values), generator=generator)
    return values.argsort(descending=order == "importance", stable=True)
