"""Being asked to stop: SIGTERM and SIGINT set a flag that the loop reads between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from safetensors import SafetensorError

from bertsmith.errors import InputError


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


def describe_checkpoint(out: Path) -> str:
    """What is left of a run that had to stop, as a clause."""
    newest = max((out / "checkpoints").glob("step-*"), default=None)
    if newest is None:
        return "no checkpoint had been written"
    return f"checkpoint {newest.name} is kept"


def explain_fault(error: BaseException, out: Path, training: Path | None = None) -> InputError | None:
    """Return a fault of the system, such as a full disk, as an InputError that says how to resume; None otherwise.

    `training` is the folder with the checkpoints, where the run consists of several trainings.
    """
    reason = _reason(error) if isinstance(error, OSError | SafetensorError | RuntimeError | InputError) else None
    if reason is None:
        return None
    return InputError(
        f"the run in {str(out)!r} had to stop: {reason}; {describe_checkpoint(training or out)}: put that right and go "
        "on with --resume"
    )


@contextmanager
def explained(out: Path, training: Path | None = None) -> Iterator[None]:
    """Raise faults of the system inside as InputErrors that say how to resume."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, InputError) as error:
        fault = explain_fault(error, out, training)
        if fault is None:
            raise
        raise fault from None


def _reason(error: Exception) -> str | None:
    """Why, in one line; None for an error that says enough, or that only a programmer can mend."""
    # a reading process hands on its error as a text that ends with the error's own line
    is_from_reader = "DataLoader worker" in str(error)
    if isinstance(error, RuntimeError | InputError) and not is_from_reader:
        return None
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error).strip().splitlines()[-1]
