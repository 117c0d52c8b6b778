"""A task as a folder with a file for each of train, dev and test, one example a row; here, pairs of texts."""

from dataclasses import dataclass
from pathlib import Path

from bertsmith.errors import InputError, nearest
from bertsmith.text.readers import is_visible, text_of
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
