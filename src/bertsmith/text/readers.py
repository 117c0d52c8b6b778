"""Stream documents from .txt, .jsonl (plain, .gz, .xz, .zst) and .parquet files without loading whole files."""

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

from bertsmith.errors import InputError, first_line, nearest
from bertsmith.files import check_file
from bertsmith.text.rows import Row

NumberedRows: TypeAlias = Iterator[tuple[int, Row]]
"""Rows with their line numbers (row numbers in .parquet files), from 1."""


def parquet_rows(file: Path, field: str | None = None, watch: Callable[[int], None] | None = None) -> NumberedRows:
    """Read the rows of a .parquet file, all columns or one; `watch` is called with the number of bytes read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"file {str(file)!r} needs pyarrow, which is not installed: pip install 'bertsmith[parquet]'"
        ) from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if field is not None and field not in columns:
                raise InputError(f"file {str(file)!r} has no column {field!r}; {nearest(field, columns)}")
            # row groups may be gigabytes; batches of rows are read page by page
            for batch in table.iter_batches(batch_size=256, columns=None if field is None else [field]):
                if watch:
                    watch(batch.nbytes)
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"file {str(file)!r} cannot be read as parquet after row {number}: {first_line(error)}"
        ) from None


def _batch_rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch of pyarrow; lists of floats become arrays, which take far less memory."""
    from pyarrow import types  # parquet_rows has checked that it is installed

    def is_vector(kind: Any) -> bool:
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        return bool(is_list and types.is_floating(kind.value_type))

    vectors = [column.name for column in batch.schema if is_vector(column.type)]
    rows: list[dict[str, Any]] = batch.drop_columns(vectors).to_pylist()
    for name in vectors:
        for row, cell in zip(rows, batch.column(name), strict=True):
            row[name] = None if cell.values is None else cell.values.to_numpy(zero_copy_only=False)
    return rows


FORMATS = (".txt", ".jsonl")
COMPRESSIONS = ("", ".gz", ".xz", ".zst")
ENDINGS = (*(format_ + compression for format_ in FORMATS for compression in COMPRESSIONS), ".parquet")

SPLIT_NAMES = {
    "train": ("train",),
    "dev": ("dev", "valid", "validation"),
    "valid": ("valid", "validation", "dev"),
    "validation": ("validation", "valid", "dev"),
    "test": ("test",),
}
"""Accepted file names of each split, in order of preference."""
READ_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
# characters; a longer document of a .txt file is split at the next line end, which bounds the memory for files without
# blank lines
MAX_TEXT_DOCUMENT = 4 << 20

# any character but white space, controls, zero-width and direction marks, and the replacement character
_VISIBLE = re.compile("[^\\s\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufffd]")

Watch = Callable[[int], None]
"""Progress callback, called with the number of bytes just read from disk."""


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """List the readable files of `paths` and of the folders among them, sorted, without duplicates."""
    files: set[Path] = set()
    for path in map(Path, paths):
        if path.is_dir():
            inside = [file for file in path.rglob("*") if file.is_file() and _ending(file) and file.name[0] != "."]
            if not inside:
                raise InputError(f"folder {str(path)!r} has no text file; allowed endings: {', '.join(ENDINGS)}")
            files.update(inside)
        elif not path.exists():
            raise InputError(f"data {str(path)!r} does not exist")
        elif not path.is_file():
            raise InputError(f"data {str(path)!r} is neither a file nor a folder")
        elif not _ending(path):
            raise InputError(f"file {str(path)!r} has no known ending; allowed: {', '.join(ENDINGS)}")
        else:
            files.add(path)
    if not files:
        raise InputError("data is empty; pass text files or folders that contain them")
    return sorted(files)


def read_documents(files: Iterable[str | Path], field: str = "text", watch: Watch | None = None) -> Iterator[str]:
    """Read the documents of all files in order; empty ones are skipped.

    In .txt files blank lines separate documents; in .jsonl files the value of `field` in each line is a document, in
    .parquet files each row of the column `field`.
    """
    for file in map(Path, files):
        ending = _known_ending(file)
        if ending == ".parquet":
            documents = _parquet_documents(file, field, watch)
        elif ending.startswith(".jsonl"):
            documents = _json_documents(file, field, watch)
        else:
            documents = _text_documents(file, watch)
        for document in documents:
            if is_visible(document):
                yield document


