"""The ways a sub-network can be run here: engine, precision, vocabulary."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bertsmith.engines.artefact import ENGINES
from bertsmith.engines.base import Artefact, Precision
from bertsmith.errors import InputError, nearest
from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.model import Model
from bertsmith.shrinking.elastic_metadata import ELASTIC_FILE, read_record
from bertsmith.shrinking.fit.settings import MEGABYTE, Costs, SearchConfig
from bertsmith.shrinking.fit.store import digest
from bertsmith.shrinking.fit.table import Kind, WayTables, first_alike, layer_kinds
from bertsmith.shrinking.vocabulary import VocabularyConfig, cut_vocabulary
from bertsmith.tasks.predictor import TaskRecord
from bertsmith.text.rows import Table

LENGTHS_TO_COMPILE = 4  # each is compiled for by itself, in every process anew


class Way(NamedTuple):
    """How a sub-network is run."""

    engine: str
    precision: Precision
    vocabulary: Literal["whole", "cut"] = "whole"

    @property
    def artefact(self) -> Artefact:
        return Artefact.parse({"engine": self.engine, "precision": self.precision})

    @property
    def words(self) -> str:
        cut = "" if self.vocabulary == "whole" else ", vocabulary cut"
        return f"{self.engine} {self.precision}{cut}"


def ways(search: SearchConfig, lengths: Sequence[int]) -> tuple[list[Way], list[str]]:
    """The ways that are asked for and that this machine has, and what is to be said of those that are left out."""
    for name in search.engines:
        if name not in ENGINES:
            raise InputError(f"--engine is {name!r}; {nearest(name, ENGINES)} (all: {', '.join(ENGINES)})")
    found, notices = list[Way](), list[str]()
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
            Way(name, precision)
            for precision in engine.precisions
            if not search.precisions or precision in search.precisions
        ]
    if not found:
        why = "; ".join(notices) or f"none of the engines has {', '.join(search.precisions)}"
        raise InputError(f"no engine can run the model as asked: {why}")
    return found, notices


def slow_precisions(latencies: dict[Way, float]) -> list[str]:
    """A sentence for each engine in which a narrower precision does not pay, given the latency of one network."""
    said = []
    for way, latency in latencies.items():
        plain = latencies.get(way._replace(precision="float32"))
        if plain is not None and way.precision != "float32" and latency > 0.97 * plain:
            than = "slower" if latency > 1.03 * plain else "no faster"
            said.append(
                f"{way.precision} is {than} than float32 here in {way.engine}: {latency:.2f} ms against {plain:.2f} ms "
                "for the whole network"
            )
    return said


def cut_model(model: Model, kept: TaskRecord, train: Table | None, dev: Table) -> tuple[Model, str]:
    """The model with the pieces that the training texts use, and a sentence on what that changed.

    Where there is no training part, the texts it is scored on stand in for it.
    """
    task = kept.task
    texts = list(task.texts(task.examples(dev if train is None else train, has_targets=False)))
    small, _ = cut_vocabulary(model, texts, VocabularyConfig())
    before, after = model.config.encoder.vocabulary, small.config.encoder.vocabulary
    if before == after:
        return small, f"the vocabulary stays as it is: the texts use all of its {before:,} pieces"
    return small, f"the vocabulary is cut from {before:,} to {after:,} pieces, those that the texts use"


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
