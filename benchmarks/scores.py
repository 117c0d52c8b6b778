"""Fine-tunes models on tasks with several seeds, runs side by side on one GPU, and prints one table.

    python benchmarks/scores.py MODEL [MODEL …] --data DATA --tasks SST-2,MRPC,STS-B,CoLA,RTE,SQuAD --seeds 0,1,2 \\
        --processes 8 --device cuda --out scores.jsonl
    python benchmarks/scores.py --out scores.jsonl --table-only

A MODEL is the folder of a model, ours or Hugging Face's, or a name that `bertsmith finetune` knows, written
[NAME=]FOLDER[@RATE]: the name it has in the table (by default that of its folder) and a learning rate of its own.
--fresh does the same with the network of a MODEL from random weights, others for every seed.

DATA is a folder with glue/SST-2/train.jsonl.xz and so on; scores_tasks.py has the table of tasks and their settings,
those that were published for ELECTRA-small. Another rate may suit another model: give it as MODEL@RATE, or let
--learning-rates try several; the table then has, for every model and task, the one with the best mean over the seeds on
dev, and says so. --set changes any other setting: of all runs, or of a task or a model, as in RTE:run.epochs=5 or
minilm:encoder.layer_decay=1.0.

Every run that is done is one line of --out at once, and is not run again if the file has it: same weights, task, rows,
settings and seed. What fails leaves its sentence there, is tried again the next time, and the exit code is 1.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError, nearest
from scores_table import RATE, tables
from scores_tasks import COMMON, FRESH, TASKS, cost_of, finetuned
from side_by_side import Run, lines_of, read_lines, run_all


@dataclass(frozen=True)
class Contestant:
    """One row of the table."""

    name: str
    source: str
    rate: float | None
    is_fresh: bool

    @property
    def weights(self) -> str:
        """What tells weights apart: the hash of their files, or the name of what has no folder."""
        if self.is_fresh:
            return "random"
        files = sorted(Path(self.source).glob("*.safetensors"))
        if not files:
            return self.source
        digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files))
        return digest.hexdigest()[:16]


def main() -> int:
    options = _options()
    try:
        runs = [] if options.table_only else planned(options)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    failed = run_all(finetuned, runs, options.out, processes=options.processes, threads=options.threads) if runs else 0
    lines = read_lines(options.out)
    done = [line for line in lines if "error" not in line] if options.table_only else lines_of(runs, lines)
    print(tables(done))
    return 1 if failed else 0


def planned(options: argparse.Namespace) -> list[Run]:
    """All runs that the options ask for."""
    contestants = [*map(contestant, options.models), *(contestant(text, is_fresh=True) for text in options.fresh)]
    names = [entrant.name for entrant in contestants]
    if not names:
        raise InputError("no MODEL is given; give the folder of a model, or --fresh")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two models are called {name!r}; tell them apart: NAME=FOLDER")
    for task in options.tasks:
        if task not in TASKS:
            raise InputError(f"--tasks has {task!r}; {nearest(task, TASKS)}")
    changes = [change(text, names) for text in options.set]
    runs = []
    for entrant in contestants:
        weights = entrant.weights
        for task in options.tasks:
            data = str(options.data / TASKS[task].folder)
            for settings in _settings(entrant, task, changes, options):
                cost = cost_of(data, options.rows, settings["run.epochs"])
                for seed in options.seeds:
                    record = {
                        "model": entrant.name,
                        "weights": weights,
                        "task": task,
                        "seed": seed,
                        "train_rows": options.rows,
                        "dev_rows": options.dev_rows,
                        "epochs": options.epochs,
                        "settings": settings,
                    }
                    places = {"model": entrant.source, "data": data, "device": options.device}
                    runs.append(Run(record, places, cost))
    return runs


def _settings(
    entrant: Contestant, task: str, changes: Sequence[tuple[str | None, str, Any]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The settings of a model on a task, for every learning rate that is to be tried."""
    settings = {**COMMON, **TASKS[task].settings, **(FRESH if entrant.is_fresh else {})}
    if options.epochs is not None:
        settings["run.epochs"] = options.epochs
    for name, path, value in changes:
        if name in (None, task, entrant.name):
            settings[path] = value
    rates = [entrant.rate] if entrant.rate is not None else options.learning_rates or [settings[RATE]]
    return [{**settings, RATE: rate} for rate in rates]


def contestant(text: str, *, is_fresh: bool = False) -> Contestant:
    """What [NAME=]FOLDER[@RATE] stands for."""
    name, _, source = text.rpartition("=")
    before, _, after = source.rpartition("@")
    rate = None
    if before:
        try:
            source, rate = before, float(after)
        except ValueError:
            source = f"{before}@{after}"  # a folder whose name has an @
    return Contestant(name or ("random weights" if is_fresh else Path(source).name), source, rate, is_fresh)


def change(text: str, names: Sequence[str]) -> tuple[str | None, str, Any]:
    """Whom a --set is about, the setting and its value."""
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


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="[NAME=]FOLDER[@RATE]")
    parser.add_argument("--fresh", action="append", default=[], metavar="MODEL", help="its network, random weights")
    parser.add_argument("--data", type=Path, help="the folder with glue, squad, pairs …")
    parser.add_argument("--tasks", default="CoLA,SST-2,MRPC,STS-B,RTE", type=lambda text: text.split(","))
    parser.add_argument("--seeds", default=[0], type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rows", type=int, help="at most so many training rows, the same for all")
    parser.add_argument("--dev-rows", type=int, help="likewise of dev: to try things out")
    parser.add_argument("--epochs", type=float, help="on every task, instead of its own")
    parser.add_argument("--learning-rates", nargs="+", type=float, help="to try, for models without one of their own")
    parser.add_argument("--set", action="append", default=[], help="[TASK:|MODEL:]setting=value")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--out", type=Path, required=True, help="the file of lines, which is added to")
    parser.add_argument("--table-only", action="store_true", help="print the table of what the file has")
    options = parser.parse_args(arguments)
    if options.data is None and not options.table_only:
        parser.error("--data is not given: it names the folder with glue, squad, pairs …")
    return options


if __name__ == "__main__":
    sys.exit(main())
