"""The log of a run: one JSON object per line, and the trackers of run.track."""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from bertsmith.files import check_file, write_text

LOG = "log.jsonl"
LogRow = dict[str, Any]
"""A line of the log: its kind ("training", "held_out" or "notice"), its step, and values by name."""


class RunLog:
    """Append rows to log.jsonl and to accelerate's trackers; only the main process writes."""

    def __init__(self, path: Path, accelerator: Accelerator) -> None:
        self.path, self.accelerator = path, accelerator
        self.rows: list[LogRow] = []

    def rewind(self, step: int) -> None:
        """Drop the rows after a step: a resumed run writes them again."""
        self.rows = [row for row in read_log(self.path) if row["step"] <= step]
        if self.accelerator.is_main_process:
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def write(self, row: LogRow) -> None:
        """Write one row, which has a `step` and a `kind` ("training", "held_out" or "notice")."""
        self.rows.append(row)
        if self.accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        values = {f"{row['kind']}/{name}": value for name, value in row.items() if name not in ("step", "kind")}
        self.accelerator.log(values, step=row["step"])

    def of_kind(self, kind: str) -> list[LogRow]:
        """Return the rows of one kind, in order."""
        return [row for row in self.rows if row["kind"] == kind]


def read_log(path: Path) -> list[LogRow]:
    """Return the rows of a log, up to the first incomplete line."""
    if not path.exists():
        return []
    rows = []
    check_file(path)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break  # the line that was being written when the run was killed
        if not isinstance(row, dict) or not isinstance(row.get("step"), int) or not isinstance(row.get("kind"), str):
            break
        rows.append(row)
    return rows
