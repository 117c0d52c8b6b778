"""A tokenised corpus read from disk: flat token shards with document and sentence offsets, memory-mapped.

One shard is one file of little-endian numbers without a header; the manifest holds the counts. In this order:

    document_offsets   int64 (documents + 1)   where each document begins among the tokens; last: tokens
    document_sentences int64 (documents + 1)   where each document begins among the sentences; last: sentences
    sentence_offsets   int64 (sentences + 1)   where each sentence begins among the tokens; last: tokens
    tokens             uint16 or uint32 (tokens)
"""

import hashlib
import json
from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bertsmith.errors import InputError
from bertsmith.settings import Record

FORMAT = 2
MANIFEST = "manifest.json"
JOURNAL = "journal.jsonl"

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")

# each open memory map holds a file descriptor, of which a process has about a thousand
_SHARDS_OPEN = 256


class Source(Record):
    """One file the corpus was made from."""

    name: str
    bytes: int


class Shard(Record):
    """One file of a part."""

    file: str
    documents: int
    sentences: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the text the tokens came from."""
    bytes: int
    sha256: str


class Counts(Record):
    """The sums over all shards of a part."""

    documents: int
    sentences: int
    tokens: int
    text_bytes: int


class Manifest(Record):
    """What a finished corpus folder holds; written last, so a folder that has it is whole."""

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
    """The narrowest type that holds every id of a vocabulary."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a finished corpus folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"corpus folder {str(folder)!r} does not exist; make one with `bertsmith corpus`")
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / JOURNAL).is_file():
            raise InputError(
                f"corpus folder {str(folder)!r} is half-built; run the same `bertsmith corpus` again to finish it"
            )
        raise InputError(f"folder {str(folder)!r} holds no corpus: {MANIFEST} is missing")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"corpus manifest {str(path)!r} is not valid JSON: {error}") from None
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise InputError(
            f"corpus manifest {str(path)!r} has format {version!r}; this version reads format {FORMAT}: "
            "build the corpus again with `bertsmith corpus`"
        )
    return Manifest.parse(data, str(path))


class _Open(NamedTuple):
    """The arrays of one shard, all views of its memory map."""

    document_offsets: np.ndarray
    document_sentences: np.ndarray
    sentence_offsets: np.ndarray
    tokens: np.ndarray


class TokenCorpus:
    """Random access to the documents of one part of a corpus; nothing is read before it is asked for.

    Pickles as its folder and part, so that loader processes open their own memory maps.
    """

    def __init__(self, folder: str | Path, split: Split = "train") -> None:
        if split not in SPLITS:
            raise InputError(f"part is {split!r}; allowed: {', '.join(SPLITS)}")
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
        # first document of each shard, and the end; a list, because bisect on it is faster than on an array
        ends = np.cumsum([shard.documents for shard in self._shards]).tolist()
        self._firsts: list[int] = [0, *ends]
        self._opened: dict[int, _Open] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.split)

    def __len__(self) -> int:
        return self.documents

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each document.

        Shape: (documents,), int64
        """
        return np.concatenate([np.diff(self._open(index).document_offsets) for index in range(len(self._shards))])

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """The tokens of a document from `start` up to `stop`, a view of the file.

        Shape: (stop - start,), uint16 or uint32
        """
        index = bisect_right(self._firsts, document) - 1
        shard = self._opened.get(index) or self._open(index, document)
        offset = shard.document_offsets.item(document - self._firsts[index])
        return shard.tokens[offset + start : offset + stop]

    def sentence_starts(self, document: int) -> np.ndarray:
        """Where each sentence of a document begins inside it; first 0, last the document's length.

        Shape: (sentences + 1,), int64
        """
        index = bisect_right(self._firsts, document) - 1
        shard = self._opened.get(index) or self._open(index, document)
        position = document - self._firsts[index]
        first = shard.document_sentences.item(position)
        last = shard.document_sentences.item(position + 1)
        # the last offset taken is where the next document begins
        return shard.sentence_offsets[first : last + 1] - shard.document_offsets.item(position)

    def verify(self) -> None:
        """Nothing, after reading every shard and comparing its checksum; raises InputError on the first damaged one."""
        for shard in self._shards:
            with (self.folder / shard.file).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                raise InputError(f"shard {str(self.folder / shard.file)!r} is damaged: its checksum differs")

    def _check_size(self, shard: Shard) -> None:
        path = self.folder / shard.file
        if not path.is_file():
            raise InputError(f"shard {str(path)!r} is missing; build the corpus again")
        width = np.dtype(self.manifest.dtype).itemsize
        counted = 8 * (2 * (shard.documents + 1) + shard.sentences + 1) + width * shard.tokens
        size = path.stat().st_size
        if not size == shard.bytes == counted:
            raise InputError(f"shard {str(path)!r} has {size} bytes instead of {counted}; build the corpus again")

    def _open(self, index: int, document: int = 0) -> _Open:
        """The arrays of a shard, opened unless they are already."""
        if not 0 <= index < len(self._shards):
            raise IndexError(f"document {document} is outside 0..{self.documents - 1}")
        if index in self._opened:
            return self._opened[index]
        if len(self._opened) >= _SHARDS_OPEN:
            # the oldest goes; arrays already handed out keep their map alive
            del self._opened[next(iter(self._opened))]
        shard = self._shards[index]
        # plain arrays over the map: slicing np.memmap itself is several times slower
        whole = np.asarray(np.memmap(self.folder / shard.file, dtype=np.uint8, mode="r"))
        sizes = np.array([shard.documents + 1, shard.documents + 1, shard.sentences + 1]) * 8
        documents, document_sentences, sentences, tokens = np.split(whole, np.cumsum(sizes))
        opened = _Open(
            documents.view("<i8"),
            document_sentences.view("<i8"),
            sentences.view("<i8"),
            tokens.view(np.dtype(self.manifest.dtype).newbyteorder("<")),
        )
        self._opened[index] = opened
        return opened


def unigram_level(train: TokenCorpus, held_out: TokenCorpus, *, most_tokens: int = 50_000_000) -> float:
    """The loss, in nats a token, of guessing held-out tokens by their frequency in the training part."""
    seen = _counts(train, most_tokens)
    wanted = _counts(held_out, most_tokens)
    shares = (seen + 1) / (seen.sum() + len(seen))  # add-one: a piece never seen must not cost infinity
    return float(-(wanted * np.log(shares)).sum() / wanted.sum())


def _counts(corpus: TokenCorpus, most_tokens: int) -> np.ndarray:
    counts = np.zeros(corpus.vocabulary, dtype=np.int64)
    read, texts = 0, []
    for document, length in enumerate(corpus.lengths.tolist()):
        if read >= most_tokens:
            break
        texts.append(corpus.read(document, 0, length))
        read += length
        # many documents at a time: one count touches the whole vocabulary
        if len(texts) == 1000:
            counts += np.bincount(np.concatenate(texts), minlength=corpus.vocabulary)
            texts = []
    return counts + (np.bincount(np.concatenate(texts), minlength=corpus.vocabulary) if texts else 0)
