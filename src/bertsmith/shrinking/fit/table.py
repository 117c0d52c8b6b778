"""Latency and size tables of single layers, fitted to measurements of small networks.

Latency and file size of a network are estimated as a constant for embedding and head plus the sum over its layers.
Each layer shape is measured in stacks of one and of three, which take turns in one process.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig

STACKS = (1, 3)


class LayerShape(NamedTuple):
    """Shape of a layer: the layer of this index in the whole network, with other numbers of heads and neurons."""

    layer: int
    heads: int
    neurons: int
    groups: int = 1

    @property
    def cut(self) -> LayerCut:
        return LayerCut(self.heads, self.neurons, self.groups)


def first_alike(config: EncoderConfig) -> tuple[int, ...]:
    """Return for each layer the index of the first layer with an equal config."""
    configs = [layer.model_dump_json() for layer in config.layers]
    return tuple(configs.index(config) for config in configs)


def layer_shapes(alike: Sequence[int], units: Sequence[LayerCut], subnet: Subnet) -> tuple[LayerShape, ...]:
    """Return the shapes of the layers that a sub-network keeps."""
    return tuple(LayerShape(alike[index], cut.heads, cut.neurons, cut.groups) for index, cut in subnet.cuts(units))


def stack_config(config: ModelConfig, shapes: Sequence[LayerShape]) -> ModelConfig:
    """Return a copy of a model config with layers of these shapes."""
    encoder = config.encoder
    layers = tuple(_cut_layer(encoder.layers[shape.layer], shape.cut, encoder.width) for shape in shapes)
    sharing = encoder.sharing if len({shape.cut for shape in shapes}) == 1 else "none"  # as in extraction
    return config.changed(encoder=encoder.changed(layers=layers, sharing=sharing), generator=None)


def table_stacks(shapes: Sequence[LayerShape]) -> list[tuple[LayerShape, ...]]:
    """Return the networks to measure: three layers of each shape, and one layer of the first and last shapes."""
    ordered = sorted(set(shapes), key=lambda shape: (shape.layer, shape.heads, shape.neurons))
    ends = {ordered[0], ordered[-1]}
    stacks = [(shape,) * STACKS[0] for shape in ordered if shape in ends]
    return stacks + [(shape,) * STACKS[1] for shape in ordered]


@dataclass(frozen=True)
class CostTable:
    """Cost of embedding and head together, and of a layer of every shape."""

    constant: float
    layers: Mapping[LayerShape, float]

    @classmethod
    def of(cls, stacks: Sequence[Sequence[LayerShape]], costs: Sequence[float]) -> "CostTable":
        """Fit a table to measured networks by least squares of relative errors."""
        shapes = sorted({shape for stack in stacks for shape in stack})
        counts = np.array([[1, *(Counter(stack)[shape] for shape in shapes)] for stack in stacks], dtype=np.float64)
        measured = np.asarray(costs, dtype=np.float64)
        weights = 1 / np.maximum(measured, 1e-9)
        solved, *_ = np.linalg.lstsq(counts * weights[:, None], measured * weights, rcond=None)
        constant, *layers = (max(0.0, float(value)) for value in solved)
        return cls(constant, dict(zip(shapes, layers, strict=True)))

    def estimate(self, shapes: Sequence[LayerShape]) -> float:
        """Estimate the cost of a network with layers of these shapes."""
        return self.constant + sum(self.layers[shape] for shape in shapes)


@dataclass(frozen=True)
class ModeTables:
    """Latency and size tables of one run mode."""

    latency: Mapping[str, CostTable]
    """Median in milliseconds, by workload."""
    tail: Mapping[str, float]
    """Ratio of the 95th percentile to the median, by workload."""
    size: CostTable
    """Bytes."""

    @classmethod
    def of(
        cls,
        stacks: Sequence[Sequence[LayerShape]],
        latencies: Sequence[Mapping[str, Mapping[str, float]]],
        sizes: Sequence[int],
    ) -> "ModeTables":
        """Fit the tables to measured networks."""
        names = list(latencies[0])
        medians = {name: CostTable.of(stacks, [latency[name]["p50"] for latency in latencies]) for name in names}
        tails = {
            name: float(np.median([latency[name]["p95"] / latency[name]["p50"] for latency in latencies]))
            for name in names
        }
        return cls(medians, tails, CostTable.of(stacks, sizes))

    def latency_ms(self, shapes: Sequence[LayerShape], percentile: int) -> float:
        """Estimate the latency of a network on its slowest workload."""
        return max(
            table.estimate(shapes) * (self.tail[name] if percentile == 95 else 1.0)
            for name, table in self.latency.items()
        )


def _cut_layer(layer: LayerConfig, cut: LayerCut, width: int) -> LayerConfig:
    cross = None if layer.cross is None else layer.cross.cut(cut, width)
    return layer.changed(mixer=layer.mixer.cut(cut, width), cross=cross, feedforward=layer.feedforward.cut(cut))
