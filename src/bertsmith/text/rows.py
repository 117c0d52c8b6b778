"""Rows of named columns, each knowing where it stands, so that what is wrong with one can be said."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bertsmith.errors import InputError, nearest


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
        """All columns that any row has, in the order in which they appear."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

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
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{self.place(index)}: field {column!r} holds half a surrogate pair ({value[error.start]!a}), "
                    "which is no character; it must be valid Unicode"
                ) from None
        return value

    def number(self, index: int, column: str) -> float:
        """The number of a row in a column, be it written as a text, or a sentence that it is none."""
        value = self.value(index, column)
        number = None if isinstance(value, bool) or not isinstance(value, str | int | float) else read_number(value)
        if number is None:
            said = "null" if value is None else repr(value)
            raise InputError(f"{self.place(index)}: field {column!r} is {said}; it must be a finite number")
        return number

    def take(self, indices: Sequence[int]) -> "Table":
        """The table of some of its rows."""
        return Table(self.name, [self.rows[i] for i in indices], [self.numbers[i] for i in indices], self.unit)


def read_number(value: str | int | float) -> float | None:
    """The finite number that a value is or spells, else None."""
    try:
        # Python reads 1_000 as a number, which no file means
        number = math.nan if isinstance(value, str) and "_" in value else float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def table_of(rows: Sequence[Mapping[str, Any]], name: str) -> Table:
    """Rows that were given in Python."""
    return Table(name, rows, range(len(rows)), "row")


def row_of(given: Any, columns: Sequence[str]) -> dict[str, Any]:
    """What a person gives for one prediction as a row: a mapping as it is, else its values by column."""
    if isinstance(given, Mapping):
        return dict(given)
    values = [given] if len(columns) == 1 else list(given) if isinstance(given, tuple | list) else [given]
    if len(values) != len(columns):
        raise InputError(f"an input has {len(values)} values; this task reads {len(columns)}: {', '.join(columns)}")
    return dict(zip(columns, values, strict=True))
