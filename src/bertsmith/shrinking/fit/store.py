"""Measurements in a JSON lines file, keyed by machine, software, model and conditions."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError
from bertsmith.shrinking.fit.measure import BUSY

MEASUREMENTS = "measurements.jsonl"
Value = dict[str, Any]
"""A key or a measurement as JSON data."""


def cache_file() -> Path:
    """Return the file with the measurements of all searches of this user."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "bertsmith" / MEASUREMENTS


class Measurements:
    """Earlier and new measurements; each new one is written to disk immediately.

    A measurement that other programs disturbed is recorded in the run, but never reused.
    """

    def __init__(self, path: Path, earlier: Sequence[Path] = (), copies: Sequence[Path] = ()) -> None:
        self.path, self.copies = path, copies
        self.taken = 0
        """Number of new measurements."""
        self._values: dict[str, Value] = {}
        for file in (*earlier, path):
            self._read(file)

    def get(self, key: Value) -> Value | None:
        """Return the measurement of a key; None if it does not exist."""
        return self._values.get(_canonical(key))

    def get_or_measure(self, key: Value, measure: Callable[[], Value]) -> Value:
        """Return the measurement of a key; call `measure` and store the value if it does not exist."""
        value = self.get(key)
        if value is None:
            value = json.loads(json.dumps(measure()))
            self._add(key, value)
        return value

    def _add(self, key: Value, value: Value) -> None:
        line = json.dumps({"key": key, "value": value, "at": round(time.time())}, ensure_ascii=False)
        _append(self.path, line)
        for copy in () if _is_disturbed(value) else self.copies:
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
                _append(copy, line)
            except OSError:  # the home folder is not writable: later searches measure again
                continue
        self._values[_canonical(key)] = value
        self.taken += 1

    def _read(self, file: Path) -> None:
        if not file.is_file():
            return
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                value = dict(row["value"])
                if not _is_disturbed(value):
                    self._values[_canonical(row["key"])] = value
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # a line cut off by a crash


def _is_disturbed(value: Value) -> bool:
    return bool(value.get("processor_share", 1.0) < BUSY)


def earlier_file(path: Path) -> Path:
    """Return the file of earlier measurements, given the file or its folder; InputError if it does not exist."""
    file = path / MEASUREMENTS if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"--measurements {str(path)!r} has no {MEASUREMENTS}; give the folder of an earlier fit")
    return file


def digest(*parts: bytes) -> str:
    """Return a short hash of content."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "big") + part)
    return sha.hexdigest()[:16]


def _canonical(key: Value) -> str:
    return json.dumps(key, sort_keys=True, ensure_ascii=False)


def _append(file: Path, line: str) -> None:
    """Append a line and sync it to disk, after ending an incomplete line."""
    with file.open("a+b") as stream:
        if stream.tell() > 0:
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(line.encode("utf-8") + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
