"""Tokenise blocks of documents into one shard per split, in this process or in a worker."""

import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from bertsmith.data.parent import has_lost_parent
from bertsmith.errors import InputError
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.word_cache import WordCache

# keeps words in the CPU cache and bounds the memory of the tokenizer library's results
_CHARACTERS_PER_CALL = 100_000


class DocumentBlock(NamedTuple):
    """Consecutive whole documents: their UTF-8 bytes, the end offset of each, and which are held out."""

    number: int
    text: bytes
    ends: list[int]
    is_held_out: list[bool]
    decides: bool
    """Whether this (first) block puts its first document into train and its second into held_out."""


class ShardRecord(TypedDict):
    """A shard file as the journal and the manifest list it."""

    file: str
    documents: int
    sentences: int
    tokens: int
    bytes: int
    sha256: str
    text_bytes: int


BlockRecords = dict[str, ShardRecord | None]
"""The shard of each split of a block; None for a split without documents."""


class CorpusJob(NamedTuple):
    """Settings that a worker receives before its first block."""

    tokenizer_json: str
    folder: Path
    dtype: str


class BlockResult(NamedTuple):
    """Shard records and size of one finished block."""

    records: BlockRecords
    text_bytes: int
    documents: int
    process: tuple[str, int]
    """Machine and process that built it."""
    peak_memory_mb: float
    """Peak memory of this process so far."""


class BlockBuilder:
    """Tokenises blocks into shard files and returns their records for the journal."""

    def __init__(self, job: CorpusJob) -> None:
        self.folder = job.folder
        self.dtype = np.dtype(job.dtype).newbyteorder("<")
        self.cache = WordCache(Tokenizer.from_json(job.tokenizer_json))

    def __call__(self, block: DocumentBlock) -> BlockResult:
        try:
            records = self._build(block)
        except Exception as error:
            raise InputError(
                f"block {block.number} could not be tokenised: {type(error).__name__}: {error}; fix the cause and run "
                "the same command again"
            ) from error
        return BlockResult(records, len(block.text), len(block.ends), this_process(), peak_memory_mb())

    def _build(self, block: DocumentBlock) -> BlockRecords:
        """Write one shard per split, synced to disk, and return their records; None for a split without documents."""
        tokens, lengths, sentence_lengths, document_sentences = self._tokenise(block)
        is_held_out = np.array(block.is_held_out, dtype=bool)
        has_tokens = lengths > 0
        if block.decides:
            nonempty = np.flatnonzero(has_tokens)
            is_held_out[nonempty[:1]] = False
            is_held_out[nonempty[1:2]] = True
        sizes = np.diff(np.array([0, *block.ends], dtype=np.int64))
        records: BlockRecords = {}
        for split, is_selected in (("train", has_tokens & ~is_held_out), ("held_out", has_tokens & is_held_out)):
            records[split] = None
            if is_selected.any():
                name = f"{split}-{block.number:06d}.shard"
                arrays = _select_documents(tokens, lengths, sentence_lengths, document_sentences, is_selected)
                records[split] = self._write(name, arrays, int(sizes[is_selected].sum()))
        return records

    def _tokenise(self, block: DocumentBlock) -> tuple[np.ndarray, ...]:
        """Return the tokens of a block, tokens per document, tokens per sentence and sentences per document."""
        tokens: list[np.ndarray] = []
        sentence_lengths: list[np.ndarray] = []
        document_sentences: list[int] = []
        pending: list[str] = []
        characters = 0
        start = 0
        for end in block.ends:
            sentences = split_sentences(block.text[start:end].decode())
            pending += sentences
            document_sentences.append(len(sentences))
            characters += end - start
            start = end
            if characters >= _CHARACTERS_PER_CALL or end == len(block.text):
                for first, last in _groups(pending):
                    encoded, counts = self.cache.encode(pending[first:last])
                    tokens.append(encoded.astype(self.dtype))
                    sentence_lengths.append(counts)
                pending, characters = [], 0
        lengths = np.concatenate([np.zeros(0, np.int64), *sentence_lengths])
        owners = np.repeat(np.arange(len(document_sentences)), document_sentences)
        # drop sentences without tokens, such as characters that the tokenizer removes
        owners, lengths = owners[lengths > 0], lengths[lengths > 0]
        per_document = np.bincount(owners, minlength=len(document_sentences))
        document_lengths = np.bincount(owners, weights=lengths, minlength=len(document_sentences)).astype(np.int64)
        return np.concatenate([np.zeros(0, self.dtype), *tokens]), document_lengths, lengths, per_document

    def _write(self, name: str, arrays: list[np.ndarray], text_bytes: int) -> ShardRecord:
        document_offsets, _, sentence_offsets, tokens = arrays
        temporary = self.folder / f".{name}.{os.getpid()}"
        checksum = hashlib.sha256()
        with temporary.open("wb") as file:
            for array in arrays:
                content = np.ascontiguousarray(array).data
                file.write(content)
                checksum.update(content)
            file.flush()
            os.fsync(file.fileno())
        if has_lost_parent():
            # the build was killed meanwhile; another build may own the folder by now
            temporary.unlink()
            os._exit(1)
        temporary.replace(self.folder / name)
        return {
            "file": name,
            "documents": len(document_offsets) - 1,
            "sentences": len(sentence_offsets) - 1,
            "tokens": len(tokens),
            "bytes": (self.folder / name).stat().st_size,
            "sha256": checksum.hexdigest(),
            "text_bytes": text_bytes,
        }


def _groups(sentences: list[str]) -> list[tuple[int, int]]:
    """Return ranges of sentences to encode together; a single document may exceed the limit of one call."""
    groups, first, characters = [], 0, 0
    for index, sentence in enumerate(sentences):
        characters += len(sentence)
        if characters >= _CHARACTERS_PER_CALL:
            groups.append((first, index + 1))
            first, characters = index + 1, 0
    if first < len(sentences):
        groups.append((first, len(sentences)))
    return groups


def _select_documents(
    tokens: np.ndarray,
    lengths: np.ndarray,
    sentence_lengths: np.ndarray,
    document_sentences: np.ndarray,
    is_selected: np.ndarray,
) -> list[np.ndarray]:
    """Return the four arrays of a shard with the selected documents."""
    picked_sentences = sentence_lengths[np.repeat(is_selected, document_sentences)]
    picked_tokens = tokens[np.repeat(is_selected, lengths)]
    return [
        _offsets(lengths[is_selected]),
        _offsets(document_sentences[is_selected]),
        _offsets(picked_sentences),
        picked_tokens,
    ]


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype("<i8")


def this_process() -> tuple[str, int]:
    """Return the name of this machine and the id of this process."""
    return platform.node(), os.getpid()


def peak_memory_mb() -> float:
    """Return the peak memory of this process in MB."""
    try:
        # not getrusage: a new process inherits its parent's peak there
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024
