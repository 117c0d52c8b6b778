"""A table as data: rows, runs, metrics, gates and claims, read from a TOML file.

A file may name a `base`, whose runs, metrics and row templates it extends, so that tables share their runs. It has
only the metrics of the base that it names: an empty table `[metrics.loss]` is enough.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bertsmith.errors import InputError, nearest
from bertsmith.recipes import merge_settings
from bertsmith.reproduction.claims import CLAIMS, Claim, MetricSpec
from bertsmith.settings import ByKind, Plain, Record
from bertsmith.toml import read_toml

BLOCK = "block-"
_MERGED = ("runs", "metrics", "templates", "rows")
_DATA = files("bertsmith.reproduction")


Command = Literal["tokenizer", "corpus", "pretrain", "finetune", "shrink", "convert", "evaluate", "inspect", "measure"]


class RunSpec(Record):
    """One run of a row: a command and its settings. "{NAME}" in a setting is the folder of another run of the row,
    "{data}" the folder given by --data."""

    command: Literal[
        "tokenizer", "corpus", "pretrain", "finetune", "shrink", "convert", "evaluate", "inspect", "measure"
    ]
    settings: Plain = Field(default_factory=dict)
    """The recipe of pretrain, finetune and shrink, or the arguments of the other commands."""
    seed: int | None = None
    """Fixed seed of a run that all seeds share, such as a corpus or a teacher; None for the seed of the row."""
    seconds: float = Field(default=0.0, ge=0)
    """Planned share of the device's time, which the schedule of --minutes uses."""
    alone: bool = False
    """Run with nothing beside it: for timings."""
    check: Plain = Field(default_factory=dict)
    """Settings of the rehearsal by --check, laid over the settings: for measurements, whose costs are not known."""


class ExperimentRow(Record):
    """One row of a table: changes to the settings of its runs, and the published figures."""

    label: str = ""
    """Name to print; the key by default."""
    template: str | None = None
    """ExperimentRow template of the base that this row extends."""
    set: dict[str, Plain] = Field(default_factory=dict)
    """Changed settings by run: set.pretrained.model.preset = "convbert-small"."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Planned seconds by run, where they differ from the table's."""
    metrics: dict[str, Plain] = Field(default_factory=dict)
    """Another `run` or `value` of a metric: metrics.sts.value = "cut_score"."""
    seeds: int | None = Field(default=None, ge=1)
    """Number of seeds, if it differs from the table's."""
    published: dict[str, float | str] = Field(default_factory=dict)
    """The paper's figures, by their names in the paper."""


class Gate(Record):
    """A condition without which claims cannot be tested."""

    metric: str
    rows: tuple[str, ...] = ()
    """Rows to check; none for all rows of a claim."""
    above: float | None = None
    below: float | None = None
    covers: tuple[str, ...] = ()
    """Metrics whose claims the gate protects; its own by default."""
    reason: str
    """Message if the gate fails."""

    @model_validator(mode="after")
    def _check(self) -> "Gate":
        if self.above is None and self.below is None:
            raise ValueError("give above, below or both")
        return self

    def admits(self, value: float) -> bool:
        """Return whether a value passes."""
        return (self.above is None or value > self.above) and (self.below is None or value < self.below)


class ExperimentTable(Record):
    """An experiment: rows, runs, metrics, gates and claims, all fixed before the first run."""

    name: str
    title: str
    paper: str = ""
    """The publication and its table."""
    rank: int | None = None
    """Order among the tables of the papers."""
    block: int | None = None
    """Group of tables to run together: `bertsmith reproduce block-1`."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Device that the plan is made for; --device auto chooses whatever is there."""
    seeds: int = Field(default=3, ge=1)
    runs: dict[str, RunSpec] = Field(min_length=1)
    metrics: dict[str, MetricSpec] = Field(min_length=1)
    rows: dict[str, ExperimentRow] = Field(min_length=1)
    gates: tuple[Gate, ...] = ()
    claims: tuple[Annotated[Claim, ByKind(CLAIMS)], ...] = ()
    published: str = ""
    """The published result in words, where figures are missing or need an explanation."""
    notes: tuple[str, ...] = ()
    """Departures from the paper and limits of the test, stated beforehand."""

    @model_validator(mode="after")
    def _check(self) -> "ExperimentTable":
        for name, spec in self.metrics.items():
            _known(f"metrics.{name}.run", spec.run, self.runs)
            for row_name in spec.rows or ():
                _known(f"metrics.{name}.rows", row_name, self.rows)
        for name, row in self.rows.items():
            for run in (*row.set, *row.seconds):
                _known(f"rows.{name}.set", run, self.runs)
            for metric, changes in row.metrics.items():
                _known(f"rows.{name}.metrics", metric, self.metrics)
                for key in changes:
                    _known(f"rows.{name}.metrics.{metric}", key, ("run", "value"))
                if "run" in changes:
                    _known(f"rows.{name}.metrics.{metric}.run", changes["run"], self.runs)
        for number, gate in enumerate(self.gates):
            for metric in (gate.metric, *gate.covers):
                _known(f"gates.{number}.metric", metric, self.metrics)
            for row_name in gate.rows:
                _known(f"gates.{number}.rows", row_name, self.rows)
        for number, claim in enumerate(self.claims):
            _known(f"claims.{number}.metric", claim.metric, self.metrics)
            for row_name in claim.rows:
                _known(f"claims.{number}", row_name, self.rows_of(claim.metric))
        return self

    def rows_of(self, metric: str) -> tuple[str, ...]:
        """Return the rows that have a metric."""
        chosen = self.metrics[metric].rows
        return tuple(self.rows) if chosen is None else chosen

    def seeds_of(self, row: str) -> range:
        """Return the seeds of a row."""
        return range(self.rows[row].seeds or self.seeds)

    def metric_of(self, metric: str, row: str) -> MetricSpec:
        """Return a metric with the changes of a row."""
        return self.metrics[metric].changed(**self.rows[row].metrics.get(metric, {}))

    def label(self, row: str) -> str:
        """Return the name of a row to print."""
        return self.rows[row].label or row

    def with_seeds(self, seeds: int) -> "ExperimentTable":
        """Return the table with another number of seeds for all rows."""
        rows = {name: row.changed(seeds=None) for name, row in self.rows.items()}
        return self.changed(seeds=seeds, rows=rows)


