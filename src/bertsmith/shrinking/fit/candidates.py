"""Candidates: sub-networks in the run modes (engine, precision, vocabulary) that this machine has."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from bertsmith.engines.artefact import ENGINES
from bertsmith.engines.base import Artefact, Precision
from bertsmith.errors import InputError, nearest
from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.model import Model
from bertsmith.shrinking.elastic_metadata import ElasticRecord
from bertsmith.shrinking.fit.measure import MEGABYTE, ArtefactScore, ProcessTiming
from bertsmith.shrinking.fit.settings import Costs, SearchConfig
from bertsmith.shrinking.fit.store import digest
from bertsmith.shrinking.fit.table import LayerShape, ModeTables, first_alike, layer_shapes

LENGTHS_TO_COMPILE = 4  # every process compiles for each length


class RunMode(NamedTuple):
    """Engine, precision and vocabulary that a sub-network runs with."""

    engine: str
    precision: Precision
    vocabulary: Literal["whole", "cut"] = "whole"

    @property
    def artefact(self) -> Artefact:
        return Artefact.parse({"engine": self.engine, "precision": self.precision})

    @property
    def description(self) -> str:
        cut = "" if self.vocabulary == "whole" else ", vocabulary cut"
        return f"{self.engine} {self.precision}{cut}"


def available_modes(search: SearchConfig, lengths: Sequence[int]) -> tuple[list[RunMode], list[str]]:
    """Return the requested run modes that this machine has, and notices about those that are left out."""
    for name in search.engines:
        if name not in ENGINES:
            raise InputError(f"--engine is {name!r}; {nearest(name, ENGINES)} (all: {', '.join(ENGINES)})")
    found, notices = list[RunMode](), list[str]()
    for name in search.engines or tuple(ENGINES):
        engine = ENGINES[name]
        missing = engine.missing()
        if missing is not None:
            notices.append(f"the engine {name} is left out: it {missing}")
            continue
        if name == "compiled" and not search.engines and len(set(lengths)) > LENGTHS_TO_COMPILE:
            notices.append(
                "the engine compiled is left out, since it compiles for each length by itself: give --length, or "
                "--engine compiled"
            )
            continue
        found += [
            RunMode(name, precision)
            for precision in engine.precisions
            if not search.precisions or precision in search.precisions
        ]
    if not found:
        why = "; ".join(notices) or f"none of the engines has {', '.join(search.precisions)}"
        raise InputError(f"no engine can run the model as asked: {why}")
    return found, notices


def slow_precisions(latencies: dict[RunMode, float]) -> list[str]:
    """Return a notice for each engine in which a narrower precision is no faster, by the latency of one network."""
    notices = []
    for mode, latency in latencies.items():
        plain = latencies.get(mode._replace(precision="float32"))
        if plain is not None and mode.precision != "float32" and latency > 0.97 * plain:
            than = "slower" if latency > 1.03 * plain else "no faster"
            notices.append(
                f"{mode.precision} is {than} than float32 here in {mode.engine}: {latency:.2f} ms against "
                f"{plain:.2f} ms for the whole network"
            )
    return notices


WIDTHS, DEPTHS = (1.0, 0.75, 0.5, 0.25), (1.0, 0.75, 0.5)


@dataclass
class Candidate:
    """A sub-network in one run mode, with its estimated and measured costs."""

    subnet: Subnet
    mode: RunMode
    shapes: tuple[LayerShape, ...]
    float32_score: float
    """Score of the sub-network in float32, on all or on some of dev."""
    estimate: Costs
    measured: Costs | None = None
    """Measured costs and score of its artefact."""
    timings: list[ProcessTiming] = field(default_factory=list)
    """One for each fresh process."""
    holds: bool | None = None
    """Whether it met the budget repeatedly; None if that was not measured."""
    artefact_score: ArtefactScore | None = None
    """Score of its artefact on dev; None if it was not measured."""

    @property
    def name(self) -> str:
        """Name for folders."""
        plain = json.dumps([self.subnet.plain(), *self.mode], sort_keys=True)
        return f"{self.mode.engine}-{self.mode.precision}-{digest(plain.encode())[:8]}"

    @property
    def description(self) -> str:
        return f"{describe_subnet(self.subnet)}, {self.mode.description}"

    @property
    def costs(self) -> Costs:
        """Measured costs, or estimates where nothing was measured."""
        if self.measured is None:
            return self.estimate
        pairs = zip(self.measured, self.estimate, strict=True)
        return Costs(*(guess if found is None else found for found, guess in pairs))

    @property
    def score(self) -> float:
        """Measured score, or the float32 score of the sub-network."""
        return self.float32_score if self.costs.score is None else self.costs.score


def describe_subnet(subnet: Subnet) -> str:
    """Describe a sub-network in a few words.

    >>> describe_subnet(Subnet(width=0.5)), describe_subnet(Subnet(layers=(0, 2), heads=(2, 4)))
    ('width 0.5', 'layers 1, 3 with 2, 4 heads')
    """
    if subnet.layers is None and subnet.heads is None:
        shares = {"width": subnet.width, "depth": subnet.depth}
        return " × ".join(f"{name} {share:g}" for name, share in shares.items() if share != 1) or "whole network"
    layers = "all layers" if subnet.layers is None else f"layers {', '.join(str(i + 1) for i in subnet.layers)}"
    heads = "" if subnet.heads is None else f" with {', '.join(map(str, subnet.heads))} heads"
    return layers + heads


def even_grid(elastic: ElasticRecord | None, units: Sequence[LayerCut]) -> list[Subnet]:
    """Return the trained sub-networks of an elastic model, else an even grid, largest first."""
    even = [Subnet(width=width, depth=depth) for depth in DEPTHS for width in WIDTHS]
    return distinct_subnets(even if elastic is None else [Subnet(), *elastic.subnets], units)


def distinct_subnets(subnets: Iterable[Subnet], units: Sequence[LayerCut]) -> list[Subnet]:
    """Return each network once, however it is described, largest first."""
    found = {tuple(subnet.cuts(units)): subnet for subnet in reversed(list(subnets))}
    return sorted(found.values(), key=lambda subnet: -_volume(subnet, units))


def _volume(subnet: Subnet, units: Sequence[LayerCut]) -> int:
    return sum(cut.neurons + cut.heads for _, cut in subnet.cuts(units))


SLACK, SLACK_KNOWN = 0.2, 0.07  # relative error of estimates: from the table alone, and once a mode was measured


class Estimates:
    """Estimates of latency and size from the tables of all run modes."""

    def __init__(self, model: Model, percentile: int) -> None:
        self.percentile = percentile
        self.units, self.alike = model.encoder.units, first_alike(model.config.encoder)
        self.tables: dict[RunMode, ModeTables] = {}

    def shapes(self, subnet: Subnet) -> tuple[LayerShape, ...]:
        """Return the shapes of the layers of a sub-network."""
        return layer_shapes(self.alike, self.units, subnet)

    def of(self, subnet: Subnet, mode: RunMode) -> Costs:
        """Estimate latency and size of a sub-network in a run mode."""
        shapes, tables = self.shapes(subnet), self.tables[mode]
        return Costs(tables.latency_ms(shapes, self.percentile), tables.size.estimate(shapes) / MEGABYTE)

    def correct(self, candidates: Sequence[Candidate], mode: RunMode) -> None:
        """Correct the estimates of a run mode by its measured candidates."""
        known = [one for one in candidates if one.mode == mode and one.measured is not None]
        ratios = [(one.costs.latency_ms or 0.0) / self._table(one) for one in known]
        for candidate in candidates:
            if candidate.mode != mode or candidate.measured is not None:
                continue
            size = candidate.estimate.size_mb or 0.0
            near = min(known, key=lambda one: abs((one.costs.size_mb or 0.0) - size))
            memory = (near.costs.memory_mb or 0.0) + size - (near.costs.size_mb or 0.0)
            candidate.estimate = Costs(statistics.median(ratios) * self._table(candidate), size, memory)

    def slack(self, candidates: Sequence[Candidate], mode: RunMode) -> float:
        """Return the share by which the estimates of a run mode may be too high."""
        is_known = any(one.mode == mode and one.measured is not None for one in candidates)
        return SLACK_KNOWN if is_known else SLACK

    def _table(self, candidate: Candidate) -> float:
        return max(1e-9, self.tables[candidate.mode].latency_ms(candidate.shapes, self.percentile))


T = TypeVar("T")


def pareto_front(items: Sequence[T], cost: Callable[[T], float], score: Callable[[T], float]) -> list[T]:
    """Return the items that no other one beats in cost and score together, cheapest first.

    >>> pareto_front([(3, 9.0), (1, 5.0), (2, 4.0), (3, 8.0)], lambda p: p[0], lambda p: p[1])
    [(1, 5.0), (3, 9.0)]
    """
    front: list[T] = []
    for item in sorted(items, key=lambda one: (cost(one), -score(one))):
        if not front or score(item) > score(front[-1]):
            front.append(item)
    return front
