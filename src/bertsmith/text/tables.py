"""Rows of named columns, each knowing where it stands in its file, so that what is wrong with one can be said."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError, nearest
from bertsmith.text.readers import read_rows
from bertsmith.text.task_folder import find_part


@dataclass(frozen=True)
class Table:
    """The rows of one part of a task."""

    name: str
    """What a sentence calls it: a file, or the list it was given as."""
    rows: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]
    """The line or row of its source that each row comes from."""
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the first row."""
        return tuple(self.rows[0]) if self.rows else ()

    def place(self, index: int) -> str:
        """Where a row stands, for a sentence."""
        return f"{self.name} {self.unit} {self.numbers[index]}"

    def value(self, index: int, column: str) -> Any:
        """What a row has in a column, or a sentence that it has none."""
        row = self.rows[index]
        if column not in row:
            raise InputError(f"{self.place(index)} has no field {column!r}; {nearest(column, row)}")
        return row[column]

    def text(self, index: int, column: str) -> str:
        """The text of a row in a column, or a sentence that it is none."""
        value = self.value(index, column)
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            raise InputError(f"{self.place(index)}: field {column!r} is {kind}; it must be a string")
        return value

    def take(self, indices: Sequence[int]) -> "Table":
        """The table of some of its rows."""
        return Table(self.name, [self.rows[i] for i in indices], [self.numbers[i] for i in indices], self.unit)


def read_part(folder: Path, part: str) -> Table:
    """One part of a task folder."""
    file = find_part(folder, part)
    found = list(read_rows(file))
    if not found:
        raise InputError(f"file {str(file)!r} has no rows")
    return Table(f"file {str(file)!r}", [row for _, row in found], [number for number, _ in found])


def table_of(rows: Sequence[Mapping[str, Any]], name: str) -> Table:
    """Rows that were given in Python."""
    return Table(name, rows, range(len(rows)), "row")
