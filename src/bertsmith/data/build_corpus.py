"""Build a folder of token shards from text files: parallel, resumable, the same result for any number of workers.

    split the stream of documents into blocks -> a worker writes one shard per split for each block
    -> one journal line per finished block -> the manifest, last

The same call resumes a killed build: it reads the stream again and skips blocks that are in the journal.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from bertsmith.data.corpus_worker import (
    BlockBuilder,
    BlockRecords,
    BlockResult,
    CorpusJob,
    DocumentBlock,
    ShardRecord,
    peak_memory_mb,
    this_process,
)
from bertsmith.data.executor import LostWorker, open_executor
from bertsmith.data.shards import (
    JOURNAL,
    MANIFEST,
    SPLITS,
    Counts,
    Manifest,
    Shard,
    Source,
    read_manifest,
    token_dtype,
)
from bertsmith.errors import InputError
from bertsmith.files import check_file, hash_file, write_text
from bertsmith.text.readers import read_documents
from bertsmith.text.tokenizer import Tokenizer


class SourceFile(TypedDict):
    """A text file of a corpus."""

    name: str
    bytes: int
    sha256: str


class CorpusSettings(TypedDict):
    """Everything that a corpus depends on; resuming a build requires the same settings."""

    tokenizer_hash: str
    vocabulary: int
    dtype: Literal["uint16", "uint32"]
    field: str
    seed: int
    held_out: float
    shard_megabytes: float
    sources: list[SourceFile]


class BuildProgress(NamedTuple):
    """Progress of a build."""

    source_bytes_read: int
    source_bytes: int
    text_bytes: int
    """UTF-8 bytes of the blocks finished in this call."""
    documents: int
    peak_memory_mb: float
    """Sum over all processes."""


def build_corpus(
    files: list[Path],
    tokenizer: Tokenizer,
    out: Path,
    *,
    field: str = "text",
    held_out: float = 0.005,
    seed: int = 0,
    workers: int = 2,
    shard_megabytes: float = 32,
    ray: str | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
) -> Manifest:
    """Build or resume a corpus in `out` and return its manifest; a finished build of the same corpus is kept.

    `ray` is the address of a Ray cluster whose workers tokenise; the corpus is the same.
    Whole documents are held out: the fraction `held_out`, selected by the seed, and at least one of two or more.
    """
    check_held_out(held_out)
    if workers < 1:
        raise InputError(f"workers is {workers}; it must be at least 1")
    if shard_megabytes <= 0:
        raise InputError(f"shard_megabytes is {shard_megabytes}; it must be above 0")
    if not files:
        raise InputError("data lists no file; give text files or folders that contain them")
    settings: CorpusSettings = {
        "tokenizer_hash": tokenizer.hash,
        "vocabulary": tokenizer.size,
        "dtype": token_dtype(tokenizer.size),
        "field": field,
        "seed": seed,
        "held_out": float(held_out),
        "shard_megabytes": float(shard_megabytes),
        "sources": [{"name": file.name, "bytes": file.stat().st_size, "sha256": hash_file(file)} for file in files],
    }
    out = Path(out)
    if (out / MANIFEST).is_file():
        manifest = read_manifest(out)
        _check_same_settings(settings, manifest.plain(), out)
        _remove_leftovers(out)
        return manifest
    out.mkdir(parents=True, exist_ok=True)
    with _Journal(out, settings) as journal:
        tokenizer.save(out)
        job = CorpusJob((out / "tokenizer.json").read_text(encoding="utf-8"), out, settings["dtype"])
        report = _Report(sum(source["bytes"] for source in settings["sources"]), progress)
        documents = read_documents(files, field, report.read)
        blocks = _blocks(documents, int(shard_megabytes * 1e6), held_out, seed)
        unfinished = (block for block in blocks if not journal.has(block.number))
        with open_executor(partial(BlockBuilder, job), ray=ray, processes=workers) as executor:
            try:
                for block, result in executor.results(unfinished):
                    journal.add(block.number, result.records)
                    report.finish_block(result)
            except LostWorker as error:
                raise InputError(
                    f"a tokenising worker was lost: {error}; run the same command again to continue, with fewer "
                    "workers if memory ran out"
                ) from None
        manifest = _manifest(settings, journal.blocks, files)
    write_text(out / MANIFEST, json.dumps(manifest.plain(), indent=1) + "\n")
    _remove_leftovers(out)
    return manifest


def _remove_leftovers(folder: Path) -> None:
    """Remove what a finished corpus does not need: the journal, and half-written shards of killed workers."""
    for path in (folder / JOURNAL, *folder.glob(".*.shard.*")):
        path.unlink(missing_ok=True)


def check_held_out(held_out: float) -> None:
    """Raise InputError if this is not a valid fraction of documents."""
    if not 0 <= held_out < 1:
        raise InputError(f"held_out is {held_out}; it must be at least 0 and below 1")


def _blocks(documents: Iterator[str], limit: int, held_out: float, seed: int) -> Iterator[DocumentBlock]:
    """Yield blocks of about `limit` bytes; their boundaries depend on the stream of documents only."""
    text = bytearray()
    ends: list[int] = []
    is_held_out: list[bool] = []
    index = 0
    for number, document in enumerate(documents):
        # the first block has at least two documents, because it ensures one in each split
        if len(text) >= limit and (index > 0 or len(ends) > 1):
            yield DocumentBlock(index, bytes(text), ends, is_held_out, index == 0 and held_out > 0)
            text, ends, is_held_out = bytearray(), [], []
            index += 1
        text += document.encode()
        ends.append(len(text))
        is_held_out.append(_hash_uniform(seed, number) < held_out)
    if ends:
        yield DocumentBlock(index, bytes(text), ends, is_held_out, index == 0 and held_out > 0)


def _hash_uniform(seed: int, number: int) -> float:
    """Return a number in [0, 1) that depends only on the seed and the index of the document."""
    digest = blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    value: int = struct.unpack("<Q", digest)[0]
    return value / 2**64


class _Journal:
    """Journal of finished blocks: a line with the settings, then one line per block; deleted after the manifest."""

    def __init__(self, folder: Path, settings: CorpusSettings) -> None:
        self.folder = folder
        self.path = folder / JOURNAL
        self.blocks: dict[int, BlockRecords] = {}
        if self.path.is_file():
            self._read(settings)
        elif any(not name.startswith(".") for name in os.listdir(folder)):
            raise InputError(
                f"folder {str(folder)!r} is not empty and contains no unfinished corpus; give an empty folder"
            )
        # rewrite it without the incomplete last line of a killed run
        lines = [json.dumps(settings), *(_journal_line(index, self.blocks[index]) for index in sorted(self.blocks))]
        write_text(self.path, "".join(line + "\n" for line in lines))

    def __enter__(self) -> "_Journal":
        self.file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def _read(self, settings: CorpusSettings) -> None:
        check_file(self.path)
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        recorded = _parse_object(lines[0])
        if recorded is None:
            raise InputError(f"journal {str(self.path)!r} is damaged; start again in an empty folder")
        _check_same_settings(settings, recorded, self.folder)
        for line in lines[1:-1]:  # the last line is empty or incomplete
            entry = _parse_object(line) or {}
            index: Any = entry.get("block")
            records: BlockRecords = {split: entry.get(split) for split in SPLITS}
            # blocks with a damaged line, and with missing or changed shards, are built again
            if line == _journal_line(index, records) and all(map(self._is_whole, records.values())):
                self.blocks[index] = records

    def _is_whole(self, record: ShardRecord | None) -> bool:
        if record is None:
            return True
        file = self.folder / Path(record["file"]).name
        return file.is_file() and hash_file(file) == record["sha256"]

    def has(self, index: int) -> bool:
        return index in self.blocks

    def add(self, index: int, records: BlockRecords) -> None:
        self.blocks[index] = records
        self.file.write(_journal_line(index, records) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def _journal_line(index: Any, records: Mapping[str, Any]) -> str:
    """Return the line of a finished block with a checksum of itself."""
    entry = {"block": index, **records}
    return json.dumps({**entry, "check": blake2b(json.dumps(entry).encode(), digest_size=8).hexdigest()})


def _parse_object(line: str) -> dict[str, Any] | None:
    """Return the object in a line of the journal; None if the line is damaged."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


