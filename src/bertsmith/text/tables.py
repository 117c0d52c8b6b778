"""The splits (train, dev, test) of a task's data: a folder, a single file, or a dataset on the Hugging Face hub."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from bertsmith.errors import InputError, nearest
from bertsmith.text.hub import is_hub_name, load_hub_splits, named_rows
from bertsmith.text.readers import SPLIT_NAMES
from bertsmith.text.rows import Table
from bertsmith.text.table_files import TABLE_ENDINGS, table_ending, table_rows

ROW_NAMES = ("id", "idx", "index", "guid")  # identifier columns


def split_file(folder: Path, split: str) -> Path | None:
    """Find the file of a split, or None; raise if it exists in two formats."""
    for name in SPLIT_NAMES.get(split, (split,)):
        # an uncompressed file takes precedence over compressed ones
        files = [folder / f"{name}{ending}" for ending in TABLE_ENDINGS if (folder / f"{name}{ending}").is_file()]
        formats = {file.name.removeprefix(name).split(".")[1] for file in files}
        if len(formats) > 1:
            names = " and ".join(file.name for file in files)
            raise InputError(f"--data {str(folder)!r} has {names} for one split; keep one of them")
        if files:
            return files[0]
    return None


def folder_splits(folder: Path) -> list[str]:
    """Return the splits for which a folder has files."""
    return sorted(
        {file.name.removesuffix(table_ending(file)) for file in folder.iterdir() if table_ending(file)}
        & {name for names in SPLIT_NAMES.values() for name in names}
    )


def find_split_file(folder: Path, split: str) -> Path:
    """Return the file of a split; raise if it is missing."""
    if not folder.is_dir():
        raise InputError(f"--data {str(folder)!r} is not a folder; expected a folder with train.jsonl and dev.jsonl")
    file = split_file(folder, split)
    if file is not None:
        return file
    available = sorted({path.name.removesuffix(table_ending(path)) for path in folder.iterdir() if table_ending(path)})
    raise InputError(
        f"--data {str(folder)!r} has no {split}.jsonl (or .csv, .tsv, also .gz, .xz, .zst; or .parquet); "
        f"{nearest(split, available) if available else 'it has no such file'}"
    )


class Splits(ABC):
    """The splits of a task's data."""

    @abstractmethod
    def find(self, split: str) -> Table | None:
        """Return the rows of a split, or None."""

    @abstractmethod
    def missing(self, split: str) -> InputError:
        """Return the error for a missing split."""

    def read(self, split: str) -> Table:
        """Return the rows of a split; raise if it is missing."""
        table = self.find(split)
        if table is None:
            raise self.missing(split)
        return table

    def file(self, split: str) -> Path | None:
        """Return the file of a split, if its rows can be read one after the other."""
        return None

    def windows(self, split: str, rows: int) -> Iterator[Table]:
        """Yield tables of up to `rows` rows of a split; rows of a file are not held in memory."""
        file = self.file(split)
        if file is not None:
            yield from file_windows(file, rows)
            return
        table = self.read(split)
        for begin in range(0, len(table), rows):
            yield table.take(range(begin, min(begin + rows, len(table))))


class FolderSplits(Splits):
    """A folder with one file per split."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, split: str) -> Table | None:
        file = self.file(split)
        return None if file is None else read_file(file)

    def file(self, split: str) -> Path | None:
        return split_file(self.folder, split)

    def missing(self, split: str) -> InputError:
        try:
            find_split_file(self.folder, split)
        except InputError as error:
            return error
        raise AssertionError("the split exists")


class SingleFile(Splits):
    """A single file, which is the split `split`."""

    def __init__(self, path: Path, split: str) -> None:
        self.path, self.split = path, split

    def find(self, split: str) -> Table | None:
        return read_file(self.path) if split == self.split else None

    def file(self, split: str) -> Path | None:
        return self.path if split == self.split else None

    def missing(self, split: str) -> InputError:
        return InputError(
            f"--data {str(self.path)!r} is a single file, the {self.split} split; it has no {split} split"
        )


class HubSplits(Splits):
    """A dataset read with the package `datasets`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.splits = load_hub_splits(name)

    def find(self, split: str) -> Table | None:
        names = (*SPLIT_NAMES.get(split, (split,)), *(("validation_matched",) if split == "dev" else ()))
        name = next((name for name in names if name in self.splits), None)
        if name is None:
            return None
        rows = named_rows(self.splits[name])
        if not rows:
            raise InputError(f"{self.name} ({name}) has no rows")
        return Table(f"{self.name} ({name})", rows, range(len(rows)), "row")

    def missing(self, split: str) -> InputError:
        return InputError(f"--data {self.name!r} has no split {split!r}; {nearest(split, self.splits)}")


def open_splits(data: str | Path, *, file_is: str = "train") -> Splits:
    """Open the splits of --data; a single file is the split `file_is`."""
    path = Path(data)
    if path.is_dir():
        is_readable = not folder_splits(path) and any(table_ending(file) for file in path.rglob("*"))
        return HubSplits(str(path.absolute())) if is_readable else FolderSplits(path)
    if path.is_file():
        return SingleFile(path, file_is)
    name = str(data)
    # do not look up a misspelled folder name on the hub
    if table_ending(path) or not is_hub_name(name) or (path.parent != Path() and path.parent.is_dir()):
        raise InputError(
            f"--data {name!r} does not exist; use a folder, a file, or a name on the hub (owner/name, name:config)"
        )
    return HubSplits(name)


def read_file(file: Path) -> Table:
    """Read the rows of a file; raise if it is empty."""
    (table,) = file_windows(file, None)
    return table


def file_windows(file: Path, rows: int | None) -> Iterator[Table]:
    """Yield tables of up to `rows` rows of a file, None for all; raise if it is empty."""
    if not file.is_file():
        raise InputError(f"data {str(file)!r} {'is a folder; use a file' if file.is_dir() else 'does not exist'}")
    unit = "row" if table_ending(file) == ".parquet" else "line"
    is_empty, numbered_rows = True, table_rows(file)
    while numbered := list(islice(numbered_rows, rows)):
        is_empty = False
        yield Table(f"file {str(file)!r}", [row for _, row in numbered], [number for number, _ in numbered], unit)
    if is_empty:
        raise InputError(f"file {str(file)!r} has no rows")


def read_split(data: str | Path, split: str) -> Table:
    """Read one split of --data; a single file serves as any split."""
    return open_splits(data, file_is=split).read(split)
