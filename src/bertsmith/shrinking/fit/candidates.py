"""Sub-networks and the ways to run them: what there is to choose from."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.model import Model
from bertsmith.shrinking.elastic_metadata import ELASTIC_FILE, read_record
from bertsmith.shrinking.fit.budget import MEGABYTE, Costs
from bertsmith.shrinking.fit.store import digest
from bertsmith.shrinking.fit.table import Kind, WayTables, first_alike, layer_kinds
from bertsmith.shrinking.fit.ways import Way

WIDTHS, DEPTHS = (1.0, 0.75, 0.5, 0.25), (1.0, 0.75, 0.5)


@dataclass
class Candidate:
    """A sub-network run in one way, and what is known of it."""

    subnet: Subnet
    way: Way
    kinds: tuple[Kind, ...]
    ranking: float
    """The score of the sub-network in float32, on all or on some of dev."""
    estimate: Costs
    measured: Costs | None = None
    """What its artefact was found to cost, the score among it."""
    timings: list[dict[str, Any]] = field(default_factory=list)
    """One for each fresh process."""
    holds: bool | None = None
    """Whether it kept the budget again and again; None if that was not tried."""
    judged: dict[str, Any] = field(default_factory=dict)
    """All figures of its artefact on dev."""

    @property
    def name(self) -> str:
        """A name for folders."""
        plain = json.dumps([self.subnet.plain(), *self.way], sort_keys=True)
        return f"{self.way.engine}-{self.way.precision}-{digest(plain.encode())[:8]}"

    @property
    def words(self) -> str:
        return f"{subnet_words(self.subnet)}, {self.way.words}"

    @property
    def costs(self) -> Costs:
        """What was measured, and what was estimated where nothing was."""
        if self.measured is None:
            return self.estimate
        pairs = zip(self.measured, self.estimate, strict=True)
        return Costs(*(guess if found is None else found for found, guess in pairs))


def subnet_words(subnet: Subnet) -> str:
    """A sub-network as people say it.

    >>> subnet_words(Subnet(width=0.5)), subnet_words(Subnet(layers=(0, 2), heads=(2, 4)))
    ('width 0.5', 'layers 1, 3 with 2, 4 heads')
    """
    if subnet.layers is None and subnet.heads is None:
        said = [f"{name} {value:g}" for name, value in (("width", subnet.width), ("depth", subnet.depth)) if value != 1]
        return " × ".join(said) or "whole network"
    layers = "all layers" if subnet.layers is None else f"layers {', '.join(str(i + 1) for i in subnet.layers)}"
    heads = "" if subnet.heads is None else f" with {', '.join(map(str, subnet.heads))} heads"
    return layers + heads


def even_grid(folder: Path, units: Sequence[LayerCut]) -> tuple[list[Subnet], bool]:
    """The sub-networks a model was trained for, largest first, and whether it was: else an even grid."""
    if not (folder / ELASTIC_FILE).is_file():
        return different([Subnet(width=width, depth=depth) for depth in DEPTHS for width in WIDTHS], units), False
    return different([Subnet(), *read_record(folder).subnets], units), True


def different(subnets: Iterable[Subnet], units: Sequence[LayerCut]) -> list[Subnet]:
    """Each network once, however it is described."""
    found = {tuple(subnet.cuts(units)): subnet for subnet in reversed(list(subnets))}
    return sorted(found.values(), key=lambda subnet: -_volume(subnet, units))


def _volume(subnet: Subnet, units: Sequence[LayerCut]) -> int:
    return sum(cut.neurons + cut.heads for _, cut in subnet.cuts(units))


SLACK, SLACK_KNOWN = 0.2, 0.07  # by which an estimate may be off: from the table alone, and once a way was measured


class Estimates:
    """The tables of all ways."""

    def __init__(self, model: Model, percentile: int) -> None:
        self.percentile = percentile
        self.units, self.alike = model.encoder.units, first_alike(model.config.encoder)
        self.tables: dict[Way, WayTables] = {}

    def kinds(self, subnet: Subnet) -> tuple[Kind, ...]:
        """The kinds of layers of a sub-network."""
        return layer_kinds(self.alike, self.units, subnet)

    def of(self, subnet: Subnet, way: Way) -> Costs:
        """The latency and the size that the tables tell."""
        kinds, tables = self.kinds(subnet), self.tables[way]
        return Costs(tables.latency_ms(kinds, self.percentile), tables.size.estimate(kinds) / MEGABYTE)

    def correct(self, candidates: Sequence[Candidate], way: Way) -> None:
        """Puts what was found of one way's candidates into the estimates of the others."""
        known = [one for one in candidates if one.way == way and one.measured is not None]
        ratios = [(one.costs.latency_ms or 0.0) / self._table(one) for one in known]
        for candidate in candidates:
            if candidate.way != way or candidate.measured is not None:
                continue
            size = candidate.estimate.size_mb or 0.0
            near = min(known, key=lambda one: abs((one.costs.size_mb or 0.0) - size))
            memory = (near.costs.memory_mb or 0.0) + size - (near.costs.size_mb or 0.0)
            candidate.estimate = Costs(statistics.median(ratios) * self._table(candidate), size, memory)

    def slack(self, candidates: Sequence[Candidate], way: Way) -> float:
        """By which share the estimates of a way may be too high."""
        is_known = any(one.way == way and one.measured is not None for one in candidates)
        return SLACK_KNOWN if is_known else SLACK

    def _table(self, candidate: Candidate) -> float:
        return max(1e-9, self.tables[candidate.way].latency_ms(candidate.kinds, self.percentile))
