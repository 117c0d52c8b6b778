"""Read a tokenised corpus: token shards with document and sentence offsets.

A shard is a file of little-endian integers without a header; the manifest has the counts. It contains, in order:

    document_offsets   int64 (documents + 1)   index of each document's first token; last: tokens
    document_sentences int64 (documents + 1)   index of each document's first sentence; last: sentences
    sentence_offsets   int64 (sentences + 1)   index of each sentence's first token; last: tokens
    tokens             uint16 or uint32 (tokens)

Shards are read at a position (pread) instead of being memory-mapped: a file that is cut or fails while it is mapped
ends the process by SIGBUS.
"""

import os
import weakref
from bisect import bisect_right
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from bertsmith.errors import InputError
from bertsmith.files import hash_file, read_json
from bertsmith.settings import Record

FORMAT = 2
MANIFEST = "manifest.json"
JOURNAL = "journal.jsonl"

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")

# of about a thousand file descriptors that a process has
_MAX_OPEN_SHARDS = 256
_CHECKED_TOKENS = 1 << 20  # at a time, to bound the memory


class Source(Record):
    """One source file of the corpus."""

    name: str
    bytes: int
    sha256: str | None = None
    """None in corpora of earlier versions."""


class Shard(Record):
    """One file of a split."""

    file: str
    documents: int = Field(ge=0)
    sentences: int = Field(ge=0)
    tokens: int = Field(ge=0)
    text_bytes: int
    """UTF-8 bytes of the tokenised text."""
    bytes: int
    sha256: str


class Counts(Record):
    """Sums over all shards of a split."""

    documents: int
    sentences: int
    tokens: int
    text_bytes: int


class Manifest(Record):
    """Settings, counts and shards of a corpus; written last, so a folder with a manifest is complete."""

    format: int = FORMAT
    tokenizer_hash: str
    vocabulary: int
    dtype: Literal["uint16", "uint32"]
    field: str
    seed: int
    held_out: float
    shard_megabytes: float
    sources: tuple[Source, ...]
    splits: dict[Split, Counts]
    shards: dict[Split, tuple[Shard, ...]]


