"""The latency table: what the layers of a network cost one by one, from small networks that are measured here.

The time of a network, and the size of its files, is taken as that of embedding and head plus the sum over its layers.
Each kind of layer is measured in stacks of one and of three, all in one process that lets them take turns.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig

STACKS = (1, 3)


class Kind(NamedTuple):
    """A kind of layer: like that of this index in the whole network, but with so many heads and neurons."""

    layer: int
    heads: int
    neurons: int
    groups: int = 1

    @property
    def cut(self) -> LayerCut:
        return LayerCut(self.heads, self.neurons, self.groups)


def first_alike(config: EncoderConfig) -> tuple[int, ...]:
    """For each layer the index of the first one that is like it."""
    described = [layer.model_dump_json() for layer in config.layers]
    return tuple(described.index(one) for one in described)


def layer_kinds(alike: Sequence[int], units: Sequence[LayerCut], subnet: Subnet) -> tuple[Kind, ...]:
    """The kinds of the layers that a sub-network keeps."""
    return tuple(Kind(alike[index], cut.heads, cut.neurons, cut.groups) for index, cut in subnet.cuts(units))


def stack_config(config: ModelConfig, kinds: Sequence[Kind]) -> ModelConfig:
    """The config of a model like this one whose layers are of these kinds."""
    encoder = config.encoder
    layers = tuple(_cut_layer(encoder.layers[kind.layer], kind.cut, encoder.width) for kind in kinds)
    sharing = encoder.sharing if len({kind.cut for kind in kinds}) == 1 else "none"  # as extraction does it
    return config.changed(encoder=encoder.changed(layers=layers, sharing=sharing), generator=None)


def table_stacks(kinds: Sequence[Kind]) -> list[tuple[Kind, ...]]:
    """The networks to measure for a table of these kinds: stacks of one and three, of those between only three."""
    ordered = sorted(set(kinds), key=lambda kind: (kind.layer, kind.heads, kind.neurons))
    ends = {ordered[0], ordered[-1]}
    stacks = [(kind,) * STACKS[0] for kind in ordered if kind in ends]
    return stacks + [(kind,) * STACKS[1] for kind in ordered]


@dataclass(frozen=True)
class Table:
    """What embedding and head cost, and every kind of layer."""

    constant: float
    layers: Mapping[Kind, float]

    @classmethod
    def of(cls, stacks: Sequence[Sequence[Kind]], costs: Sequence[float]) -> "Table":
        """The table that fits measured networks best, each by the share of its own cost."""
        kinds = sorted({kind for stack in stacks for kind in stack})
        counts = np.array([[1, *(Counter(stack)[kind] for kind in kinds)] for stack in stacks], dtype=np.float64)
        measured = np.asarray(costs, dtype=np.float64)
        weights = 1 / np.maximum(measured, 1e-9)
        solved, *_ = np.linalg.lstsq(counts * weights[:, None], measured * weights, rcond=None)
        constant, *layers = (max(0.0, float(value)) for value in solved)
        return cls(constant, dict(zip(kinds, layers, strict=True)))

    def estimate(self, kinds: Sequence[Kind]) -> float:
        """The cost of a network with layers of these kinds."""
        return self.constant + sum(self.layers[kind] for kind in kinds)


@dataclass(frozen=True)
class WayTables:
    """All that is estimated of networks that are run in one way."""

    latency: Mapping[str, Table]
    """The median in milliseconds, by workload."""
    tail: Mapping[str, float]
    """How much slower the 95th percentile is than the median, by workload."""
    size: Table
    """Bytes."""

    @classmethod
    def of(
        cls,
        stacks: Sequence[Sequence[Kind]],
        latencies: Sequence[Mapping[str, Mapping[str, float]]],
        sizes: Sequence[int],
    ) -> "WayTables":
        """The tables of measured networks."""
        names = list(latencies[0])
        medians = {name: Table.of(stacks, [found[name]["p50"] for found in latencies]) for name in names}
        tails = {
            name: float(np.median([found[name]["p95"] / found[name]["p50"] for found in latencies])) for name in names
        }
        return cls(medians, tails, Table.of(stacks, sizes))

    def latency_ms(self, kinds: Sequence[Kind], percentile: int) -> float:
        """The estimated latency of a network at its slowest workload."""
        return max(
            table.estimate(kinds) * (self.tail[name] if percentile == 95 else 1.0)
            for name, table in self.latency.items()
        )


def _cut_layer(layer: LayerConfig, cut: LayerCut, width: int) -> LayerConfig:
    cross = None if layer.cross is None else layer.cross.cut(cut, width)
    return layer.changed(mixer=layer.mixer.cut(cut, width), cross=cross, feedforward=layer.feedforward.cut(cut))
