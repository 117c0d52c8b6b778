"""One block of documents to one shard per part, in this process or in a fresh one that serves blocks over pipes."""

import hashlib
import os
import pickle
import struct
import sys
from pathlib import Path
from typing import IO, Any, NamedTuple, TypedDict

import numpy as np

from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.word_cache import WordCache

# characters encoded at once: words in use stay in the processor's cache, and the library's records never pile up
_ENCODED_AT_ONCE = 100_000


class DocumentBlock(NamedTuple):
    """A run of whole documents of the corpus: their UTF-8 bytes, where each ends, and which are held out."""

    number: int
    text: bytes
    ends: list[int]
    is_held_out: list[bool]
    decides: bool
    """Whether this first block makes sure that the first document trains and another one is held out."""


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
"""The shard of each part of a block; None for a part without documents."""


class CorpusJob(NamedTuple):
    """What a worker needs to know before its first block."""

    tokenizer_json: str
    folder: Path
    dtype: str


class Worker:
    """Blocks to finished shard files; returns what the journal says about them."""

    def __init__(self, job: CorpusJob) -> None:
        self.folder = job.folder
        self.parent = os.getppid()
        self.dtype = np.dtype(job.dtype).newbyteorder("<")
        self.cache = WordCache(Tokenizer.from_json(job.tokenizer_json))

    def build(self, block: DocumentBlock) -> BlockRecords:
        """The record of each part's shard, or nothing for a part without documents; the files are safe on disk."""
        tokens, lengths, sentence_ends, document_sentences = self._tokenised(block)
        is_held_out = np.array(block.is_held_out, dtype=bool)
        is_kept = lengths > 0
        if block.decides:
            kept = np.flatnonzero(is_kept)
            is_held_out[kept[:1]] = False
            is_held_out[kept[1:2]] = True
        sizes = np.diff(np.array([0, *block.ends], dtype=np.int64))
        records: BlockRecords = {}
        for split, chosen in (("train", is_kept & ~is_held_out), ("held_out", is_kept & is_held_out)):
            records[split] = None
            if chosen.any():
                name = f"{split}-{block.number:06d}.shard"
                arrays = _chosen(tokens, lengths, sentence_ends, document_sentences, chosen)
                records[split] = self._write(name, arrays, int(sizes[chosen].sum()))
        return records

    def _tokenised(self, block: DocumentBlock) -> tuple[np.ndarray, ...]:
        """The tokens of a block, tokens per document, tokens per sentence and sentences per document."""
        tokens: list[np.ndarray] = []
        sentence_lengths: list[np.ndarray] = []
        document_sentences: list[int] = []
        waiting: list[str] = []
        characters = 0
        start = 0
        for end in block.ends:
            sentences = split_sentences(block.text[start:end].decode())
            waiting += sentences
            document_sentences.append(len(sentences))
            characters += end - start
            start = end
            if characters >= _ENCODED_AT_ONCE or end == len(block.text):
                for first, last in _groups(waiting):
                    encoded, counts = self.cache.encode(waiting[first:last])
                    tokens.append(encoded.astype(self.dtype))
                    sentence_lengths.append(counts)
                waiting, characters = [], 0
        lengths = np.concatenate([np.zeros(0, np.int64), *sentence_lengths])
        owners = np.repeat(np.arange(len(document_sentences)), document_sentences)
        # a sentence of nothing but signs the tokenizer drops has no tokens; it is left out
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
        if os.getppid() != self.parent:
            # the build was killed meanwhile; the folder may belong to another one by now
            temporary.unlink()
            raise EOFError
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
    """Runs of sentences that are encoded together; one document may hold far more than fits at once."""
    groups, first, characters = [], 0, 0
    for index, sentence in enumerate(sentences):
        characters += len(sentence)
        if characters >= _ENCODED_AT_ONCE:
            groups.append((first, index + 1))
            first, characters = index + 1, 0
    if first < len(sentences):
        groups.append((first, len(sentences)))
    return groups


def _chosen(
    tokens: np.ndarray,
    lengths: np.ndarray,
    sentence_lengths: np.ndarray,
    document_sentences: np.ndarray,
    chosen: np.ndarray,
) -> list[np.ndarray]:
    """The four arrays of a shard that holds only the chosen documents."""
    picked_sentences = sentence_lengths[np.repeat(chosen, document_sentences)]
    picked_tokens = tokens[np.repeat(chosen, lengths)]
    return [
        _offsets(lengths[chosen]),
        _offsets(document_sentences[chosen]),
        _offsets(picked_sentences),
        picked_tokens,
    ]


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype("<i8")


def peak_memory_mb() -> float:
    """The most memory this process has held, in MB."""
    try:
        # not getrusage: a new process inherits the peak of the one that started it there
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def send(stream: IO[bytes], message: Any) -> None:
    """Nothing; the message is on its way."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(struct.pack("<Q", len(content)))
    stream.write(content)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message; EOFError when the other side is gone."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return pickle.loads(content)


def serve() -> None:
    """Nothing, after serving blocks from standard input until it closes; so a killed parent leaves no orphans."""
    blocks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing printed by a library may end up among the answers
    try:
        worker = Worker(receive(blocks))
        while True:
            try:
                answer: Any = worker.build(receive(blocks))
            except (EOFError, KeyboardInterrupt):
                raise
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            send(answers, (answer, peak_memory_mb()))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        # straight out: flushing the pipe of a dead parent would only fail again
        os._exit(0)
