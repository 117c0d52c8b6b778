"""Sub-networks and the ways to run them: what there is to choose from."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.shrinking.fit.budget import Costs
from bertsmith.shrinking.fit.store import digest
from bertsmith.shrinking.fit.table import Kind
from bertsmith.shrinking.fit.ways import Way
from bertsmith.shrinking.record import ELASTIC_FILE, read_record

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
