"""Commands in a hostile environment: a full disk, folders that vanish or cannot be written, a clock that jumps.

They end with one sentence and can be repeated; or, where nothing fails, with the undisturbed result.
"""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from events import limit_files
from forked import Outcome, run_command, run_first, run_forked
from kills import Arguments, Work, digest

from bertsmith.cli import main

LIMITS = (0, 100, 400, 1500, 6000, 20_000, 60_000)
"""Bytes per file after which writes fail."""
NOBODY = 65534
LATER = 0.05
"""Seconds after a command has made its folder, at which the folder vanishes or becomes read-only."""
YEAR = 365 * 86400.0


@dataclass
class WriteFigures:
    """Counts over all commands; anything in `faults` is a failure."""

    trials: int = 0
    failed: int = 0
    faults: list[str] = field(default_factory=list)


class WriteTrial:
    """Runs of one command, each in an environment of its own, and the undisturbed result."""

    def __init__(self, name: str, arguments: Arguments, work: Work, figures: WriteFigures) -> None:
        self.name, self.arguments, self.figures = name, arguments, figures
        self.home = work.home / "writes" / name.replace(" ", "")
        reference = self.folder("reference")
        outcome = run_first(arguments(reference))
        assert outcome.code == 0, outcome.output
        self.expected = digest(reference)

    def folder(self, name: str) -> Path:
        """Return a new output folder."""
        out = self.home / name / "out"
        out.parent.mkdir(parents=True)
        return out

    def fill_disk(self) -> None:
        """Let writes fail beyond every limit."""
        for limit in LIMITS:
            out, case = self.folder(str(limit)), f"{limit} bytes per file"
            outcome = run_command(self.arguments(out), setup=partial(limit_files, limit))
            self._check(case, outcome, out)

    def remove_folder(self) -> None:
        """Remove the output folder while the command writes to it."""
        out = self.folder("vanished")
        outcome = self._run_beside(out, partial(shutil.rmtree, out, ignore_errors=True))
        self._check("folder removed", outcome, out)

    def forbid_writing(self) -> None:
        """Run as a user without permission: from the start, and for a finished folder that is to be replaced."""
        for case in ("read-only parent", "read-only folder"):
            out = self.folder(case.replace(" ", "-"))
            out.parent.chmod(0o777)
            if case == "read-only folder":
                assert run_command(self.arguments(out)).code == 0
                out.chmod(0o555)
            else:
                out.parent.chmod(0o555)
            outcome = run_command(self.arguments(out), setup=_become_nobody)
            out.parent.chmod(0o755)
            if out.exists():
                out.chmod(0o755)
            if outcome.code == 0:
                self.figures.faults.append(f"{self.name}, {case}: wrote")
            self._check(case, outcome, out, repeats=False)

    def lose_permission(self) -> None:
        """Take the permission to write to the output folder away while the command writes to it."""
        out = self.folder("lost")
        out.parent.chmod(0o777)
        outcome = self._run_beside(out, partial(_forbid, out), setup=_become_nobody)
        for folder in (path for path in (out, *out.rglob("*")) if path.is_dir()):
            folder.chmod(0o755)
        self._check("permission lost", outcome, out)

    def jump_clock(self) -> None:
        """Let the clock jump by up to a year in both directions whenever it is read; the result must not differ."""
        out = self.folder("clock")
        outcome = run_command(self.arguments(out), setup=_jump_clock)
        if outcome.code != 0:
            self.figures.faults.append(f"{self.name}, jumping clock: exit {outcome.code}: {outcome.output[-400:]}")
        self._check("jumping clock", outcome, out, always=True)

    def _run_beside(self, out: Path, act: Callable[[], None], *, setup: Callable[[], None] | None = None) -> Outcome:
        """Run the command and, in a thread beside it, an action shortly after the folder appears."""

        def call() -> str:
            def watch() -> None:
                while not out.exists():
                    time.sleep(0.002)
                time.sleep(LATER)
                with suppress(OSError):
                    act()

            threading.Thread(target=watch, daemon=True).start()
            main(self.arguments(out))
            return ""

        return run_forked(call, setup=setup)

    def _check(self, case: str, outcome: Outcome, out: Path, *, repeats: bool = True, always: bool = False) -> None:
        """Check that a command succeeded or ended with one sentence, and that its repetition gives the right result."""
        self.figures.trials += 1
        self.figures.failed += outcome.code != 0
        errors = [line for line in outcome.output.splitlines() if line.startswith("bertsmith: ")]
        if outcome.is_hung or outcome.code not in (0, 2) or (outcome.code == 2 and len(errors) != 1):
            self.figures.faults.append(f"{self.name}, {case}: exit {outcome.code}: {outcome.output[-500:]}")
        if outcome.code != 0 and repeats:
            again = run_command(self.arguments(out))
            if again.code != 0:
                self.figures.faults.append(f"{self.name}: not repeated after {case}: {again.output[-400:]}")
                return
        if (always or outcome.code != 0) and (always or repeats) and digest(out) != self.expected:
            self.figures.faults.append(f"{self.name}: differs after {case}")
        shutil.rmtree(out.parent)


def try_writes(name: str, arguments: Arguments, work: Work, figures: WriteFigures) -> None:
    """Run a command in every environment."""
    for folder in (work.home, *work.home.rglob("*")):
        folder.chmod(0o755 if folder.is_dir() else 0o644)
    trial = WriteTrial(name, arguments, work, figures)
    trial.fill_disk()
    trial.remove_folder()
    trial.forbid_writing()
    trial.lose_permission()
    trial.jump_clock()


def _become_nobody() -> None:
    """Give up root's rights, under which no folder is read-only; another user keeps its own."""
    if os.getuid() == 0:
        os.environ["HOME"] = "/nonexistent"
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _forbid(out: Path) -> None:
    for path in (*(path for path in out.rglob("*") if path.is_dir()), out):
        path.chmod(0o555)


def _jump_clock() -> None:
    """Replace the clock of the date, which a service may set at any time; the other clocks never go back."""
    real, chooser = time.time, random.Random(0)
    time.time = lambda: real() + chooser.uniform(-YEAR, YEAR)
    time.time_ns = lambda: int(time.time() * 1e9)
