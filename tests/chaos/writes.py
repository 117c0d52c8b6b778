"""Commands whose writes fail: a full disk, a folder that vanishes. They end with one sentence and can be repeated."""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from events import limit_files
from forked import Outcome, run_command, run_forked
from kills import Work, digest

from bertsmith.cli import main

LIMITS = (0, 100, 400, 1500, 6000, 20_000, 60_000)
"""Bytes per file after which writes fail."""


@dataclass
class WriteFigures:
    """Counts over all commands; anything in `faults` is a failure."""

    trials: int = 0
    failed: int = 0
    faults: list[str] = field(default_factory=list)


def fill_disk(name: str, arguments: Callable[[Path], list[str]], work: Work, figures: WriteFigures) -> None:
    """Run a command with every limit; after each failure repeat it without a limit and compare."""
    home = work.home / "full" / name.replace(" ", "")
    reference = home / "reference" / "out"
    reference.parent.mkdir(parents=True)
    assert run_command(arguments(reference)).code == 0
    expected = digest(reference)
    for limit in LIMITS:
        out = home / str(limit) / "out"
        out.parent.mkdir()
        outcome = run_command(arguments(out), setup=partial(limit_files, limit))
        figures.trials += 1
        figures.failed += outcome.code != 0
        _check_sentence(f"{name}, {limit} bytes per file", outcome, figures)
        if outcome.code == 0:
            continue
        again = run_command(arguments(out))
        if again.code != 0:
            figures.faults.append(f"{name}: not repeated after {limit} bytes: {again.output[-400:]}")
        elif {key: value for key, value in digest(out).items() if not key.startswith("checkpoints/")} != {
            key: value for key, value in expected.items() if not key.startswith("checkpoints/")
        }:
            figures.faults.append(f"{name}: differs after a limit of {limit} bytes")
        shutil.rmtree(out.parent)


def remove_folder(name: str, arguments: Callable[[Path], list[str]], work: Work, figures: WriteFigures) -> None:
    """Remove the output folder while a command writes to it."""
    out = work.home / "vanished" / name.replace(" ", "") / "out"
    out.parent.mkdir(parents=True)

    def call() -> str:
        def remove() -> None:
            while not out.exists():
                time.sleep(0.002)
            time.sleep(0.05)
            shutil.rmtree(out, ignore_errors=True)

        threading.Thread(target=remove, daemon=True).start()
        main(arguments(out))
        return ""

    outcome = run_forked(call)
    figures.trials += 1
    figures.failed += outcome.code != 0
    _check_sentence(f"{name}, folder removed", outcome, figures)


def _check_sentence(name: str, outcome: Outcome, figures: WriteFigures) -> None:
    errors = [line for line in outcome.output.splitlines() if line.startswith("bertsmith: ")]
    if outcome.is_hung or outcome.code not in (0, 2) or (outcome.code == 2 and len(errors) != 1):
        figures.faults.append(f"{name}: exit {outcome.code}: {outcome.output[-500:]}")
