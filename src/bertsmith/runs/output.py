"""Functions for output folders: check and claim a folder, write result.json and predictions. Imports no PyTorch."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError

RESULT = "result.json"
REPORT = "report.html"
MARK = ".bertsmith"
"""File that marks folders created by a run; a folder without it is never emptied."""


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
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not force:
        raise InputError(f"--out {str(out)!r} is not empty; give another folder, or --force to replace its content")
    if not (out / MARK).is_file():
        raise InputError(
            f"--out {str(out)!r} was not made by a bertsmith command, so --force does not empty it; give another folder"
        )


def claim(out: Path, force: bool, *inputs: Path | None) -> Path:
    """Create the output folder, or empty it with `force` if a run created it."""
    check_out(out, force, *inputs)
    if out.is_dir():
        clear(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    return out


def clear(out: Path, keep: Sequence[str] = ()) -> None:
    """Remove everything in a folder except the names in `keep`; links are removed, not their targets."""
    for entry in out.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _overlap(out: Path, path: Path) -> bool:
    """Return True if emptying `out` would delete the input, or writing to it would change the input."""
    return out == path or out in path.parents or (path.is_dir() and path in out.parents and (path / MARK).exists())


def write_result(out: Path, content: Mapping[str, Any]) -> None:
    """Write result.json atomically."""
    temporary = out / f".{RESULT}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(out / RESULT)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files by name; create the folder only if there are files."""
    for name, content in files.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def write_answers(path: Path, answers: Iterable[Mapping[str, Any]], *, append: bool = False) -> None:
    """Write predictions as JSON lines."""
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
