"""Search for the best model within a budget.

scores of sub-networks -> tables of layer latencies -> [evolution] -> [cut vocabulary] -> finals
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.errors import InputError, first_line
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import ModelConfig
from bertsmith.models.masks import unmasked
from bertsmith.models.model import Model
from bertsmith.shrinking.elastic_metadata import ELASTIC_FILE, read_elastic_metadata
from bertsmith.shrinking.fit.bench import Bench, Scorer
from bertsmith.shrinking.fit.candidates import (
    SLACK,
    Candidate,
    Estimates,
    RunMode,
    available_modes,
    distinct_subnets,
    even_grid,
    pareto_front,
    slow_precisions,
)
from bertsmith.shrinking.fit.evolution import Space, evolve
from bertsmith.shrinking.fit.finals import Finals, Watch, nearest_miss
from bertsmith.shrinking.fit.measure import (
    BUSY,
    MEGABYTE,
    Conditions,
    Measurer,
    Workload,
    in_fresh_process,
    usable_cores,
)
from bertsmith.shrinking.fit.settings import BudgetConfig, Costs, FitSettings
from bertsmith.shrinking.fit.store import Measurements
from bertsmith.shrinking.subnetworks import subnet_costs
from bertsmith.shrinking.vocabulary import VocabularyConfig, cut_vocabulary
from bertsmith.tasks.data_source import hold_out, parse_columns, task_splits
from bertsmith.tasks.degenerate import DEGENERATE
from bertsmith.tasks.hf_task import adapt_task
from bertsmith.tasks.predictor import TaskRecord, read_task_record
from bertsmith.text.rows import Table
from bertsmith.toml import read_toml

RECIPE = "recipe.toml"
DATA_LENGTHS = 16  # quantiles of the lengths of the data
MIN_BYTES = 1  # of a weight in any precision
MAX_SPEEDUP = 50  # of any engine beside PyTorch: generous, because a wrong refusal is worse than a long search


@dataclass
class FitInputs:
    """Model, data, conditions and candidates of a search."""

    settings: FitSettings
    model: Model
    record: TaskRecord
    table: Table
    """Rows that candidates are scored on."""
    train: Table | None
    """The training split, if any."""
    scorer: Scorer
    conditions: Conditions
    grid: list[Subnet]
    is_elastic: bool
    run_modes: list[RunMode]
    notices: list[str]

    @property
    def evolves(self) -> bool:
        """Whether sub-networks with unequal layers are searched."""
        subnets = self.settings.search.subnets
        return self.is_elastic if subnets is None else subnets == "layers"


def prepare(settings: FitSettings) -> FitInputs:
    """Load the model and the data and list the candidates; InputError if the settings are invalid."""
    settings.budget.require_any()
    folder = settings.model.path
    record = read_task_record(settings.model.name)
    table, train, notices = _tables(settings, record)
    rows = table if train is None else train
    task = adapt_task(folder, record.task, rows, settings.columns, settings.data)
    record = record.changed(task=task.changed(**parse_columns(settings.columns, type(task))))
    model = unmasked(settings.model.load())  # candidates are not trained
    search, budget = settings.search, settings.budget
    scorer = Scorer(model, record, table, search.ranking_examples, search.seed)
    embedding = model.config.encoder.embedding
    for length in budget.lengths:
        if embedding.positions != "none" and length > embedding.max_length:
            raise InputError(f"--length is {length}; the model takes at most {embedding.max_length}")
    workloads = tuple(Workload(name=str(length), lengths=(length,)) for length in dict.fromkeys(budget.lengths))
    if not workloads:
        workloads = (Workload(name="data", lengths=scorer.lengths(DATA_LENGTHS)),)
    conditions = Conditions(
        workloads=workloads,
        batch=budget.batch,
        threads=budget.threads or usable_cores(),
        layout=record.sequences.layout,
    )
    is_elastic = settings.model.subnet is None and (folder / ELASTIC_FILE).is_file()
    grid = even_grid(read_elastic_metadata(folder) if is_elastic else None, model.encoder.units)
    lengths = [length for workload in workloads for length in workload.lengths]
    modes, mode_notices = available_modes(search, lengths)
    notices += mode_notices
    refuse_impossible(budget, model, grid, min(lengths))
    if not is_elastic:
        notices.append(
            "the model is not elastic (it has no elastic.json), so its smaller sub-networks were never trained; "
            "bertsmith shrink trains them"
        )
    if scorer.is_degenerate():
        notices.append(DEGENERATE)
    return FitInputs(settings, model, record, table, train, scorer, conditions, grid, is_elastic, modes, notices)


def refuse_impossible(budget: BudgetConfig, model: Model, grid: Sequence[Subnet], length: int) -> None:
    """Raise InputError for a size or latency that no candidate can have, before anything is scored or measured."""
    smallest = min(grid, key=lambda subnet: subnet.width * subnet.depth)
    (cost,) = subnet_costs(model, [smallest], length)
    weights = cost.parameters - sum(weight.numel() for weight in model.encoder.embedding.parameters())
    size_mb, latency_ms = weights * MIN_BYTES / MEGABYTE, cost.latency_ms / MAX_SPEEDUP
    if budget.size_mb is not None and budget.size_mb < size_mb:
        raise InputError(
            f"--size-mb is {budget.size_mb:g}, but the layers of the smallest sub-network alone take {size_mb:.3g} MB "
            "in 8 bits; raise it or start from a smaller model"
        )
    if budget.latency_ms is not None and budget.latency_ms < latency_ms:
        raise InputError(
            f"--latency-ms is {budget.latency_ms:g}, but the smallest sub-network takes {cost.latency_ms:.3g} ms in "
            f"PyTorch here for one text of {length} tokens, {MAX_SPEEDUP} times the limit or more; raise it or "
            "start from a smaller model"
        )


def _tables(settings: FitSettings, record: TaskRecord) -> tuple[Table, Table | None, list[str]]:
    """Return the rows that candidates are scored on, the training rows, and notices about them.

    If fine-tuning held out rows of train because there was no dev split, the same rows are held out here: scores on
    training rows would be too high.
    """
    is_trained_on = settings.split == "dev" and Path(settings.data).is_file() and _is_trained_on(settings)
    splits = task_splits(settings.data, file_is="train" if is_trained_on else settings.split)
    table, train = splits.find(settings.split), splits.find("train")
    if table is not None:
        return table, train, []
    if settings.split != "dev" or train is None:
        raise splits.missing(settings.split)
    train, table, notice = hold_out(record.task, train, "there is no dev split")
    was_tuned_here = (settings.model.path / RECIPE).is_file()
    return table, train, [f"{notice}, as in fine-tuning" if was_tuned_here else notice]


def _is_trained_on(settings: FitSettings) -> bool:
    """Whether the model's recipe names the same data."""
    recipe = settings.model.path / RECIPE
    data = read_toml(recipe).get("data") if recipe.is_file() else None
    return isinstance(data, str) and Path(data).resolve() == Path(settings.data).resolve()


