"""Rows of named columns, each knowing where it stands, so that what is wrong with one can be said; and where the parts
of a task come from: a folder, one file, or a name on the hub.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError, nearest
from bertsmith.text.hub import hub_parts, is_hub_name, named_rows
from bertsmith.text.table_files import table_ending, table_rows
from bertsmith.text.task_folder import PART_NAMES, find_part, folder_parts, part_file


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


class Parts(ABC):
    """The parts of one task."""

    @abstractmethod
    def find(self, part: str) -> Table | None:
        """The rows of a part, or None if there is no such part."""

    @abstractmethod
    def missing(self, part: str) -> InputError:
        """The sentence that a part is not there."""

    def read(self, part: str) -> Table:
        """The rows of a part, or a sentence that there is none."""
        table = self.find(part)
        if table is None:
            raise self.missing(part)
        return table


class FolderParts(Parts):
    """A folder with a file for every part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, part: str) -> Table | None:
        file = part_file(self.folder, part)
        return None if file is None else read_file(file)

    def missing(self, part: str) -> InputError:
        try:
            find_part(self.folder, part)
        except InputError as error:
            return error
        raise AssertionError("the part is there")


class OneFile(Parts):
    """One file, which is whatever part is asked for first of all: that to learn from, or that to answer."""

    def __init__(self, file: Path, part: str) -> None:
        self.file, self.part = file, part

    def find(self, part: str) -> Table | None:
        return read_file(self.file) if part == self.part else None

    def missing(self, part: str) -> InputError:
        return InputError(f"--data {str(self.file)!r} is one file, the {self.part} part; it has no {part} part")


class HubParts(Parts):
    """A data set that the package `datasets` reads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: Mapping[str, Any] = hub_parts(name)

    def find(self, part: str) -> Table | None:
        names = (*PART_NAMES.get(part, (part,)), *(("validation_matched",) if part == "dev" else ()))
        found = next((name for name in names if name in self.parts), None)
        if found is None:
            return None
        rows = named_rows(self.parts[found])
        if not rows:
            raise InputError(f"{self.name} ({found}) has no rows")
        return Table(f"{self.name} ({found})", rows, range(len(rows)), "row")

    def missing(self, part: str) -> InputError:
        return InputError(f"--data {self.name!r} has no part {part!r}; {nearest(part, self.parts)}")


def parts_of(data: str | Path, *, file_is: str = "train") -> Parts:
    """The parts of what --data names; a single file is the part `file_is`."""
    path = Path(data)
    if path.is_dir():
        is_readable = not folder_parts(path) and any(table_ending(file) for file in path.rglob("*"))
        return HubParts(str(path.absolute())) if is_readable else FolderParts(path)
    if path.is_file():
        return OneFile(path, file_is)
    name = str(data)
    # a folder with a slip in its name is not looked for elsewhere
    if table_ending(path) or not is_hub_name(name) or (path.parent != Path() and path.parent.is_dir()):
        raise InputError(
            f"--data {name!r} does not exist; give a folder, a file, or a name on the hub (owner/name, name:config)"
        )
    return HubParts(name)


def read_file(file: Path) -> Table:
    """The rows of a file, at least one."""
    if not file.is_file():
        raise InputError(f"data {str(file)!r} {'is a folder; give a file' if file.is_dir() else 'does not exist'}")
    found = list(table_rows(file))
    if not found:
        raise InputError(f"file {str(file)!r} has no rows")
    unit = "row" if table_ending(file) == ".parquet" else "line"
    return Table(f"file {str(file)!r}", [row for _, row in found], [number for number, _ in found], unit)


def read_part(data: str | Path, part: str) -> Table:
    """One part of what --data names; a single file is whatever part is asked for."""
    return parts_of(data, file_is=part).read(part)