def read_documents_with_titles(
    files: Iterable[str | Path], field: str = "text", title: str = "title", watch: Watch | None = None
) -> Iterator[tuple[str | None, str]]:
    """Read documents with their titles; None if a row has no text in `title`."""
    for file in map(Path, files):
        ending = _known_ending(file)
        if ending.startswith(".txt"):
            yield from ((None, document) for document in read_documents([file], field, watch))
            continue
        is_parquet = ending == ".parquet"
        for number, row in parquet_rows(file, None, watch) if is_parquet else read_rows(file, watch):
            document = text_of(row, field, file, number, "row" if is_parquet else "line")
            name = row.get(title)
            if is_visible(document):
                yield (name.strip() or None) if isinstance(name, str) else None, document


def split_documents(data: str | Path, split: str, field: str = "text") -> list[str]:
    """Read the documents of one split: of a file, or of the file in a folder that is named for the split."""
    path = Path(data)
    if path.is_dir():
        files = {file.name.removesuffix(_ending(file)): file for file in find_files([path])}
        name = next((name for name in SPLIT_NAMES.get(split, (split,)) if name in files), None)
        if name is None:
            raise InputError(f"--data {str(data)!r} has no file of the split {split!r}; {nearest(split, files)}")
        path = files[name]
    documents = list(read_documents(find_files([path]), field))
    if not documents:
        raise InputError(f"file {str(path)!r} has no text; use a file with texts")
    return documents


def first_texts(file: Path, count: int, field: str = "text") -> list[str]:
    """Read at most `count` texts of a file: non-blank lines of a .txt file, documents of other files."""
    texts: list[str] = []
    for document in read_documents(find_files([file]), field):
        # adjacent lines of a .txt file are one document
        texts += document.split("\n") if _ending(file).startswith(".txt") else [document]
        if len(texts) >= count:
            break
    if not texts:
        raise InputError(f"file {str(file)!r} has no text; use a file with texts")
    return texts[:count]


def _ending(file: Path) -> str:
    """Return the known ending of a file name, or an empty string."""
    name = file.name.lower()
    return next((ending for ending in ENDINGS if name.endswith(ending)), "")


def _known_ending(file: Path) -> str:
    """Return the ending of a file name; raise if it is unknown."""
    ending = _ending(file)
    if not ending:
        raise InputError(f"file {str(file)!r} has no known ending; allowed: {', '.join(ENDINGS)}")
    return ending


def _text_documents(file: Path, watch: Watch | None) -> Iterator[str]:
    lines: list[str] = []
    characters = 0
    for number, raw in _lines(file, watch):
        line = _decode(raw, file, number)
        if line and not line.isspace():
            lines.append(line)
            characters += len(line)
            if characters < MAX_TEXT_DOCUMENT:
                continue
        if lines:
            yield "\n".join(lines)
            lines, characters = [], 0
    if lines:
        yield "\n".join(lines)


def _json_documents(file: Path, field: str, watch: Watch | None) -> Iterator[str]:
    for number, row in read_rows(file, watch):
        yield text_of(row, field, file, number)


def text_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Read the lines of a .txt file (plain or compressed), including empty ones, with their numbers from 1."""
    if not file.is_file():
        reason = "is a folder; use a file" if file.is_dir() else "does not exist"
        raise InputError(f"data {str(file)!r} {reason}")
    if not _ending(file).startswith(".txt"):
        raise InputError(f"file {str(file)!r} is not a text file; allowed endings: .txt, .txt.gz, .txt.xz, .txt.zst")
    return numbered_lines(file)


def numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Read the lines of a text file (plain or compressed) with their numbers from 1, without line ends."""
    for number, raw in _lines(file, None):
        yield number, _decode(raw, file, number)


def read_rows(file: Path, watch: Watch | None = None) -> NumberedRows:
    """Read the objects of a .jsonl file (plain or compressed); blank lines are skipped."""
    for number, raw in _lines(file, watch):
        if not raw or raw.isspace():
            continue
        try:
            # decode first: json.loads would guess UTF-16 or UTF-32 from zero bytes
            row = json.loads(_decode(raw, file, number))
        except (ValueError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"file {str(file)!r} line {number} is not valid JSON ({error}); every line must be one JSON object"
            ) from None
        if not isinstance(row, dict):
            raise InputError(
                f"file {str(file)!r} line {number} is a {type(row).__name__}; every line must be one JSON object"
            )
        yield number, row


