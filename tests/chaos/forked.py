"""Run functions and commands in forked processes with limits, kill them, and find their orphans.

The parent imports everything once and computes nothing, so a child starts in milliseconds.
"""

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from bertsmith.cli import COMMANDS, main
from bertsmith.data.corpus_worker import peak_memory_mb
from bertsmith.errors import InputError

for _function, _ in COMMANDS.values():
    import_module(_function.partition(":")[0])

TRACEBACK = 70
"""Exit code of a child with an exception that is neither InputError nor SystemExit."""
POLL_SECONDS = 0.005


class Outcome(NamedTuple):
    """End of a child: exit code, output, memory and orphans."""

    code: int
    """Exit code, or minus the signal that ended the child."""
    output: str
    """Everything that it printed."""
    value: str
    """The function's result; empty for a command and for a child that was killed."""
    peak_mb: float
    was_killed: bool
    """Whether the child was still running when it got its signal."""
    is_hung: bool
    orphans: int
    """Processes of the child's session that outlived it for more than three seconds."""


class Kill(NamedTuple):
    """A signal after some seconds."""

    number: int
    after: float


def run_first(arguments: list[str]) -> Outcome:
    """Run `bertsmith ARGUMENTS` in a child, then import its late imports here, so that later children have them."""

    def call() -> str:
        main(arguments)
        return " ".join(sys.modules)

    outcome = run_forked(call)
    for module in outcome.value.split():
        if module not in sys.modules:
            with suppress(Exception):  # parts of a module that were put there by hand
                import_module(module)
    return outcome


def run_command(arguments: list[str], **limits: object) -> Outcome:
    """Run `bertsmith ARGUMENTS` in a child."""

    def call() -> str:
        main(arguments)
        return ""

    return run_forked(call, **limits)  # type: ignore[arg-type]


def run_forked(
    function: Callable[[], str],
    *,
    seconds: float = 300,
    memory_mb: int | None = None,
    kill: Kill | None = None,
    setup: Callable[[], None] | None = None,
) -> Outcome:
    """Call a function in a child with at most this much time and additional memory.

    The child calls `setup` first, which may limit it further.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the child is ready
    output, report = _Pipe(), _Pipe()
    child = os.fork()
    if child == 0:
        _run_child(function, output.writing, report.writing, memory_mb, setup)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    start, killed, hung, ended = time.monotonic(), False, False, 0
    while not ended:
        time.sleep(POLL_SECONDS)
        ended, status = os.waitpid(child, os.WNOHANG)
        output.drain()
        report.drain()
        passed = time.monotonic() - start
        if kill is not None and not killed and not ended and passed >= kill.after:
            os.kill(child, kill.number)
            killed = True
        if passed > seconds and not ended:
            hung = True
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    peak, _, value = report.close().partition(" ")
    return Outcome(code, output.close(), value, float(peak or 0), killed, hung, _orphans(child))


class _Pipe:
    """Output of a child; not a file, because its size may be limited and its folder closed to the child."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._content = b""

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while chunk := os.read(self._reading, 1 << 16):
                self._content += chunk

    def close(self) -> str:
        self.drain()
        os.close(self._reading)
        os.close(self.writing)
        return self._content.decode(errors="replace")


def _run_child(
    function: Callable[[], str], output: int, report: int, memory_mb: int | None, setup: Callable[[], None] | None
) -> None:
    """Call the function and exit; nothing of the parent's code may run after it."""
    code = TRACEBACK
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory_mb is not None:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (memory_mb << 20),) * 2)
        if setup is not None:
            setup()
        code, value = _call(function)
        os.write(report, f"{peak_memory_mb()} {value}".encode())
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _call(function: Callable[[], str]) -> tuple[int, str]:
    """Return the exit code and the function's value."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        return 0, function()
    except InputError as error:
        print(f"bertsmith: {error}", file=sys.stderr)
        return 2, ""
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1, ""


def _orphans(session: int, patience: float = 3.0) -> int:
    """Count the living processes of a session after some patience; end them."""
    end = time.monotonic() + patience
    while (alive := _members(session)) and time.monotonic() < end:
        time.sleep(0.02)
    for process in alive:
        os.kill(process, signal.SIGKILL)
    return len(alive)


def _members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            members.append(int(entry.name))
    return members
