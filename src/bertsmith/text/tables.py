"""Rows of named columns, each knowing where it stands, so that what is wrong with one can be said; and where the parts
of a task come from: a folder, one file, or a name on the hub.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError, nearest
from bertsmith.text.hub import hub_parts, is_hub_name, named_rows
from bertsmith.text.readers import is_visible, text_of
from bertsmith.text.rows import Table
from bertsmith.text.table_files import TABLE_ENDINGS, table_ending, table_rows

PART_NAMES = {
    "train": ("train",),
    "dev": ("dev", "valid", "validation"),
    "valid": ("valid", "validation", "dev"),
    "validation": ("validation", "valid", "dev"),
    "test": ("test",),
}
"""The names under which each part is looked for."""
ROW_NAMES = ("id", "idx", "index", "guid")  # columns that only name a row


@dataclass(frozen=True)
class TextPairs:
    """Two columns of texts, row by row."""

    sources: list[str]
    targets: list[str]
    empty: int = 0
    """Rows left out because one of their texts was empty."""

    def __len__(self) -> int:
        return len(self.sources)


def part_file(folder: Path, part: str) -> Path | None:
    """The file of one part of a task, or None if the folder has none; one part in two formats is refused."""
    for name in PART_NAMES.get(part, (part,)):
        # of one format the plain file comes before the packed ones
        files = [folder / f"{name}{ending}" for ending in TABLE_ENDINGS if (folder / f"{name}{ending}").is_file()]
        formats = {file.name.removeprefix(name).split(".")[1] for file in files}
        if len(formats) > 1:
            names = " and ".join(file.name for file in files)
            raise InputError(f"--data {str(folder)!r} has {names} for one part; keep one of them")
        if files:
            return files[0]
    return None


def folder_parts(folder: Path) -> list[str]:
    """The parts that a folder has files of."""
    return sorted(
        {file.name.removesuffix(table_ending(file)) for file in folder.iterdir() if table_ending(file)}
        & {name for names in PART_NAMES.values() for name in names}
    )


def find_part(folder: Path, part: str) -> Path:
    """The file of one part of a task."""
    if not folder.is_dir():
        raise InputError(f"--data {str(folder)!r} is not a folder; give one with train.jsonl and dev.jsonl")
    file = part_file(folder, part)
    if file is not None:
        return file
    there = sorted({path.name.removesuffix(table_ending(path)) for path in folder.iterdir() if table_ending(path)})
    raise InputError(
        f"--data {str(folder)!r} has no {part}.jsonl (or .csv, .tsv, also .gz, .xz, .zst; or .parquet); "
        f"{nearest(part, there) if there else 'it holds no such file'}"
    )


def pair_columns(folder: Path, part: str, source: str | None, target: str | None) -> tuple[str, str]:
    """The names of the two columns: those given, or the only two that hold text, in the order of the file."""
    file = find_part(folder, part)
    _, row = next(table_rows(file), (0, None))
    if row is None:
        raise InputError(f"file {str(file)!r} has no rows")
    for flag, name in (("--source", source), ("--target", target)):
        if name is not None and name not in row:
            raise InputError(f"{flag} is {name!r} and file {str(file)!r} has no such column; {nearest(name, row)}")
    if source is not None and source == target:
        raise InputError(f"--source and --target are both {source!r}; name two columns")
    texts = [name for name, value in row.items() if isinstance(value, str) and name not in ROW_NAMES]
    others = [name for name in row if name not in texts and name not in ROW_NAMES]
    if source is not None and target is not None:
        return source, target
    if len(texts) != 2 or others:
        raise InputError(
            f"file {str(file)!r} has the columns {', '.join(row)}; a MODEL with a decoder learns pairs of texts "
            "(translation) only: if it is such a task, name its two columns with --source and --target"
        )
    first, second = texts
    if source == second or target == first:
        first, second = second, first
    return source or first, target or second


def read_pairs(folder: Path, part: str, source: str, target: str) -> TextPairs:
    """The pairs of one part; rows with an empty text are left out and counted."""
    file = find_part(folder, part)
    sources, targets, empty = [], [], 0
    for number, row in table_rows(file):
        texts = text_of(row, source, file, number), text_of(row, target, file, number)
        if all(map(is_visible, texts)):
            sources.append(texts[0])
            targets.append(texts[1])
        else:
            empty += 1
    if not sources:
        raise InputError(f"file {str(file)!r} has no row with a text in both {source!r} and {target!r}")
    return TextPairs(sources, targets, empty)


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
