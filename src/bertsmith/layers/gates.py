"""Gates: numbers that the outputs of heads and neurons are multiplied by, to score them or to learn which to keep."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerGates:
    """What the units of one layer are multiplied by; None for nothing. All of them are listed, cut away or not.

    Shape: heads (heads,), neurons and inner (neurons,).
    """

    heads: Tensor | None = None
    """On what each head hands to the mixer's output projection."""
    neurons: Tensor | None = None
    """On each neuron's activation."""
    inner: Tensor | None = None
    """On what enters each neuron's activation."""


def first_units(gate: Tensor, keep: int | None, groups: int = 1) -> Tensor:
    """The gates of the units that are kept: the first of every group."""
    if keep is None or keep == len(gate):
        return gate
    return gate.unflatten(0, (groups, -1))[:, : keep // groups].flatten()  # (units,) -> (groups, units / groups)
