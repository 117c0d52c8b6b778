"""What is known before anything is measured: the model, the data, the conditions, what is to be tried."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.store import load
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.shrinking.fit.bench import Bench, Quality
from bertsmith.shrinking.fit.candidates import (
    SLACK,
    Candidate,
    Estimates,
    Way,
    cut_model,
    different,
    even_grid,
    slow_precisions,
    ways,
)
from bertsmith.shrinking.fit.evolution import Space, evolve
from bertsmith.shrinking.fit.finals import Finals, Watch, first_line, nearest_miss, pareto_front
from bertsmith.shrinking.fit.measure import Conditions, Measurer, Workload, in_fresh_process, usable_cores
from bertsmith.shrinking.fit.settings import Costs, FitSettings
from bertsmith.shrinking.fit.store import Measurements
from bertsmith.tasks.data_source import held_out, task_parts
from bertsmith.tasks.predictor import TaskRecord, read_task_record
from bertsmith.text.rows import Table
from bertsmith.toml import read_toml

RECIPE = "recipe.toml"
DATA_LENGTHS = 16  # that stand for all lengths of the data


@dataclass
class Prepared:
    """What is known before anything is measured."""

    settings: FitSettings
    model: Model
    kept: TaskRecord
    table: Table
    """What candidates are scored on."""
    train: Table | None
    """The training part, if the data have one."""
    quality: Quality
    conditions: Conditions
    grid: list[Subnet]
    is_elastic: bool
    ways: list[Way]
    notices: list[str]

    @property
    def evolves(self) -> bool:
        """Whether sub-networks with layers that differ are looked for."""
        asked = self.settings.search.subnets
        return self.is_elastic if asked is None else asked == "layers"


def prepare(settings: FitSettings) -> Prepared:
    """The model, the data and what is to be tried; a sentence if any of it cannot be used."""
    settings.budget.require_any()
    folder = model_folder(settings.model)
    if not folder.is_dir():
        raise InputError(f"MODEL {settings.model!r} is no folder; give that of a fine-tuned model")
    kept = read_task_record(settings.model)
    table, train, notices = _tables(settings, kept)
    model = load(folder)
    if isinstance(model, Seq2Seq):
        raise InputError(f"{settings.model!r} holds a model that translates; fit is for encoders")
    search, budget = settings.search, settings.budget
    quality = Quality(model, kept, table, search.ranking_examples, search.seed)
    embedding = model.config.encoder.embedding
    for length in budget.lengths:
        if embedding.positions != "none" and length > embedding.longest:
            raise InputError(f"--length is {length}; the model takes at most {embedding.longest}")
    workloads = tuple(Workload(name=str(length), lengths=(length,)) for length in dict.fromkeys(budget.lengths))
    if not workloads:
        workloads = (Workload(name="data", lengths=quality.lengths(DATA_LENGTHS)),)
    conditions = Conditions(
        workloads=workloads,
        batch=budget.batch,
        threads=budget.threads or usable_cores(),
        layout=kept.sequences.layout,
    )
    grid, is_elastic = even_grid(folder, model.encoder.units)
    lengths = [length for workload in workloads for length in workload.lengths]
    found, left_out = ways(search, lengths)
    notices += left_out
    if not is_elastic:
        notices.append(
            "the model is not elastic (it has no elastic.json), so its smaller sub-networks were never trained; "
            "bertsmith shrink trains them"
        )
    return Prepared(settings, model, kept, table, train, quality, conditions, grid, is_elastic, found, notices)


def _tables(settings: FitSettings, kept: TaskRecord) -> tuple[Table, Table | None, list[str]]:
    """The rows that candidates are scored on, the training rows, and sentences about them.

    Where fine-tuning found no dev part and held rows out of train, these are the same rows: those that were trained on
    would flatter every candidate.
    """
    is_trained_on = settings.part == "dev" and Path(settings.data).is_file() and _learned_from(settings)
    parts = task_parts(settings.data, file_is="train" if is_trained_on else settings.part)
    table, train = parts.find(settings.part), parts.find("train")
    if table is not None:
        return table, train, []
    if settings.part != "dev" or train is None:
        raise parts.missing(settings.part)
    train, table, said = held_out(kept.task, train, "there is no dev part")
    return table, train, [f"{said}, as in fine-tuning"]


def _learned_from(settings: FitSettings) -> bool:
    """Whether the model's recipe names the same data."""
    recipe = model_folder(settings.model) / RECIPE
    data = read_toml(recipe).get("data") if recipe.is_file() else None
    return isinstance(data, str) and Path(data).resolve() == Path(settings.data).resolve()


