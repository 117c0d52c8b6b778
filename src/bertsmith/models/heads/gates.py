"""Gates that are learned: which heads and neurons a model can do without (Louizos et al. 2018, Voita et al. 2019).

They stand among the heads of a model only while they are learned, so that the optimiser, checkpoints and other
processes see them. A gate is a random number with a location a, of the hard concrete distribution:

    u uniform on (0, 1),  s = sigmoid((log u - log(1 - u) + a) / β),  gate = clamp(s (ζ - γ) + γ, 0, 1)

so that it is 0, or 1, with a probability above 0, and between them otherwise.
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
_CLOSING = TEMPERATURE * math.log(-LOWEST / HIGHEST)


def open_probability(location: Tensor) -> Tensor:
    """How probably a gate is not 0, by its location: one part of the expected L0 norm."""
    return torch.sigmoid(location - _CLOSING)


def sample_gate(location: Tensor, chance: Tensor) -> Tensor:
    """Return hard-concrete gates for uniform random numbers (Louizos et al. 2018, eqs. 10 and 11)."""
    chance = chance.clamp(1e-6, 1 - 1e-6)
    shares = torch.sigmoid((torch.logit(chance) + location) / TEMPERATURE)
    return (shares * (HIGHEST - LOWEST) + LOWEST).clamp(0, 1)


def deterministic_gate(location: Tensor) -> Tensor:
    """Return the gates that replace the random ones after training (Louizos et al. 2018, eq. 13)."""
    return (torch.sigmoid(location) * (HIGHEST - LOWEST) + LOWEST).clamp(0, 1)


class GatesConfig(HeadConfig):
    """A gate on every head and neuron of every layer."""

    kind: Literal["gates"] = "gates"
    heads: tuple[int, ...] = ()
    """Of every layer; of the first one alone where all layers have the same."""
    neurons: tuple[int, ...] = ()
    layers: int = 0
    start: float = 2.5
    """Where the locations begin: nearly all gates open."""

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
        """Start all gates alike."""
        for location in (*self.heads, *self.neurons):
            location.fill_(self.start)

    def sample(self) -> list[LayerGates]:
        """Sample gates for every layer."""
        return self._by_layer(lambda location: sample_gate(location, torch.rand_like(location)))

    def deterministic(self) -> list[LayerGates]:
        """Return the gates of every layer without sampling."""
        return self._by_layer(deterministic_gate)

    def locations(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The locations of the gates on heads, then of those on neurons, for every layer."""
        return self._for_layers(list(self.heads)), self._for_layers(list(self.neurons))

    def expected_open(self) -> tuple[Tensor, Tensor]:
        """The share of heads, then of neurons, that are expected to be open."""
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
        """One for each layer: layers that share their units share the gates on them."""
        return tuple(tensors * self.layers) if len(tensors) == 1 else tuple(tensors)