def read_table(given: str | Path) -> ExperimentTable:
    """Return a table by its name or its TOML file."""
    text = str(given)
    is_file = text.endswith(".toml")
    if not is_file and text not in table_names():
        raise InputError(f"table is {text!r}; {nearest(text, table_names())} (or give a .toml file)")
    path = Path(text) if is_file else Path(str(_DATA / "tables" / f"{text}.toml"))
    data = _apply_templates(_read(path), path)
    # a table has only the metrics of its base that it names
    own = read_toml(path).get("metrics", {})
    data["metrics"] = {name: metric for name, metric in data.get("metrics", {}).items() if name in own}
    return ExperimentTable.parse({"name": path.stem, **data}, source=str(given))


@cache
def table_names() -> tuple[str, ...]:
    """Return the names of the papers' tables by rank."""
    paths = [Path(str(path)) for path in (_DATA / "tables").iterdir() if path.name.endswith(".toml")]
    return tuple(path.stem for path in sorted(paths, key=lambda path: (_read(path).get("rank", 99), path.stem)))


def block_tables(name: str) -> list[str]:
    """Return the names of the tables of a block such as "block-1"."""
    by_block: dict[str, list[str]] = {}
    for table in table_names():
        block = _read(Path(str(_DATA / "tables" / f"{table}.toml"))).get("block")
        if block is not None:
            by_block.setdefault(f"{BLOCK}{block}", []).append(table)
    if name not in by_block:
        raise InputError(f"block is {name!r}; {nearest(name, by_block)}")
    return by_block[name]


def merge_run_settings(base: Mapping[str, Any], own: Mapping[str, Any]) -> Plain:
    """Merge settings of a run like recipes; a model that is text stays text, as an argument of a command."""
    model = own.get("model", base.get("model"))
    if isinstance(model, Mapping):
        return merge_settings(base, own)
    rest = [{name: value for name, value in one.items() if name != "model"} for one in (base, own)]
    return {**merge_settings(*rest), **({} if model is None else {"model": model})}


def _read(path: Path) -> Plain:
    """Return the content of a table file, merged over its base."""
    own = read_toml(path)
    if "base" not in own:
        return own
    name = own.pop("base")
    pools = [Path(str(pool)) for pool in (_DATA / "pools").iterdir()]
    known = {pool.stem: pool for pool in pools}
    base = path.parent / str(name) if str(name).endswith(".toml") else known.get(str(name))
    if base is None:
        raise InputError(f"{path}: base is {name!r}; {nearest(str(name), known)} (or give a .toml file)")
    inherited = _read(base)
    merged = {**inherited, **own}
    for group in _MERGED:
        if group in inherited or group in own:
            merged[group] = _merge_entries(inherited.get(group, {}), own.get(group, {}))
    return merged


def _merge_entries(base: Mapping[str, Any], own: Mapping[str, Any]) -> Plain:
    """Merge two groups of entries such as runs; settings are merged like recipes."""
    merged = dict(base)
    for name, entry in own.items():
        earlier = merged.get(name, {})
        merged[name] = {**earlier, **entry}
        if "settings" in earlier and "settings" in entry:
            merged[name]["settings"] = merge_run_settings(earlier["settings"], entry["settings"])
        if "set" in earlier and "set" in entry:
            merged[name]["set"] = _merge_sets(earlier["set"], entry["set"])
    return merged


def _apply_templates(data: Plain, path: Path) -> Plain:
    """Return the table with every row merged over the template that it names."""
    templates = data.pop("templates", {})
    rows = {}
    for name, row in data.get("rows", {}).items():
        template = row.get("template")
        if template is not None and template not in templates:
            raise InputError(f"{path}: rows.{name}.template is {template!r}; {nearest(str(template), templates)}")
        base = {} if template is None else templates[template]
        joined = {**base, **row}
        joined["set"] = _merge_sets(base.get("set", {}), row.get("set", {}))
        joined["seconds"] = {**base.get("seconds", {}), **row.get("seconds", {})}
        rows[name] = joined
    return {**data, "rows": rows}


def _merge_sets(base: Mapping[str, Plain], own: Mapping[str, Plain]) -> dict[str, Plain]:
    return {run: merge_run_settings(base.get(run, {}), own.get(run, {})) for run in {**base, **own}}


def _known(field: str, name: str, allowed: Any) -> None:
    if name not in allowed:
        raise ValueError(f"{field} names {name!r}; {nearest(name, allowed)}")
