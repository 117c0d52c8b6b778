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
from bertsmith.shrinking.elastic_metadata import ElasticMetadata
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


_ON_REQUEST: tuple[Precision, ...] = ("float16",)  # half the size, but CPUs compute it in float32, with conversions


def available_modes(search: SearchConfig, lengths: Sequence[int]) -> tuple[list[RunMode], list[str]]:
    """Return the requested run modes that are available on this machine, and notices about omitted ones."""
    for name in search.engines:
        if name not in ENGINES:
            raise InputError(f"--engine is {name!r}; {nearest(name, ENGINES)} (all: {', '.join(ENGINES)})")
    modes, notices = list[RunMode](), list[str]()
    for name in search.engines or tuple(ENGINES):
        engine = ENGINES[name]
        missing = engine.missing(to_write=True)
        if missing is not None:
            notices.append(f"the engine {name} is skipped: it {missing}")
            continue
        if name == "compiled" and not search.engines and len(set(lengths)) > LENGTHS_TO_COMPILE:
            notices.append(
                "the engine compiled is skipped, because it compiles separately for each length: pass --length, or "
                "--engine compiled"
            )
            continue
        modes += [
            RunMode(name, precision)
            for precision in engine.precisions
            if (precision in search.precisions if search.precisions else precision not in _ON_REQUEST)
        ]
    if not modes:
        reason = "; ".join(notices) or f"none of the engines supports {', '.join(search.precisions)}"
        raise InputError(f"no engine can run the model as requested: {reason}")
    return modes, notices


def slow_precisions(latencies: dict[RunMode, float]) -> list[str]:
    """Return a notice for each run mode whose lower precision is no faster than float32."""
    notices = []
    for mode, latency in latencies.items():
        plain = latencies.get(mode._replace(precision="float32"))
        if plain is not None and mode.precision != "float32" and latency > 0.97 * plain:
            comparison = "slower" if latency > 1.03 * plain else "no faster"
            notices.append(
                f"{mode.precision} is {comparison} than float32 here in {mode.engine}: {latency:.2f} ms against "
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
    """Score of the sub-network in float32, on all of dev or the ranking examples."""
    estimate: Costs
    measured: Costs | None = None
    """Measured costs and score of its artefact."""
    timings: list[ProcessTiming] = field(default_factory=list)
    """One timing per fresh process."""
    holds: bool | None = None
    """Whether it met the budget in repeated measurements; None if not measured."""
    artefact_score: ArtefactScore | None = None
    """Score of its artefact on dev; None if not measured."""

    @property
    def name(self) -> str:
        """Folder name."""
        plain = json.dumps([self.subnet.plain(), *self.mode], sort_keys=True)
        return f"{self.mode.engine}-{self.mode.precision}-{digest(plain.encode())[:8]}"

    @property
    def description(self) -> str:
        return f"{describe_subnet(self.subnet)}, {self.mode.description}"

    @property
    def costs(self) -> Costs:
        """Measured costs, with estimates in place of missing ones."""
        if self.measured is None:
            return self.estimate
        pairs = zip(self.measured, self.estimate, strict=True)
        return Costs(*(estimate if measured is None else measured for measured, estimate in pairs))

    @property
    def score(self) -> float:
        """Measured score, or the float32 score of the sub-network."""
        return self.float32_score if self.costs.score is None else self.costs.score


def describe_subnet(subnet: Subnet) -> str:
    """Describe a sub-network.

    >>> describe_subnet(Subnet(width=0.5)), describe_subnet(Subnet(layers=(0, 2), heads=(2, 4)))
    ('width 0.5', 'layers 1, 3 with 2, 4 heads')
    """
    if subnet.layers is None and subnet.heads is None:
        shares = {"width": subnet.width, "depth": subnet.depth}
        return " × ".join(f"{name} {share:g}" for name, share in shares.items() if share != 1) or "whole network"
    layers = "all layers" if subnet.layers is None else f"layers {', '.join(str(i + 1) for i in subnet.layers)}"
    heads = "" if subnet.heads is None else f" with {', '.join(map(str, subnet.heads))} heads"
    return layers + heads


def even_grid(elastic: ElasticMetadata | None, units: Sequence[LayerCut]) -> list[Subnet]:
    """Return the trained sub-networks of an elastic model, or else an even grid, largest first."""
    even = [Subnet(width=width, depth=depth) for depth in DEPTHS for width in WIDTHS]
    return distinct_subnets(even if elastic is None else [Subnet(), *elastic.subnets], units)


def distinct_subnets(subnets: Iterable[Subnet], units: Sequence[LayerCut]) -> list[Subnet]:
    """Return the sub-networks without duplicates (equal cuts), largest first."""
    by_cuts = {tuple(subnet.cuts(units)): subnet for subnet in reversed(list(subnets))}
    return sorted(by_cuts.values(), key=lambda subnet: -_unit_count(subnet, units))


def _unit_count(subnet: Subnet, units: Sequence[LayerCut]) -> int:
    return sum(cut.neurons + cut.heads for _, cut in subnet.cuts(units))


SLACK, SLACK_KNOWN = 0.2, 0.07  # relative error of estimates: from the table alone, and after a mode was measured


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
        """Correct the estimates of a run mode with its measured candidates."""
        measured = [one for one in candidates if one.mode == mode and one.measured is not None]
        ratios = [(one.costs.latency_ms or 0.0) / self._table_latency(one) for one in measured]
        for candidate in candidates:
            if candidate.mode != mode or candidate.measured is not None:
                continue
            size = candidate.estimate.size_mb or 0.0
            near = min(measured, key=lambda one: abs((one.costs.size_mb or 0.0) - size))
            memory = (near.costs.memory_mb or 0.0) + size - (near.costs.size_mb or 0.0)
            candidate.estimate = Costs(statistics.median(ratios) * self._table_latency(candidate), size, memory)

    def slack(self, candidates: Sequence[Candidate], mode: RunMode) -> float:
        """Return the relative error that the estimates of a run mode may have."""
        is_measured = any(one.mode == mode and one.measured is not None for one in candidates)
        return SLACK_KNOWN if is_measured else SLACK

    def _table_latency(self, candidate: Candidate) -> float:
        return max(1e-9, self.tables[candidate.mode].latency_ms(candidate.shapes, self.percentile))


T = TypeVar("T")


def pareto_front(items: Sequence[T], cost: Callable[[T], float], score: Callable[[T], float]) -> list[T]:
    """Return the items that no other one beats in both cost and score, cheapest first.

    >>> pareto_front([(3, 9.0), (1, 5.0), (2, 4.0), (3, 8.0)], lambda p: p[0], lambda p: p[1])
    [(1, 5.0), (3, 9.0)]
    """
    front: list[T] = []
    for item in sorted(items, key=lambda one: (cost(one), -score(one))):
        if not front or score(item) > score(front[-1]):
            front.append(item)
    return front
