"""Interruptions of a run: signals, and faults of the system such as a full disk."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from safetensors import SafetensorError
from torch.distributed import DistError

from bertsmith.errors import InputError


class StopRequest:
    """Context manager: the first SIGTERM, SIGINT or SIGHUP (a closed terminal) sets a flag that the loop reads.

    A second signal interrupts.
    """

    def __init__(self) -> None:
        self.is_made = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        # handlers can be set in the main thread only; in other threads the loop runs to its end
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_made:
            raise KeyboardInterrupt
        self.is_made = True


def describe_checkpoint(out: Path) -> str:
    """Return a clause that names the newest checkpoint of an interrupted run."""
    newest = max((out / "checkpoints").glob("step-*"), default=None)
    if newest is None:
        return "no checkpoint had been written"
    return f"checkpoint {newest.name} is kept"


def explain_fault(error: BaseException, out: Path, training: Path | None = None) -> InputError | None:
    """Turn a fault of the system, such as a full disk, into an InputError that explains how to resume.

    Return None for any other error. `training` is the folder with the checkpoints if the run has several trainings.
    """
    reason = _reason(error) if isinstance(error, OSError | SafetensorError | RuntimeError | InputError) else None
    if reason is None:
        return None
    return InputError(
        f"the run in {str(out)!r} stopped: {reason}; {describe_checkpoint(training or out)}: fix the cause and "
        "continue with --resume"
    )


@contextmanager
def explain_faults(out: Path, training: Path | None = None) -> Iterator[None]:
    """Raise faults of the system as InputErrors that explain how to resume."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, InputError) as error:
        fault = explain_fault(error, out, training)
        if fault is None:
            raise
        raise fault from None


def _reason(error: Exception) -> str | None:
    """Return the reason in one line; None for an error that is clear already, or that is a bug."""
    if isinstance(error, DistError) or "gloo" in str(error):
        return "the connection to another process of the run broke, which has probably ended"
    # a data loader worker passes its error on as a traceback that ends with the error's own line
    is_from_reader = "DataLoader worker" in str(error)
    if isinstance(error, RuntimeError | InputError) and not is_from_reader:
        return None
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error).strip().splitlines()[-1]