def text_of(row: Row, field: str, file: Path, number: int, position: str = "line") -> str:
    """Return the text in a field of a row; `file`, `number` and `position` are for error messages."""
    if field not in row:
        raise InputError(f"file {str(file)!r} {position} {number} has no field {field!r}; {nearest(field, row)}")
    return _check_text(row[field], field, file, f"{position} {number}")


def is_visible(text: str) -> bool:
    """Whether a text has a visible character."""
    return _VISIBLE.search(text) is not None


def _parquet_documents(file: Path, field: str, watch: Watch | None) -> Iterator[str]:
    for number, row in parquet_rows(file, field, watch):
        yield _check_text(row[field], field, file, f"row {number}")


def _check_text(value: object, field: str, file: Path, position: str) -> str:
    """Return the value if it is valid text, else raise."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise InputError(f"file {str(file)!r} {position}: field {field!r} is {kind}; it must be a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"file {str(file)!r} {position}: field {field!r} has an unpaired surrogate "
                f"({value[error.start]!a}); it must be valid Unicode"
            ) from None
    return value


def _decode(raw: bytes, file: Path, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"file {str(file)!r} line {number} is not UTF-8 (byte 0x{raw[error.start]:02x} at position {error.start}); "
            "text files must be UTF-8"
        ) from None


def _lines(file: Path, watch: Watch | None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers from 1, without line ends."""
    number = 0
    pending: list[bytes] = []
    pending_bytes = 0
    try:
        for chunk in _chunks(file, watch):
            head, newline, tail = chunk.partition(b"\n")
            pending.append(head)
            pending_bytes += len(head)
            if pending_bytes > MAX_LINE_BYTES:
                raise InputError(
                    f"file {str(file)!r} line {number + 1} is longer than {MAX_LINE_BYTES >> 20} MB; "
                    "split it into shorter lines or rows"
                )
            if not newline:
                continue
            number += 1
            yield number, b"".join(pending).removesuffix(b"\r")
            *complete, last = tail.split(b"\n")
            for line in complete:
                number += 1
                yield number, line.removesuffix(b"\r")
            pending, pending_bytes = [last], len(last)
    except EOFError:
        raise InputError(
            f"file {str(file)!r} is a truncated archive: it ends unexpectedly after line {number}"
        ) from None
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, _BrokenArchive) as error:
        raise InputError(f"file {str(file)!r} is a broken {file.suffix} archive after line {number}: {error}") from None
    except OSError as error:
        raise InputError(f"file {str(file)!r} cannot be read: {error.strerror or error}") from None
    if pending_bytes:
        yield number + 1, b"".join(pending).removesuffix(b"\r")


class _BrokenArchive(Exception):
    """A damaged zstandard stream."""


class _Source(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


class _WatchedFile:
    """File wrapper that reports the number of bytes read, with the methods that gzip and lzma use."""

    def __init__(self, file: BinaryIO, watch: Watch) -> None:
        self.file = file
        self.watch = watch

    def read(self, size: int = -1) -> bytes:
        data: bytes = self.file.read(size)
        self.watch(len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _chunks(file: Path, watch: Watch | None) -> Iterator[bytes]:
    """Yield the decompressed content of a file in chunks; a truncated archive raises EOFError."""
    check_file(file)
    with file.open("rb") as source:
        raw: Any = _WatchedFile(source, watch) if watch else source
        if file.suffix.lower() == ".zst":
            yield from _zstandard_chunks(raw)
            return
        opened: _Source = raw
        if file.suffix.lower() == ".gz":
            opened = gzip.GzipFile(fileobj=raw)
        elif file.suffix.lower() == ".xz":
            opened = lzma.LZMAFile(raw)  # noqa: SIM115 (closing the source is enough)
        while chunk := opened.read(READ_BYTES):
            yield chunk


def _zstandard_chunks(source: _Source) -> Iterator[bytes]:
    """Decompress the frames of a zstandard file; the library's own reader does not report a truncated last frame."""
    import zstandard

    decompressor = None
    try:
        # a block of 4 bytes may become 128 KB, so 1 KB at a time bounds a chunk to 32 MB
        while data := source.read(1 << 10):
            while data:
                if decompressor is None:
                    decompressor = zstandard.ZstdDecompressor().decompressobj()
                if chunk := decompressor.decompress(data):
                    yield chunk
                data = b""
                if decompressor.eof:
                    data, decompressor = decompressor.unused_data, None
    except zstandard.ZstdError as error:
        raise _BrokenArchive(error) from None
    if decompressor is not None:
        raise EOFError
