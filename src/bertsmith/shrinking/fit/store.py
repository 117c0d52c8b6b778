"""Measurements as JSON lines, each with a key of the machine, software, model and conditions it holds for."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError

MEASUREMENTS = "measurements.jsonl"
Value = dict[str, Any]
"""A key or a measurement as JSON data."""


def cache_file() -> Path:
    """Return the file with the measurements of all searches of this user."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "bertsmith" / MEASUREMENTS


class Measurements:
    """Earlier measurements and new ones; each is on disk before the next one starts."""

    def __init__(self, path: Path, earlier: Sequence[Path] = (), copies: Sequence[Path] = ()) -> None:
        self.path, self.copies = path, copies
        self.taken = 0
        """Number of new measurements."""
        self._found: dict[str, Value] = {}
        for file in (*earlier, path):
            self._read(file)

    def get(self, key: Value) -> Value | None:
        """Return the measurement of a key, else None."""
        return self._found.get(_canonical(key))

    def known(self, key: Value, measure: Callable[[], Value]) -> Value:
        """Return the measurement of a key, made now if there is none."""
        found = self.get(key)
        if found is None:
            found = json.loads(json.dumps(measure()))
            self._add(key, found)
        return found

    def _add(self, key: Value, value: Value) -> None:
        line = json.dumps({"key": key, "value": value, "at": round(time.time())}, ensure_ascii=False)
        _append(self.path, line)
        for copy in self.copies:
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
                _append(copy, line)
            except OSError:  # the home folder is not writable: later searches measure again
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
                continue  # a line cut off by a crash


def earlier_file(path: Path) -> Path:
    """Return the file of earlier measurements, given itself or its folder; InputError if there is none."""
    file = path / MEASUREMENTS if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"--measurements {str(path)!r} has no {MEASUREMENTS}; give the folder of an earlier fit")
    return file


def digest(*parts: bytes) -> str:
    """Return a short hash of content."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:16]


def _canonical(key: Value) -> str:
    return json.dumps(key, sort_keys=True, ensure_ascii=False)


def _append(file: Path, line: str) -> None:
    """Append a line and sync it to disk; an earlier line that was cut off is ended first."""
    with file.open("a+b") as stream:
        if stream.tell() > 0:
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(line.encode("utf-8") + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