class _Report:
    """Counts progress and reports it to the caller."""

    def __init__(self, source_bytes: int, progress: Callable[[BuildProgress], None] | None) -> None:
        self.state = BuildProgress(0, source_bytes, 0, 0, 0.0)
        self.progress = progress
        self.workers: dict[tuple[str, int], float] = {}
        """Peak memory of every process except this one."""

    def read(self, count: int) -> None:
        self._update(source_bytes_read=min(self.state.source_bytes_read + count, self.state.source_bytes))

    def finish_block(self, result: BlockResult) -> None:
        if result.process != this_process():
            self.workers[result.process] = result.peak_memory_mb
        self._update(
            text_bytes=self.state.text_bytes + result.text_bytes,
            documents=self.state.documents + result.documents,
            peak_memory_mb=peak_memory_mb() + sum(self.workers.values()),
        )

    def _update(self, **changes: Any) -> None:
        self.state = self.state._replace(**changes)
        if self.progress:
            self.progress(self.state)


def _check_same_settings(settings: CorpusSettings, recorded: Mapping[str, object], folder: Path) -> None:
    for name, value in settings.items():
        if recorded.get(name) != value:
            what = "other files or a changed file" if name == "sources" else f"another {name}"
            raise InputError(
                f"folder {str(folder)!r} contains a corpus of {what} ({_short(recorded.get(name))} there, "
                f"{_short(value)} here); give the same settings to continue it, or --force to start again"
            )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _manifest(settings: CorpusSettings, blocks: dict[int, BlockRecords], files: list[Path]) -> Manifest:
    records = {split: [blocks[index][split] for index in sorted(blocks)] for split in SPLITS}
    shards = {split: tuple(Shard(**record) for record in own if record is not None) for split, own in records.items()}
    if not shards["train"]:
        raise InputError(f"data contains no text: there are no tokens in {', '.join(str(file) for file in files[:3])}")
    splits = {
        split: Counts(**{name: sum(getattr(shard, name) for shard in held) for name in Counts.model_fields})
        for split, held in shards.items()
    }
    sources = tuple(Source(**source) for source in settings["sources"])
    return Manifest(**{**settings, "sources": sources}, splits=splits, shards=shards)  # type: ignore[arg-type]
