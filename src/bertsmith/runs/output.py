"""Functions for output folders: check and claim a folder, write result.json and predictions. Imports no PyTorch."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError
from bertsmith.files import SEAL, FolderLock, NewFolder, clear, is_leftover, remove_leftovers, write_json, write_seal

RESULT = "result.json"
REPORT = "report.html"
MARK = ".bertsmith"
"""File that marks folders created by a run; a folder without it is never emptied. A run in progress locks it."""
_locks: dict[Path, FolderLock] = {}


def check_out(out: Path, force: bool, *inputs: Path | None) -> None:
    """Raise InputError if a run must not write to this folder; change nothing."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {str(out)!r} is a file; give a folder")
    for path in inputs:
        if path is not None and _overlap(out.resolve(), path.resolve()):
            raise InputError(
                f"--out {str(out)!r} and the input {str(path)!r} lie inside each other; give another folder"
            )
    home = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise InputError(f"--out {str(out)!r} cannot be written: {str(home)!r} does not allow it; give another folder")
    if not out.is_dir() or not _has_content(out):
        return
    if not force:
        raise InputError(f"--out {str(out)!r} is not empty; give another folder, or --force to replace its content")
    if not (out / MARK).is_file() and not (out / SEAL).is_file():  # Python's save and export write the seal
        raise InputError(
            f"--out {str(out)!r} was not made by a bertsmith command, so --force does not empty it; give another folder"
        )
    lock(out)


def _has_content(out: Path) -> bool:
    """Whether a folder has anything but the mark of a run and files that the run left half-written."""
    names = {entry.name for entry in out.iterdir() if not ((out / MARK).exists() and is_leftover(entry))}
    return bool(names - {MARK})


def claim(out: Path, force: bool, *inputs: Path | None) -> Path:
    """Create the output folder, or empty it with `force` if a run created it; it is locked until `write_result`."""
    check_out(out, force, *inputs)
    out.mkdir(parents=True, exist_ok=True)
    lock(out)
    clear(out, keep=(MARK,))
    return out


def lock(out: Path) -> None:
    """Lock an output folder for this process until `unlock`, and remove half-written files of a killed process.

    Raise InputError if another process uses it.
    """
    key = out.resolve()
    if key in _locks:
        return
    held = FolderLock(out / MARK)
    if not held.acquire():
        raise InputError(f"--out {str(out)!r} is in use by another bertsmith process; wait for it to end, or stop it")
    _locks[key] = held
    remove_leftovers(out)


def unlock(out: Path) -> None:
    """End the lock of an output folder."""
    held = _locks.pop(out.resolve(), None)
    if held is not None:
        held.release()


def _overlap(out: Path, path: Path) -> bool:
    """Return True if emptying `out` would delete the input, or writing to it would change the input."""
    return out == path or out in path.parents or (path.is_dir() and path in out.parents and (path / MARK).exists())


@contextmanager
def replace_folder(out: Path, force: bool, *inputs: Path | None) -> Iterator[Path]:
    """Write a whole output folder: it appears complete and sealed, and an old one stays until then."""
    check_out(out, force, *inputs)
    try:
        with NewFolder(out.resolve()) as new:
            (new / MARK).touch()
            yield new
    finally:
        unlock(out)


def write_result(out: Path, content: Mapping[str, Any], *, seals: bool = False) -> None:
    """Write result.json, which marks a run as finished, and unlock the folder; with `seals`, seal its files first."""
    if seals:
        write_seal(out)
    write_json(out / RESULT, content)
    unlock(out)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files by name; create the folder only if there are files."""
    for name, content in files.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def write_answers(path: Path, answers: Iterable[Mapping[str, Any]], *, append: bool = False) -> None:
    """Write predictions as JSON lines."""
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
