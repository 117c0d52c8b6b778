"""Run functions and commands in forked processes with limits, kill them, and find their orphans.

The parent imports everything once and computes nothing, so a child starts in milliseconds.
"""

import os
import resource
import signal
import sys
import tempfile
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
    """The function's result, and empty for a command."""
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
    file_bytes: int | None = None,
    kill: Kill | None = None,
) -> Outcome:
    """Call a function in a child with at most this much time, additional memory and bytes per file."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the child is ready
        reading, writing = os.pipe()  # not a file, whose size would be limited
        child = os.fork()
        if child == 0:
            _run_child(function, home, writing, memory_mb, file_bytes)
        os.close(writing)
        os.set_blocking(reading, False)
        output = b""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        start, killed, hung = time.monotonic(), False, False
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            with suppress(BlockingIOError):
                while chunk := os.read(reading, 1 << 16):
                    output += chunk
            if ended:
                break
            passed = time.monotonic() - start
            if kill is not None and not killed and passed >= kill.after:
                os.kill(child, kill.number)
                killed = True
            if passed > seconds:
                hung = True
                os.kill(child, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        code = os.waitstatus_to_exitcode(status)
        os.close(reading)
        value = (home / "value").read_text() if (home / "value").exists() else ""
        peak = float((home / "peak").read_text() or 0) if (home / "peak").exists() else 0.0
        return Outcome(code, output.decode(errors="replace"), value, peak, killed, hung, _orphans(child))


def _run_child(
    function: Callable[[], str], home: Path, writing: int, memory_mb: int | None, file_bytes: int | None
) -> None:
    """Call the function and exit; nothing of the parent's code may run after it."""
    code = TRACEBACK
    try:
        os.setsid()
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        code = _call(function, home, memory_mb, file_bytes)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _call(function: Callable[[], str], home: Path, memory_mb: int | None, file_bytes: int | None) -> int:
    """Call the function within its limits and return the exit code."""
    _limit(memory_mb, file_bytes)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    code, value = 0, ""
    try:
        value = function()
    except InputError as error:
        print(f"bertsmith: {error}", file=sys.stderr)
        code = 2
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    if file_bytes is None:
        (home / "value").write_text(value)
        (home / "peak").write_text(str(peak_memory_mb()))
    return code


def _limit(memory_mb: int | None, file_bytes: int | None) -> None:
    if memory_mb is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + (memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if file_bytes is not None:  # a write beyond it fails, as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


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
