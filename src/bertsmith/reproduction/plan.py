"""The runs of tables: settings with all references resolved, one key per distinct run, and the order to run them in."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError, nearest
from bertsmith.reproduction.table import ExperimentTable, merge_run_settings
from bertsmith.settings import Plain

DATA = "data"
_REFERENCE = re.compile(r"\{([\w-]+)\}")
_SELECTOR = re.compile(r"([\w-]+)|\[([^\]]+)\]")
_SPEED_ONLY = ("compile", "workers", "log_every")
"""Settings of `run` that change the speed and the log, but not the result; they are not part of a key."""
SEEDED = {"pretrain": "run.seed", "finetune": "run.seed", "shrink": "run.seed", "convert": "seed", "measure": "seed"}
"""Setting that receives the seed, by command."""


@dataclass(frozen=True)
class PlannedRun:
    """One distinct run."""

    key: str
    """Hash of command, settings, seed and the keys of the runs it reads."""
    command: str
    settings: Plain
    """"{KEY}" stands for the folder of another run, "{data}" for the data folder."""
    needs: tuple[str, ...]
    """Keys of the runs whose folders it reads."""
    seed: int
    label: str
    """ExperimentTable, row, run and seed, for messages: of the first table that has it."""
    seconds: float = 0.0
    alone: bool = False
    check: Plain = field(default_factory=dict)
    """Settings of a rehearsal, laid over the settings."""

    @property
    def identity(self) -> str:
        """Hash of the run without its seed."""
        return _digest([self.command, _without_seed(self.settings)])

    @property
    def affinity(self) -> str:
        """Identity of the network that the run compiles, for processes to keep; empty if it compiles none."""
        run = self.settings.get("run", {})
        return "" if run.get("compile", "off") == "off" else self.identity

    @property
    def data_paths(self) -> tuple[str, ...]:
        """Paths inside the data folder that the run reads."""
        texts = [text for text in _texts(self.settings) if text.startswith(f"{{{DATA}}}/")]
        return tuple(sorted({text.removeprefix(f"{{{DATA}}}/") for text in texts}))

    def located(self, data: Path | None, folders: Mapping[str, Path]) -> Plain:
        """Return the settings with references replaced by paths."""

        def path(match: re.Match[str]) -> str:
            if match[1] != DATA:
                return str(folders[match[1]])
            if data is None:
                raise InputError(f"{self.label} reads {{{DATA}}}; give the folder with --data")
            return str(data)

        located: Plain = _mapped(self.settings, lambda text: _REFERENCE.sub(path, text))
        return located


class RunPlan:
    """The distinct runs of several tables, in the order in which they should start."""

    def __init__(self, tables: Sequence[ExperimentTable]) -> None:
        self.tables = tables
        self.jobs: dict[str, PlannedRun] = {}
        self._cells: dict[tuple[str, str, str, int], str] = {}
        for table in tables:
            seeds = max(len(table.seeds_of(row)) for row in table.rows)
            for seed in range(seeds):  # seed 0 of every row first, so that an early end costs seeds and not rows
                for metric in table.metrics:
                    for row in table.rows_of(metric):
                        if seed in table.seeds_of(row):
                            key = self._add(table, row, table.metric_of(metric, row).run, seed, ())
                            self._cells[table.name, metric, row, seed] = key

    def key_of(self, table: str, metric: str, row: str, seed: int) -> str:
        """Return the key of the run that measures a cell."""
        return self._cells[table, metric, row, seed]

    def keys_of(self, table: str) -> set[str]:
        """Return the keys of all runs of a table and of the runs they read."""
        keys = {key for (name, *_), key in self._cells.items() if name == table}
        return keys.union(*(self.ancestors(key) for key in keys))

    def ancestors(self, key: str) -> set[str]:
        """Return the keys of all runs that a run depends on."""
        needs = self.jobs[key].needs
        return {*needs, *(ancestor for need in needs for ancestor in self.ancestors(need))}

    @property
    def read_keys(self) -> set[str]:
        """Keys of the runs whose folders other runs read."""
        return {need for job in self.jobs.values() for need in job.needs}

    def _add(self, table: ExperimentTable, row: str, run: str, seed: int, path: tuple[str, ...]) -> str:
        """Add a run of a row and everything it reads; return its key."""
        if run in path:
            raise InputError(f"table {table.name!r}: the runs {' → '.join((*path, run))} read each other")
        spec = table.runs[run]
        seed = seed if spec.seed is None else spec.seed
        settings = merge_run_settings(spec.settings, table.rows[row].set.get(run, {}))
        keys: dict[str, str] = {}
        for name in dict.fromkeys(name for text in _texts(settings) for name in _REFERENCE.findall(text)):
            if name != DATA and name not in table.runs:
                raise InputError(
                    f"table {table.name!r}: a setting of {run} has {{{name}}}; {nearest(name, (*table.runs, DATA))}"
                )
            keys[name] = DATA if name == DATA else self._add(table, row, name, seed, (*path, run))
        settings = _mapped(settings, lambda text: _REFERENCE.sub(lambda match: f"{{{keys[match[1]]}}}", text))
        setting = SEEDED.get(spec.command)
        if setting == "run.seed":
            settings = merge_run_settings(settings, {"run": {"seed": seed}})
        elif setting is not None:
            settings = {**settings, setting: seed}
        key = _digest([spec.command, _without_speed(settings)])
        seconds = table.rows[row].seconds.get(run, spec.seconds)
        job = PlannedRun(
            key=key,
            command=spec.command,
            settings=settings,
            needs=tuple(dict.fromkeys(need for need in keys.values() if need != DATA)),
            seed=seed,
            label=f"{table.name}: {run} of {table.label(row)}, seed {seed}",
            seconds=seconds,
            alone=spec.alone,
            check=spec.check,
        )
        earlier = self.jobs.setdefault(key, job)
        if seconds > earlier.seconds:
            self.jobs[key] = replace(earlier, seconds=seconds)
        return key


def find_value(result: Any, path: str) -> float:
    """Return a number of a result.json by a path such as held_out.loss or grid[width=0.5,depth=1].score."""
    node = result
    for name, conditions in _SELECTOR.findall(path):
        try:
            node = node[name] if name else _matching(node, conditions)
        except (KeyError, IndexError, TypeError, StopIteration):
            raise InputError(f"result.json has no {path!r} (at {name or conditions!r})") from None
    if isinstance(node, bool) or not isinstance(node, int | float):
        raise InputError(f"{path!r} of result.json is {node!r}; a number is needed")
    return float(node)


def _matching(entries: Any, conditions: str) -> Any:
    """Return the first entry of a list or table whose fields have the given values, or the entry with this number."""
    entries = list(entries.values()) if isinstance(entries, Mapping) else entries
    if conditions.lstrip("-").isdigit():
        return entries[int(conditions)]
    wanted = {
        name.strip(): json.loads(value) for name, _, value in (one.partition("=") for one in conditions.split(","))
    }
    return next(entry for entry in entries if all(entry.get(name) == value for name, value in wanted.items()))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _without_speed(settings: Plain) -> Plain:
    run = settings.get("run")
    if not isinstance(run, dict):
        return settings
    return {**settings, "run": {name: value for name, value in run.items() if name not in _SPEED_ONLY}}


def _without_seed(settings: Plain) -> Plain:
    """Return settings without the seed and without references to other runs, which differ between seeds."""
    plain = {name: value for name, value in settings.items() if name != "seed"}
    if isinstance(plain.get("run"), dict):
        plain["run"] = {name: value for name, value in plain["run"].items() if name != "seed"}
    mapped: Plain = _mapped(plain, lambda text: _REFERENCE.sub("", text))
    return mapped


def _texts(value: Any) -> Iterable[str]:
    """Yield all strings of nested settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, change: Any) -> Any:
    """Return nested settings with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
