"""Changes of files as events: list the ones of a command, kill it before one of them or in the middle of a write."""

import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

_PATHS = {"open": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.link": 2}
"""Python's audit events of file changes, and their number of paths, which the arguments begin with."""
_FOLDER = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}
"""Index of the argument with the descriptor of the folder that a relative path starts from."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class FileEvents:
    """The changes of files under a folder by this process: opened to write, synced, renamed, made and removed.

    Libraries that write without Python, such as safetensors, are not seen; their files are synced or renamed later.
    """

    def __init__(self, home: Path, stop: int | None = None) -> None:
        self.home, self.stop = f"{home.resolve()}/", stop
        self.seen: list[str] = []
        """Kind and path of every event; numbers in paths, such as steps and process ids, are replaced."""

    def install(self) -> None:
        """Watch this process; kill it before event `stop`."""
        sys.addaudithook(self._audit)
        real = os.fsync

        def fsync(file: Any) -> None:
            number = file if isinstance(file, int) else file.fileno()
            self._add("fsync", os.readlink(f"/proc/self/fd/{number}"))
            real(file)

        os.fsync = fsync

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _PATHS or (event == "open" and not arguments[2] & _WRITING):
            return
        paths = [path for path in arguments[: _PATHS[event]] if isinstance(path, str | bytes | os.PathLike)]
        folder = arguments[_FOLDER[event]] if event in _FOLDER else -1
        start = os.getcwd() if folder in (-1, None) else os.readlink(f"/proc/self/fd/{folder}")
        if paths:
            self._add(event, os.path.join(start, os.fsdecode(paths[-1])))

    def _add(self, event: str, path: str) -> None:
        if not path.startswith(self.home):
            return
        if len(self.seen) == self.stop:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(f"{event} {re.sub('[0-9]+', '#', path.removeprefix(self.home))}")


def limit_files(size: int) -> None:
    """Let writes beyond a size fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def kill_at_size(size: int) -> None:
    """Let a write beyond a size kill the process, which leaves a file that ends in the middle."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