EVOLVED = 10  # sub-networks of the evolution that become candidates
BUSY = 0.9  # of the time: with less, others were given the cores meanwhile
WORST = 1e12  # below which everything lies that is not good enough
Scores = dict[Subnet, float]


@dataclass(frozen=True)
class Fitted:
    """What a search found."""

    prepared: Prepared
    candidates: Sequence[Candidate]
    best: Candidate | None
    nearest: Candidate
    """The best one, or what came nearest to the budget."""
    reference: Candidate
    """The whole network as it is."""
    notices: Sequence[str]
    folder: Path | None
    """Where the artefact of the best one lies."""
    measurements: int
    """How many were made now, not found."""
    machine: Mapping[str, Any]
    configs: Mapping[str, ModelConfig]
    """Of the whole network, by what was done to its vocabulary."""


class Search:
    """One search; every measurement is kept as soon as it is made."""

    def __init__(
        self,
        prepared: Prepared,
        store: Measurements,
        work: Path,
        *,
        measurer: Measurer = in_fresh_process,
        watch: Watch | None = None,
    ) -> None:
        self.prepared, self.settings, self.budget = prepared, prepared.settings, prepared.settings.budget
        self.store = store
        source, measure = model_folder(self.settings.model), self.settings.measure
        self.bench = Bench(source, prepared.quality, prepared.conditions, measure, store, measurer, work)
        self.estimates = Estimates(prepared.model, self.budget.percentile)
        self.watch: Watch = watch or (lambda what, done, total: None)
        self.notices = list(prepared.notices)
        self.candidates: list[Candidate] = []

    def run(self) -> Fitted:
        """The best candidate, with its artefact, or what came nearest."""
        scores = self._grid_scores()
        self._measure_tables(self.prepared.ways)
        self._say_what_is_slow()
        if self.prepared.evolves:
            scores |= self._evolved(scores)
        for way in self.estimates.tables:
            self._add(scores, way)
        if self._wants_cut():
            self._cut_vocabulary(scores)
        first = next(iter(self.estimates.tables))
        reference = next(one for one in self.candidates if one.subnet == self.prepared.grid[0] and one.way == first)
        finals = Finals(self.settings, self.bench, self.estimates, self.candidates, self.notices, self.watch)
        best = finals.best(reference)
        measured = [one for one in self.candidates if one.measured is not None]
        if not measured:
            raise InputError(f"no candidate could be measured: {'; '.join(self.notices)}")
        self._say_if_busy(measured)
        return Fitted(
            prepared=self.prepared,
            candidates=self.candidates,
            best=best,
            nearest=best or nearest_miss(measured, self.budget),
            reference=reference,
            notices=self.notices,
            folder=None if best is None else self.bench.folder(best),
            measurements=self.store.taken,
            machine=self.bench.machine,
            configs={name: model.config for name, model in self.bench.models.items()},
        )

    def _grid_scores(self) -> Scores:
        found, grid = {}, self.prepared.grid
        for done, subnet in enumerate(grid):
            self.watch("scores of sub-networks", done, len(grid))
            found[subnet] = self._score(subnet)
        return found

    def _score(self, subnet: Subnet) -> float:
        return self.bench.subnet_score(subnet, on_all=self.prepared.quality.is_whole)

    def _measure_tables(self, chosen: Sequence[Way]) -> None:
        kinds = [kind for subnet in self.prepared.grid for kind in self.estimates.kinds(subnet)]
        for done, way in enumerate(chosen):
            self.watch(f"latency of layers: {way.words}", done, len(chosen))
            try:
                self.estimates.tables[way] = self.bench.tables(way, kinds)
            except OSError:  # a full disk is nothing of the engine
                raise
            except Exception as error:  # engines raise what the packages below them raise
                self.notices.append(f"{way.words} is left out: {first_line(error)}")
        if not self.estimates.tables:
            raise InputError(f"no way to run the model works here: {'; '.join(self.notices)}")

    def _say_what_is_slow(self) -> None:
        whole = self.estimates.kinds(self.prepared.grid[0])
        latencies = {way: tables.latency_ms(whole, 50) for way, tables in self.estimates.tables.items()}
        self.notices += slow_precisions(latencies)

    def _say_if_busy(self, measured: Sequence[Candidate]) -> None:
        shares = [float(timing.get("processor_share", 1.0)) for one in measured for timing in one.timings]
        busy = [share for share in shares if share < BUSY]
        if len(busy) > len(shares) / 4:
            self.notices.append(
                f"other programs had the processor for up to {1 - min(busy):.0%} of the time in {len(busy)} of "
                f"{len(shares)} measurements, so latencies are too high: end them and run again with --fresh"
            )

    def _evolved(self, scores: Scores) -> Scores:
        """The best sub-networks with layers that differ, and those that nothing else beats in score and latency."""
        search, units = self.settings.search, self.prepared.model.encoder.units
        total, done = search.population + search.generations * (search.population // 2), 0
        found = dict(scores)

        def score(subnet: Subnet) -> float:
            nonlocal done
            self.watch("search among layers", min(done, total), total)
            done += 1
            found[subnet] = self._score(subnet)
            return self._fitness(subnet, found[subnet])

        known = {subnet: self._fitness(subnet, known) for subnet, known in scores.items()}
        fitness = evolve(
            Space.of(self.prepared.grid, units),
            score,
            lambda one: self._may_fit(one, SLACK),
            known=known,
            config=search,
        )
        old = {tuple(subnet.cuts(units)) for subnet in scores}
        fresh = [subnet for subnet in different(fitness, units) if tuple(subnet.cuts(units)) not in old]
        best = sorted((one for one in fresh if self._may_fit(one, 0.0)), key=lambda one: -fitness[one])[:EVOLVED]
        # what the estimates put just beyond the budget may keep it, and what is just within may not
        front = pareto_front(fresh, lambda one: self._least(one).latency_ms or 0.0, lambda one: found[one])
        return {subnet: found[subnet] for subnet in dict.fromkeys([*best, *front])}

    def _fitness(self, subnet: Subnet, score: float) -> float:
        """What the evolution makes larger: the score or, of what is good enough, speed or smallness."""
        floor, least = self.budget.at_least, self._least(subnet)
        if floor is None:
            return score
        cost = least.latency_ms if self.settings.prefer == "fast" else least.size_mb
        return -(cost or 0.0) if score >= floor else score - floor - WORST

    def _least(self, subnet: Subnet) -> Costs:
        """The least latency and the least size that any way promises."""
        costs = [self.estimates.of(subnet, way) for way in self.estimates.tables]
        return Costs(min(one.latency_ms or 0.0 for one in costs), min(one.size_mb or 0.0 for one in costs))

    def _may_fit(self, subnet: Subnet, slack: float) -> bool:
        costs = (self.estimates.of(subnet, way) for way in self.estimates.tables)
        return any(not self.budget.misses(one, slack) for one in costs)

    def _add(self, scores: Scores, way: Way) -> None:
        self.candidates += [
            Candidate(subnet, way, self.estimates.kinds(subnet), ranking, self.estimates.of(subnet, way))
            for subnet, ranking in scores.items()
        ]

    def _wants_cut(self) -> bool:
        asked, limit = self.settings.search.vocabulary, self.budget.size_mb
        if asked != "auto":
            return asked == "cut"
        sizes = [candidate.estimate.size_mb or 0.0 for candidate in self.candidates]
        return limit is not None and min(sizes) > limit

    def _cut_vocabulary(self, scores: Scores) -> None:
        model, said = cut_model(self.prepared.model, self.prepared.kept, self.prepared.train, self.prepared.table)
        self.notices.append(said)
        if model.config.encoder.vocabulary == self.prepared.model.config.encoder.vocabulary:
            return
        self.bench.add_cut(model)
        chosen = [way._replace(vocabulary="cut") for way in self.estimates.tables]
        self._measure_tables(chosen)
        for way in chosen:
            if way in self.estimates.tables:
                self._add(scores, way)
