"""The fault trial: kills, mutated files and failing writes, with their figures."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kills import KillFigures, Work, commands, kill_command, prepare
from mutations import MutationFigures, mutate_reader, readers
from writes import WriteFigures, try_writes


@contextmanager
def inputs() -> Iterator[Work]:
    """Yield the inputs of all trials in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        yield prepare(Path(folder))


def run_kills(count: int, seed: int, only: list[str] | None = None) -> KillFigures:
    """Kill all commands about equally often."""
    figures = KillFigures()
    with inputs() as work:
        table = {name: make for name, make in commands(work).items() if not only or name in only}
        for name, make in table.items():
            start, before = time.monotonic(), figures.kills.total()
            kill_command(name, make, work, -(-count // len(table)), figures, seed)
            print(f"  {name}: {figures.kills.total() - before} kills, {time.monotonic() - start:.0f} s", flush=True)
    kinds = Counter[str]()
    for key, number in figures.kills.items():
        kinds[key.rpartition("|")[2]] += number
    print(f"{figures.kills.total()} kills {dict(kinds)}, {figures.runs} continued runs, {len(figures.faults)} faults")
    return figures


def run_mutations(count: int, seed: int, only: list[str] | None = None) -> MutationFigures:
    """Mutate the files of all readers about equally often."""
    figures = MutationFigures()
    with inputs() as work:
        table = {name: entry for name, entry in readers(work).items() if not only or name in only}
        for name, (folder, reader) in table.items():
            start = time.monotonic()
            mutate_reader(name, folder, reader, work, -(-count // len(table)), figures, seed)
            print(f"  {name}: {figures.mutations[name]} mutations, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{figures.mutations.total()} mutations, {figures.errors} rejected, {len(figures.faults)} faults")
    return figures


def run_writes(only: list[str] | None = None) -> WriteFigures:
    """Let the writes of all commands fail, and the clock jump."""
    figures = WriteFigures()
    with inputs() as work:
        for name, make in commands(work).items():
            if not only or name in only:
                try_writes(name, make, work, figures)
                print(f"  {name}: {figures.trials} trials so far", flush=True)
    print(f"{figures.trials} commands with failing writes, {figures.failed} ended early, {len(figures.faults)} faults")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--mutations", type=int, default=5000)
    parser.add_argument("--writes", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="commands or readers")
    options = parser.parse_args()
    faults: list[str] = []
    if options.kills:
        faults += run_kills(options.kills, options.seed, options.only).faults
    if options.mutations:
        faults += run_mutations(options.mutations, options.seed, options.only).faults
    if options.writes:
        faults += run_writes(options.only).faults
    for fault in faults:
        print(f"FAULT {fault}")
    sys.exit(1 if faults else 0)
