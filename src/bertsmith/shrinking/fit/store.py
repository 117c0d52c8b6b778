"""Measurements in a file, one a line, each with the key that says what it holds for."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError

MEASUREMENTS = "measurements.jsonl"
Found = dict[str, Any]


def cache_file() -> Path:
    """Where the measurements of all searches of this person are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "bertsmith" / MEASUREMENTS


class Measurements:
    """Measurements that are there, and those that are added: each is on disk before the next one begins."""

    def __init__(self, path: Path, earlier: Sequence[Path] = (), copies: Sequence[Path] = ()) -> None:
        self.path, self.copies = path, copies
        self.taken = 0
        """Measurements that were made, not found."""
        self._found: dict[str, Found] = {}
        for file in (*earlier, path):
            self._read(file)

    def get(self, key: Mapping[str, Any]) -> Found | None:
        """What was measured under a key; None if nothing was."""
        return self._found.get(_canonical(key))

    def known(self, key: Mapping[str, Any], measure: Callable[[], Found]) -> Found:
        """What was measured under a key, now if not before."""
        found = self.get(key)
        if found is None:
            found = json.loads(json.dumps(measure()))
            self._add(key, found)
        return found

    def _add(self, key: Mapping[str, Any], value: Found) -> None:
        line = json.dumps({"key": key, "value": value, "at": round(time.time())}, ensure_ascii=False)
        _append(self.path, line)
        for copy in self.copies:
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
                _append(copy, line)
            except OSError:  # a home that cannot be written: later searches measure again
                continue
        self._found[_canonical(key)] = value
        self.taken += 1

    def _read(self, file: Path) -> None:
        if not file.is_file():
            return
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                self._found[_canonical(row["key"])] = dict(row["value"])
            except (ValueError, KeyError, TypeError):
                continue  # the line that was being written when the machine stopped


def earlier_file(path: Path) -> Path:
    """The measurements in a file or in the folder of a search; a sentence if there are none."""
    file = path / MEASUREMENTS if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"--measurements {str(path)!r} has no {MEASUREMENTS}; give the folder of an earlier fit")
    return file


def digest(*parts: bytes) -> str:
    """A short name for some content."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:16]


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, ensure_ascii=False)


def _append(file: Path, line: str) -> None:
    """One more line, on disk when this returns; a line that was cut off before stays a line of its own."""
    with file.open("a+b") as stream:
        if stream.tell() > 0:
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(line.encode("utf-8") + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