MAX_EVOLVED = 10  # sub-networks of the evolution that become candidates
WORST = 1e12  # penalty that ranks candidates below the minimum score after all others
Scores = dict[Subnet, float]


@dataclass(frozen=True)
class SearchOutcome:
    """All candidates of a search and the best one."""

    inputs: FitInputs
    candidates: Sequence[Candidate]
    best: Candidate | None
    nearest: Candidate
    """The best candidate, or the nearest to the budget if none meets it."""
    reference: Candidate
    """The whole network in the first run mode."""
    notices: Sequence[str]
    folder: Path | None
    """Folder with the artefact of the best candidate."""
    measurements: int
    """Number of new measurements."""
    machine: Mapping[str, str | int]
    configs: Mapping[str, ModelConfig]
    """Configs with the whole and with the cut vocabulary."""


class FitSearch:
    """One search; every measurement is stored as soon as it is made."""

    def __init__(
        self,
        inputs: FitInputs,
        store: Measurements,
        work: Path,
        *,
        measurer: Measurer = in_fresh_process,
        watch: Watch | None = None,
    ) -> None:
        self.inputs, self.settings, self.budget = inputs, inputs.settings, inputs.settings.budget
        self.store = store
        measure = self.settings.measure
        self.bench = Bench(self.settings.model, inputs.scorer, inputs.conditions, measure, store, measurer, work)
        self.estimates = Estimates(inputs.model, self.budget.percentile)
        self.watch: Watch = watch or (lambda what, done, total: None)
        self.notices = list(inputs.notices)
        self.candidates: list[Candidate] = []

    def run(self) -> SearchOutcome:
        """Return the best candidate and its artefact, or the nearest candidate."""
        scores = self._grid_scores()
        self._measure_tables(self.inputs.run_modes)
        self._note_slow_precisions()
        if self.inputs.evolves:
            scores |= self._evolve(scores)
        for mode in self.estimates.tables:
            self._add(scores, mode)
        if self._wants_cut():
            self._cut_vocabulary(scores)
        first = next(iter(self.estimates.tables))
        reference = next(one for one in self.candidates if one.subnet == self.inputs.grid[0] and one.mode == first)
        finals = Finals(self.settings, self.bench, self.estimates, self.candidates, self.notices, self.watch)
        best = finals.best(reference)
        measured = [one for one in self.candidates if one.measured is not None]
        if not measured:
            raise InputError(f"no candidate could be measured: {'; '.join(self.notices)}")
        self._note_busy_machine(measured)
        return SearchOutcome(
            inputs=self.inputs,
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
        scores, grid = {}, self.inputs.grid
        for done, subnet in enumerate(grid):
            self.watch("scores of sub-networks", done, len(grid))
            scores[subnet] = self._score(subnet)
        return scores

    def _score(self, subnet: Subnet) -> float:
        return self.bench.subnet_score(subnet, on_all=self.inputs.scorer.is_whole)

    def _measure_tables(self, chosen: Sequence[RunMode]) -> None:
        shapes = [shape for subnet in self.inputs.grid for shape in self.estimates.shapes(subnet)]
        for done, mode in enumerate(chosen):
            self.watch(f"latency of layers: {mode.description}", done, len(chosen))
            try:
                self.estimates.tables[mode] = self.bench.tables(mode, shapes)
            except OSError:  # such as a full disk: not a failure of the engine
                raise
            except Exception as error:  # engines raise exceptions of their own packages
                self.notices.append(f"{mode.description} is skipped: {first_line(error)}")
        if not self.estimates.tables:
            raise InputError(f"no engine can run the model here: {'; '.join(self.notices)}")

    def _note_slow_precisions(self) -> None:
        whole = self.estimates.shapes(self.inputs.grid[0])
        latencies = {mode: tables.latency_ms(whole, 50) for mode, tables in self.estimates.tables.items()}
        self.notices += slow_precisions(latencies)

    def _note_busy_machine(self, measured: Sequence[Candidate]) -> None:
        shares = [float(timing.processor_share) for one in measured for timing in one.timings]
        busy = [share for share in shares if share < BUSY]
        if len(busy) > len(shares) / 4:
            self.notices.append(
                f"other programs used the processor for up to {1 - min(busy):.0%} of the time in {len(busy)} of "
                f"{len(shares)} measurements, so latencies are too high: stop them and run again with --fresh"
            )

    def _evolve(self, scores: Scores) -> Scores:
        """Search sub-networks with unequal layers; return the fittest and the Pareto front of score and latency."""
        search, units = self.settings.search, self.inputs.model.encoder.units
        total, done = search.population + search.generations * (search.population // 2), 0
        all_scores = dict(scores)

        def score(subnet: Subnet) -> float:
            nonlocal done
            self.watch("evolutionary search", min(done, total), total)
            done += 1
            all_scores[subnet] = self._score(subnet)
            return self._fitness(subnet, all_scores[subnet])

        known = {subnet: self._fitness(subnet, value) for subnet, value in scores.items()}
        fitness = evolve(
            Space.of(self.inputs.grid, units),
            score,
            lambda one: self._may_fit(one, SLACK),
            known=known,
            config=search,
        )
        known_cuts = {tuple(subnet.cuts(units)) for subnet in scores}
        new = [subnet for subnet in distinct_subnets(fitness, units) if tuple(subnet.cuts(units)) not in known_cuts]
        best = sorted((one for one in new if self._may_fit(one, 0.0)), key=lambda one: -fitness[one])[:MAX_EVOLVED]
        # the whole front, because estimates near the limit may be wrong in either direction
        front = pareto_front(new, lambda one: self._least(one).latency_ms or 0.0, lambda one: all_scores[one])
        return {subnet: all_scores[subnet] for subnet in dict.fromkeys([*best, *front])}

    def _fitness(self, subnet: Subnet, score: float) -> float:
        """Fitness to maximise: the score, or -cost once the score meets the budget's minimum score."""
        floor, least = self.budget.at_least, self._least(subnet)
        if floor is None:
            return score
        cost = least.latency_ms if self.settings.prefer == "fast" else least.size_mb
        return -(cost or 0.0) if score >= floor else score - floor - WORST

    def _least(self, subnet: Subnet) -> Costs:
        """Estimate the minimum latency and size over all run modes."""
        costs = [self.estimates.of(subnet, mode) for mode in self.estimates.tables]
        return Costs(min(one.latency_ms or 0.0 for one in costs), min(one.size_mb or 0.0 for one in costs))

    def _may_fit(self, subnet: Subnet, slack: float) -> bool:
        costs = (self.estimates.of(subnet, mode) for mode in self.estimates.tables)
        return any(not self.budget.misses(one, slack) for one in costs)

    def _add(self, scores: Scores, mode: RunMode) -> None:
        self.candidates += [
            Candidate(subnet, mode, self.estimates.shapes(subnet), score, self.estimates.of(subnet, mode))
            for subnet, score in scores.items()
        ]

    def _wants_cut(self) -> bool:
        vocabulary, limit = self.settings.search.vocabulary, self.budget.size_mb
        if vocabulary != "auto":
            return vocabulary == "cut"
        sizes = [candidate.estimate.size_mb or 0.0 for candidate in self.candidates]
        return limit is not None and min(sizes) > limit

    def _cut_vocabulary(self, scores: Scores) -> None:
        model, notice = cut_model(self.inputs.model, self.inputs.record, self.inputs.train, self.inputs.table)
        self.notices.append(notice)
        if model.config.encoder.vocabulary == self.inputs.model.config.encoder.vocabulary:
            return
        self.bench.add_cut(model)
        chosen = [mode._replace(vocabulary="cut") for mode in self.estimates.tables]
        self._measure_tables(chosen)
        for mode in chosen:
            if mode in self.estimates.tables:
                self._add(scores, mode)


def cut_model(model: Model, record: TaskRecord, train: Table | None, dev: Table) -> tuple[Model, str]:
    """Return the model with a vocabulary cut to the training texts (or else the dev texts), and a notice about it."""
    task = record.task
    texts = list(task.texts(task.examples(dev if train is None else train, has_targets=False)))
    small, _ = cut_vocabulary(model, texts, VocabularyConfig())
    before, after = model.config.encoder.vocabulary, small.config.encoder.vocabulary
    if before == after:
        return small, f"the vocabulary is not cut: the texts use all of its {before:,} tokens"
    return small, f"the vocabulary is cut from {before:,} to the {after:,} tokens that the texts use"