def token_dtype(vocabulary: int) -> Literal["uint16", "uint32"]:
    """Return the narrowest type for the ids of a vocabulary."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a finished corpus folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"corpus folder {str(folder)!r} does not exist; make one with `bertsmith corpus`")
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / JOURNAL).is_file():
            raise InputError(
                f"corpus folder {str(folder)!r} is unfinished; run the same `bertsmith corpus` again to finish it"
            )
        raise InputError(f"folder {str(folder)!r} contains no corpus: {MANIFEST} is missing")
    data = read_json(path)
    version = data.get("format")
    if version != FORMAT:
        raise InputError(
            f"corpus manifest {str(path)!r} has format {version!r}; this version reads format {FORMAT}: "
            "build the corpus again with `bertsmith corpus`"
        )
    manifest = Manifest.parse(data, str(path))
    for split in SPLITS:
        if split not in manifest.shards or split not in manifest.splits:
            raise InputError(f"corpus manifest {str(path)!r} has no {split} split; build the corpus again")
        for shard in manifest.shards[split]:
            if Path(shard.file).name != shard.file:
                raise InputError(
                    f"corpus manifest {str(path)!r} names {shard.file!r}; allowed: a file in the same folder"
                )
    return manifest


class _OpenShard:
    """An open shard file, with the document offsets in memory.

    Reads raise InputError where the file has ended.
    """

    def __init__(self, path: Path, shard: Shard, dtype: np.dtype[Any]) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._dtype, self._width = dtype, dtype.itemsize
        self._document_sentences = 8 * (shard.documents + 1)
        self._sentence_offsets = 2 * self._document_sentences
        self._tokens = self._sentence_offsets + 8 * (shard.sentences + 1)
        self.document_offsets = np.frombuffer(self._read(0, self._document_sentences), "<i8")

    def document_sentences(self, first: int, count: int) -> np.ndarray:
        return np.frombuffer(self._read(self._document_sentences + 8 * first, 8 * count), "<i8")

    def sentence_offsets(self, first: int, count: int) -> np.ndarray:
        return np.frombuffer(self._read(self._sentence_offsets + 8 * first, 8 * count), "<i8")

    def tokens(self, first: int, count: int) -> np.ndarray:
        width = self._width
        return np.frombuffer(self._read(self._tokens + width * first, width * count), self._dtype)

    def _read(self, position: int, size: int) -> bytes:
        content = os.pread(self._file, size, position)
        return content if len(content) == size else self._read_rest(content, position, size)

    def _read_rest(self, content: bytes, position: int, size: int) -> bytes:
        """Continue a read that ended early: a single one returns at most 2 GiB."""
        while len(content) < size:
            part = os.pread(self._file, size - len(content), position + len(content))
            if not part:
                raise InputError(
                    f"shard {str(self.path)!r} was cut while it was read: it ends before byte {position + size}; "
                    "restore it, or build the corpus again"
                )
            content += part
        return content


class TokenCorpus:
    """Random access to the documents of one split of a corpus; shards are opened lazily.

    A shard is compared with its checksum when it is opened for the first time, unless `verify` is False. Pickles as its
    folder and split, so that loader processes open the shards themselves, without comparing again.
    """

    def __init__(self, folder: str | Path, split: Split = "train", *, verify: bool = True) -> None:
        if split not in SPLITS:
            raise InputError(f"split is {split!r}; allowed: {', '.join(SPLITS)}")
        self.folder = Path(folder)
        self.split: Split = split
        self.manifest = read_manifest(self.folder)
        self._shards = self.manifest.shards[split]
        counts = self.manifest.splits[split]
        self.vocabulary = self.manifest.vocabulary
        self.documents = counts.documents
        self.tokens = counts.tokens
        if not self._shards:
            raise InputError(
                f"corpus folder {str(self.folder)!r} has no {split} documents (held_out was {self.manifest.held_out})"
            )
        for shard in self._shards:
            self._check_size(shard)
        # first document of each shard, and the end; a list, because bisect is faster on it than on an array
        ends = np.cumsum([shard.documents for shard in self._shards]).tolist()
        self._firsts: list[int] = [0, *ends]
        self._opened: dict[int, _OpenShard] = {}
        self._unverified = set(range(len(self._shards))) if verify else set[int]()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), verify=False), (self.folder, self.split)

    def __len__(self) -> int:
        return self.documents

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document.

        Shape: (documents,), int64
        """
        return np.concatenate([np.diff(self._open(index).document_offsets) for index in range(len(self._shards))])

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens start:stop of a document.

        Shape: (stop - start,), uint16 or uint32
        """
        index = bisect_right(self._firsts, document) - 1
        shard = self._opened.get(index) or self._open(index, document)
        offset = shard.document_offsets.item(document - self._firsts[index])
        return shard.tokens(offset + start, stop - start)

    def sentence_starts(self, document: int) -> np.ndarray:
        """Return the offset of each sentence in a document; first 0, last the document's length.

        Shape: (sentences + 1,), int64
        """
        index = bisect_right(self._firsts, document) - 1
        shard = self._opened.get(index) or self._open(index, document)
        position = document - self._firsts[index]
        first, last = shard.document_sentences(position, 2).tolist()
        # the last offset is the start of the next document
        return shard.sentence_offsets(first, last + 1 - first) - shard.document_offsets.item(position)

    def verify(self) -> None:
        """Compare all shards with their checksums; raise InputError for the first damaged one."""
        for shard in self._shards:
            self._verify(shard)

    def _verify(self, shard: Shard) -> None:
        if hash_file(self.folder / shard.file) != shard.sha256:
            raise InputError(
                f"shard {str(self.folder / shard.file)!r} is damaged: its checksum differs; build the corpus again"
            )

    def _check_size(self, shard: Shard) -> None:
        path = self.folder / shard.file
        if not path.is_file():
            raise InputError(f"shard {str(path)!r} is missing; build the corpus again")
        width = np.dtype(self.manifest.dtype).itemsize
        expected = 8 * (2 * (shard.documents + 1) + shard.sentences + 1) + width * shard.tokens
        size = path.stat().st_size
        if not size == shard.bytes == expected:
            raise InputError(f"shard {str(path)!r} has {size} bytes instead of {expected}; build the corpus again")

    def _open(self, index: int, document: int = 0) -> _OpenShard:
        """Return a shard, opening it if necessary."""
        if not 0 <= index < len(self._shards):
            raise IndexError(f"document {document} is outside 0..{self.documents - 1}")
        if index in self._opened:
            return self._opened[index]
        if len(self._opened) >= _MAX_OPEN_SHARDS:
            # close the oldest
            del self._opened[next(iter(self._opened))]
        shard = self._shards[index]
        if index in self._unverified:
            self._verify(shard)
        opened = _OpenShard(self.folder / shard.file, shard, np.dtype(self.manifest.dtype).newbyteorder("<"))
        if index in self._unverified:
            self._check_arrays(shard, opened)
            self._unverified.discard(index)
        self._opened[index] = opened
        return opened

    def _check_arrays(self, shard: Shard, opened: _OpenShard) -> None:
        """Raise InputError if offsets or token ids are out of range, which a matching checksum does not exclude."""
        ends = (
            (opened.document_offsets, shard.tokens),
            (opened.document_sentences(0, shard.documents + 1), shard.sentences),
            (opened.sentence_offsets(0, shard.sentences + 1), shard.tokens),
        )
        for offsets, end in ends:
            if offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
                raise InputError(f"shard {str(self.folder / shard.file)!r} has invalid offsets; build the corpus again")
        for first in range(0, shard.tokens, _CHECKED_TOKENS):
            if opened.tokens(first, min(_CHECKED_TOKENS, shard.tokens - first)).max() >= self.vocabulary:
                raise InputError(
                    f"shard {str(self.folder / shard.file)!r} has token ids outside the vocabulary of "
                    f"{self.vocabulary}; build the corpus again"
                )


def unigram_level(train: TokenCorpus, held_out: TokenCorpus, *, most_tokens: int = 50_000_000) -> float:
    """Return the loss in nats per token of predicting held-out tokens by their frequency in the training split."""
    train_counts = _counts(train, most_tokens)
    held_out_counts = _counts(held_out, most_tokens)
    # add-one smoothing: an unseen token must not have infinite loss
    probabilities = (train_counts + 1) / (train_counts.sum() + len(train_counts))
    return float(-(held_out_counts * np.log(probabilities)).sum() / held_out_counts.sum())


def _counts(corpus: TokenCorpus, most_tokens: int) -> np.ndarray:
    counts = np.zeros(corpus.vocabulary, dtype=np.int64)
    read, texts = 0, []
    for document, length in enumerate(corpus.lengths.tolist()):
        if read >= most_tokens:
            break
        texts.append(corpus.read(document, 0, length))
        read += length
        # count many documents at a time: every bincount touches the whole vocabulary
        if len(texts) == 1000:
            counts += np.bincount(np.concatenate(texts), minlength=corpus.vocabulary)
            texts = []
    return counts + (np.bincount(np.concatenate(texts), minlength=corpus.vocabulary) if texts else 0)
