"""Rows of named columns, each knowing where it stands, so that what is wrong with one can be said; and where the parts
of a task come from: a folder, one file, or a name on the hub.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError, nearest
from bertsmith.runtime.rows import Table, read_number, table_of
from bertsmith.text.hub import hub_parts, is_hub_name, named_rows
from bertsmith.text.table_files import table_ending, table_rows
from bertsmith.text.task_folder import PART_NAMES, find_part, folder_parts, part_file

__all__ = [
    "FolderParts",
    "HubParts",
    "OneFile",
    "Parts",
    "Table",
    "parts_of",
    "read_file",
    "read_number",
    "read_part",
    "table_of",
]


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
