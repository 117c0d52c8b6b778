"""Log lines that repeat: under overload the same line could be written thousands of times a second."""

import logging
import time
from collections.abc import Callable, Iterable

_SECONDS = 10.0
_MAX_LINES = 1000


class RepeatedLogs(logging.Filter):
    """Passes a line once in ten seconds, and then says how often it was repeated."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock = clock
        self._lines: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a line; lines are the same if their format and their exception are."""
        kind = record.exc_info[0] if record.exc_info else None
        key = (record.name, record.levelno, record.msg, kind)
        now = self.clock()
        written_at, repeated = self._lines.get(key, (-_SECONDS, 0))
        if now - written_at < _SECONDS:
            self._lines[key] = (written_at, repeated + 1)
            return False
        if len(self._lines) >= _MAX_LINES:  # of messages that differ each time
            self._lines.clear()
        self._lines[key] = (now, 0)
        if repeated:
            record.msg = f"{record.msg} ({repeated} more since the last such line)"
        return True


_FILTER = RepeatedLogs()


def limit_repeated_logs(names: Iterable[str]) -> None:
    """Limit the repeated lines of these loggers; a second call changes nothing."""
    for name in names:
        logging.getLogger(name).addFilter(_FILTER)
