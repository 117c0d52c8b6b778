"""What the system may refuse while a run goes on, a full disk or a file that vanished, as one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from bertsmith.errors import InputError


def kept(out: Path) -> str:
    """What is left of a run that had to stop, as a clause."""
    newest = max((out / "checkpoints").glob("step-*"), default=None)
    if newest is None:
        return "no checkpoint had been written"
    return f"checkpoint {newest.name} is kept"


@contextmanager
def explained(out: Path, training: Path | None = None) -> Iterator[None]:
    """Turns what the system refuses inside into an InputError that names the folder and says what is kept.

    `training` is the folder with the checkpoints, where the run is one of several trainings.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, InputError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise InputError(
            f"the run in {str(out)!r} had to stop: {reason}; {kept(training or out)}: put that right and go on with "
            "--resume"
        ) from None


def _reason(error: Exception) -> str | None:
    """Why, in one line; None for an error that says enough, or that only a programmer can mend."""
    # a reading process hands on its error as a text that ends with the error's own line
    is_from_reader = "DataLoader worker" in str(error)
    if isinstance(error, RuntimeError | InputError) and not is_from_reader:
        return None
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error).strip().splitlines()[-1]
