"""Being asked to stop: SIGTERM and SIGINT set a flag that the loop reads between two steps."""

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """While it is entered, the first signal only asks; a second one interrupts at once."""

    def __init__(self) -> None:
        self.is_made = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        # handlers can be set in the main thread only; elsewhere the loop simply runs to its end
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_made:
            raise KeyboardInterrupt
        self.is_made = True
