"""Learned gates that select which heads and neurons to prune (Louizos et al. 2018, Voita et al. 2019).

They are among the heads of a model only while they are trained, so that the optimiser, checkpoints and other processes
include them. A gate follows the hard concrete distribution with location a:

    u uniform on (0, 1),  s = sigmoid((log u - log(1 - u) + a) / β),  gate = clamp(s (ζ - γ) + γ, 0, 1)

so that it is exactly 0 or exactly 1 with positive probability.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from bertsmith.layers.elementwise import LayerGates
from bertsmith.models.heads.base import HeadConfig

TEMPERATURE = 2 / 3
LOWEST, HIGHEST = -0.1, 1.1
_OPEN_THRESHOLD = TEMPERATURE * math.log(-LOWEST / HIGHEST)


def open_probability(location: Tensor) -> Tensor:
    """Return the probability that a gate is not 0, a term of the expected L0 norm."""
    return torch.sigmoid(location - _OPEN_THRESHOLD)


def sample_gate(location: Tensor, draws: Tensor) -> Tensor:
    """Return hard-concrete gates for uniform random numbers (Louizos et al. 2018, eqs. 10 and 11)."""
    draws = draws.clamp(1e-6, 1 - 1e-6)
    concrete = torch.sigmoid((torch.logit(draws) + location) / TEMPERATURE)
    return (concrete * (HIGHEST - LOWEST) + LOWEST).clamp(0, 1)


def deterministic_gate(location: Tensor) -> Tensor:
    """Return the gates that replace the random ones after training (Louizos et al. 2018, eq. 13)."""
    return (torch.sigmoid(location) * (HIGHEST - LOWEST) + LOWEST).clamp(0, 1)


class GatesConfig(HeadConfig):
    """A gate on every head and neuron of every layer."""

    kind: Literal["gates"] = "gates"
    heads: tuple[int, ...] = ()
    """Number of heads of every layer; one entry if all layers share their mixer."""
    neurons: tuple[int, ...] = ()
    layers: int = 0
    start: float = 2.5
    """Initial location; 2.5 opens nearly all gates."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "UnitGates":
        return UnitGates(self.heads, self.neurons, self.layers, self.start)


class UnitGates(nn.Module):
    """The locations of all gates."""

    def __init__(self, heads: tuple[int, ...], neurons: tuple[int, ...], layers: int, start: float) -> None:
        super().__init__()
        self.layers, self.start = layers, start
        self.heads, self.neurons = (
            nn.ParameterList([nn.Parameter(torch.full((count,), start)) for count in counts])
            for counts in (heads, neurons)
        )

    @torch.no_grad()
    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Set all locations to `start`."""
        for location in (*self.heads, *self.neurons):
            location.fill_(self.start)

    def sample(self) -> list[LayerGates]:
        """Sample gates for every layer."""
        return self._by_layer(lambda location: sample_gate(location, torch.rand_like(location)))

    def deterministic(self) -> list[LayerGates]:
        """Return the gates of every layer without sampling."""
        return self._by_layer(deterministic_gate)

    def locations(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the locations of all gates on heads and on neurons, per layer."""
        return self._for_layers(list(self.heads)), self._for_layers(list(self.neurons))

    def expected_open(self) -> tuple[Tensor, Tensor]:
        """Return the expected fractions of open gates on heads and on neurons."""
        heads, neurons = (
            open_probability(torch.cat(list(locations))).mean() for locations in (self.heads, self.neurons)
        )
        return heads, neurons

    def _by_layer(self, gate_of: Callable[[Tensor], Tensor]) -> list[LayerGates]:
        heads, neurons = (
            self._for_layers([gate_of(location) for location in locations]) for locations in (self.heads, self.neurons)
        )
        return [LayerGates(heads=own, neurons=others) for own, others in zip(heads, neurons, strict=True)]

    def _for_layers(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Return one tensor per layer: layers that share weights share gates."""
        return tuple(tensors * self.layers) if len(tensors) == 1 else tuple(tensors)
