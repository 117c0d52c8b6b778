"""Candidates of many passages, kept on disk shard by shard, so that an interrupted run goes on where it was."""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertsmith.shrinking.augmentation.masked_words import MaskedWords
from bertsmith.shrinking.augmentation.words import Passage

Watch = Callable[[int, int], None]
"""Called with how many words have their candidates, of how many."""

_SIZE = 1 << 16  # characters times words: some thirty thousand tokens that the model reads


@dataclass(frozen=True)
class Processes:
    """Which of several processes this one is; they share the shards, and the folder that these are kept in."""

    rank: int = 0
    count: int = 1
    wait: Callable[[], None] = lambda: None
    """Returns when every process has called it."""


def passage_candidates(
    passages: Sequence[Passage],
    masked_words: MaskedWords,
    folder: Path | None = None,
    watch: Watch | None = None,
    processes: Processes | None = None,
) -> dict[Passage, np.ndarray]:
    """The candidates of every passage, those of equal passages worked out once.

    With a folder each shard is on disk before the next one begins, and what is there already is not worked out again.
    What stands in a shard does not depend on where a run was interrupted: which passages the model reads together is
    the same, and so is every rounding.
    Shape: (places of the passage, candidates) each.
    """
    processes = processes or Processes()
    shards = list(_shards([passage for passage in dict.fromkeys(passages) if passage.places]))
    own = range(processes.rank, len(shards), processes.count)
    total, done = sum(len(passage.places) for number in own for passage in shards[number]), 0

    def count(words: int) -> None:
        nonlocal done
        done += words
        if watch is not None:
            watch(done, total)

    made = {number: _candidates(shards[number], number, masked_words, folder, count) for number in own}
    processes.wait()
    found: dict[Passage, np.ndarray] = {}
    for number, shard in enumerate(shards):
        ids = made[number] if number in made else _candidates(shard, number, masked_words, folder, lambda words: None)
        ends = np.cumsum([len(passage.places) for passage in shard])
        found |= zip(shard, np.split(ids, ends[:-1]), strict=True)
    return found


def _candidates(
    shard: Sequence[Passage], number: int, masked_words: MaskedWords, folder: Path | None, count: Callable[[int], None]
) -> np.ndarray:
    """Those of all places of a shard, read if they are there and else worked out and written."""
    if folder is None:
        return masked_words.candidates(shard, count)
    file, key = folder / f"candidates-{number:05}.npz", _key(masked_words, shard)
    ids = _read(file, key)
    if ids is None:
        ids = masked_words.candidates(shard, count)
        _write(file, key, ids)
    else:
        count(len(ids))
    return ids


def _shards(passages: Sequence[Passage]) -> Iterator[Sequence[Passage]]:
    begin = size = 0
    for place, passage in enumerate(passages):
        size += len(passage.places) * len(passage.text)
        if size >= _SIZE:
            yield passages[begin : place + 1]
            begin, size = place + 1, 0
    if begin < len(passages):
        yield passages[begin:]


def _key(masked_words: MaskedWords, shard: Sequence[Passage]) -> str:
    content = json.dumps([masked_words.key, [[passage.text, passage.places] for passage in shard]])
    return hashlib.sha256(content.encode()).hexdigest()


def _read(file: Path, key: str) -> np.ndarray | None:
    """The candidates in a shard; None where there is none, or one of something else."""
    try:
        with np.load(file) as kept:
            ids: np.ndarray = kept["ids"]
            return ids if str(kept["key"]) == key else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(file: Path, key: str, ids: np.ndarray) -> None:
    """A shard, on disk whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("wb") as stream:
        np.savez(stream, ids=ids, key=np.array(key))
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
