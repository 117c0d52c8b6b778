"""Tables: rows of named columns, with their position in the source for error messages."""

import math
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bertsmith.errors import InputError, nearest

Row: TypeAlias = Mapping[str, Any]
"""Values by column."""


@dataclass(frozen=True)
class Table:
    """The rows of one split of a task."""

    name: str
    """Name in messages: the file, or the argument that held the rows."""
    rows: Sequence[Row]
    numbers: Sequence[int]
    """Line or row number of each row in its source."""
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of all rows, in order of appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

    def location(self, index: int) -> str:
        """Return the location of a row, for messages."""
        return f"{self.name} {self.unit} {self.numbers[index]}"

    def value(self, index: int, column: str) -> Any:
        """Return the value of a column; raise if the row lacks the column."""
        row = self.rows[index]
        if column not in row:
            raise InputError(f"{self.location(index)} has no field {column!r}; {nearest(column, row)}")
        return row[column]

    def text(self, index: int, column: str) -> str:
        """Return the text of a column; raise if it is not a string."""
        value = self.value(index, column)
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            raise InputError(f"{self.location(index)}: field {column!r} is {kind}; it must be a string")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{self.location(index)}: field {column!r} has an unpaired surrogate ({value[error.start]!a}); "
                    "it must be valid Unicode"
                ) from None
        return value

    def number(self, index: int, column: str) -> float:
        """Return the number of a column, which may be a string; raise if it is not a finite number."""
        value = self.value(index, column)
        number = None if isinstance(value, bool) or not isinstance(value, str | int | float) else read_number(value)
        if number is None:
            shown = "null" if value is None else repr(value)
            raise InputError(f"{self.location(index)}: field {column!r} is {shown}; it must be a finite number")
        return number

    def vector(self, index: int, column: str) -> np.ndarray:
        """Return the vector of a column, (width,); raise if it is not a list of finite numbers.

        A string is read as the base64 of little-endian float16 numbers, as `encode --format jsonl` writes them.
        """
        value = self.value(index, column)
        try:
            numbers = np.frombuffer(b64decode(value, validate=True), "<f2") if isinstance(value, str) else value
            vector = np.asarray(numbers, dtype=np.float32)
        except (TypeError, ValueError):  # also binascii.Error
            vector = np.array(math.nan, dtype=np.float32)
        if vector.ndim != 1 or not vector.size or not np.isfinite(vector).all():
            raise InputError(
                f"{self.location(index)}: field {column!r} is not a vector; allowed: a list of finite numbers, or a "
                "string with the base64 of float16 numbers"
            )
        return vector

    def take(self, indices: Sequence[int]) -> "Table":
        """Select rows."""
        return Table(self.name, [self.rows[i] for i in indices], [self.numbers[i] for i in indices], self.unit)


def read_number(value: str | int | float) -> float | None:
    """Parse a finite number; None if the value is not one."""
    try:
        # Python accepts 1_000 as a number, data files do not
        number = math.nan if isinstance(value, str) and "_" in value else float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def table_of(rows: Sequence[Row], name: str) -> Table:
    """Return rows passed in Python as a table."""
    return Table(name, rows, range(len(rows)), "row")


def row_of(value: object, columns: Sequence[str]) -> dict[str, Any]:
    """Turn the input of one prediction into a row: a mapping unchanged, other values by column."""
    if isinstance(value, Mapping):
        return dict(value)
    values = [value] if len(columns) == 1 else list(value) if isinstance(value, tuple | list) else [value]
    if len(values) != len(columns):
        raise InputError(f"an input has {len(values)} values; this task reads {len(columns)}: {', '.join(columns)}")
    return dict(zip(columns, values, strict=True))
