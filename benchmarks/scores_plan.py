"""Shared by scores.py and small_elastic.py: models, tasks, settings, options and runs."""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError, nearest
from scores_tasks import TASKS
from side_by_side import Run, Work, lines_of, read_lines, run_all

Change = tuple[str | None, str, Any]
"""Scope of a --set (a task, a model, None for all), the setting and its value."""


@dataclass(frozen=True)
class Contestant:
    """One row of the table."""

    name: str
    source: str
    rate: float | None
    is_fresh: bool

    @property
    def weights(self) -> str:
        """Identity of the weights: the hash of their files, or the name of a model without a folder."""
        if self.is_fresh:
            return "random"
        files = sorted(Path(self.source).glob("*.safetensors"))
        if not files:
            return self.source
        digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files))
        return digest.hexdigest()[:16]


def contestant(text: str, *, is_fresh: bool = False) -> Contestant:
    """Parse [NAME=]FOLDER[@RATE]."""
    name, _, source = text.rpartition("=")
    before, _, after = source.rpartition("@")
    rate = None
    if before:
        try:
            source, rate = before, float(after)
        except ValueError:
            source = f"{before}@{after}"  # a folder name that contains @
    return Contestant(name or ("random weights" if is_fresh else Path(source).name), source, rate, is_fresh)


def change(text: str, names: Sequence[str]) -> Change:
    """Parse a --set."""
    head, equals, value = text.partition("=")
    whom, colon, path = head.rpartition(":")
    if not equals:
        raise InputError(f"--set is {text!r}; allowed: setting=value, TASK:setting=value, MODEL:setting=value")
    if colon and whom not in (*TASKS, *names):
        raise InputError(f"--set {text!r} is about {whom!r}, which is neither a task nor a model here")
    try:
        return whom or None, path, json.loads(value)
    except json.JSONDecodeError:
        return whom or None, path, value


def changed(settings: dict[str, Any], changes: Sequence[Change], *whom: str) -> dict[str, Any]:
    """Return settings with the changes for all runs or for one of these names."""
    return {**settings, **{path: value for name, path, value in changes if name is None or name in whom}}


def judged(contestants: Sequence[Contestant], options: argparse.Namespace) -> Iterator[tuple[Contestant, str]]:
    """Check names and tasks, and yield every model with every task."""
    names = [entrant.name for entrant in contestants]
    if not names:
        raise InputError("no MODEL is given; give the folder of a model")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two models are called {name!r}; tell them apart: NAME=FOLDER")
    for task in options.tasks:
        if task not in TASKS:
            raise InputError(f"--tasks has {task!r}; {nearest(task, TASKS)}")
    yield from ((entrant, task) for entrant in contestants for task in options.tasks)


def runs_of(entrant: Contestant, task: str, options: argparse.Namespace, cost: float, **settings: Any) -> list[Run]:
    """Return a run for every seed; `settings` also identify it."""
    record = {
        "model": entrant.name,
        "weights": entrant.weights,
        "task": task,
        "train_rows": options.rows,
        "dev_rows": options.dev_rows,
        **settings,
    }
    paths = {"model": entrant.source, "data": data_of(task, options), "device": options.device}
    return [Run({**record, "seed": seed}, paths, cost) for seed in options.seeds]


def data_of(task: str, options: argparse.Namespace) -> str:
    return str(options.data / TASKS[task].folder)


def carry_out(
    work: Work,
    planned: Callable[[argparse.Namespace], list[Run]],
    tables: Callable[[Sequence[Any]], str],
    options: argparse.Namespace,
) -> int:
    """Run what is not done yet, print the tables, and return the exit code."""
    try:
        runs = [] if options.table_only else planned(options)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    failed = run_all(work, runs, options.out, processes=options.processes, threads=options.threads) if runs else 0
    lines = read_lines(options.out)
    print(tables([line for line in lines if "error" not in line] if options.table_only else lines_of(runs, lines)))
    return 1 if failed else 0


def options_of(description: str, tasks: str, add: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    """Parse the shared options and those that `add` adds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="[NAME=]FOLDER[@RATE]")
    parser.add_argument("--data", type=Path, help="the folder with glue, squad, pairs …")
    parser.add_argument("--tasks", default=tasks.split(","), type=lambda text: text.split(","))
    parser.add_argument("--seeds", default=[0], type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rows", type=int, help="maximum training rows, the same for all runs")
    parser.add_argument("--dev-rows", type=int, help="maximum dev rows, for quick tests")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to append to")
    parser.add_argument("--table-only", action="store_true", help="only print the tables of the file")
    add(parser)
    options = parser.parse_args()
    if options.data is None and not options.table_only:
        parser.error("--data is missing; give the folder with glue, squad, pairs …")
    return options
