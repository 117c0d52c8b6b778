"""Worker processes that end with the process that started them."""

import os
import threading
import time

POLL_SECONDS = 0.25
_watched: list[int] = []
"""The direct parent, if this process ends with it."""


def exit_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends, even in the middle of a computation; a thread watches it.

    `parent` is the process to watch if it is not the direct parent: workers of a fork server are its children.
    """
    direct = os.getppid()
    _watched.append(direct)

    def watch() -> None:
        while os.getppid() == direct and (parent is None or _is_alive(parent)):
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def has_lost_parent() -> bool:
    """Return whether this process ends with its parent and the parent has ended."""
    return bool(_watched) and os.getppid() != _watched[0]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
