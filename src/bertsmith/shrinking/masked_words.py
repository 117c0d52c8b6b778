"""Replacement candidates for words, predicted by a masked language model and cached on disk in shards."""

import hashlib
import json
import os
import unicodedata
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bertsmith.answers.sequences import length_batches
from bertsmith.answers.tagging import split_words
from bertsmith.checkpoint.files import tensors_of
from bertsmith.data.batch import packed
from bertsmith.data.inference import (
    InferencePrecision,
    finish_copies,
    inference_autocast,
    is_half,
    to_device,
    to_host,
    token_budget,
)
from bertsmith.data.progress import Watch
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.settings import Record
from bertsmith.text.tokenizer import Tokenizer

CharacterSpan = tuple[int, int]

_ENGLISH = """
a an the this that these those some any each every either neither both all such no none not nor only own same other
another one
i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself we us our
ours ourselves they them their theirs themselves who whom whose which what whoever whatever
am is are was were be been being have has had having do does did doing done will would shall should can cannot could may
might must ought
and or but if because as while until unless although though than so yet whether
of at by for with without about against between among into onto through during before after above below to from up down
in out on off over under upon within along across behind beyond near since toward towards per via
again further then once here there when where why how too very just also more most much many few less least quite rather
even still ever never now
"""
ENGLISH = frozenset(_ENGLISH.split())


@dataclass(frozen=True)
class Passage:
    """A text and the character spans of its replaceable words."""

    text: str
    positions: tuple[CharacterSpan, ...]

    @classmethod
    def of(cls, value: str | Sequence[str], stop_words: Collection[str]) -> "Passage":
        """Return the passage of a text, or of a sentence given as a list of words."""
        if isinstance(value, str):
            text, positions = value, split_words(value)
        else:
            text, positions, begin = " ".join(value), [], 0
            for item in value:
                positions.append((begin, begin + len(item)))
                begin += len(item) + 1
        return cls(text, tuple(span for span in positions if _is_replaceable(text[slice(*span)], stop_words)))

    def replaced(self, words: Sequence[str | None]) -> str:
        """Return the text with new words, one per span or None to keep the word."""
        parts, end = [], 0
        for (begin, after), word in zip(self.positions, words, strict=True):
            if word is not None:
                parts += [self.text[end:begin], word]
                end = after
        return "".join([*parts, self.text[end:]])


def is_word(text: str) -> bool:
    """Whether a text is letters of a script that separates words by spaces (not Chinese, Japanese or Korean)."""
    return bool(text) and all(
        unicodedata.category(character)[0] in "LM" and unicodedata.east_asian_width(character) not in "WF"
        for character in text
    )


def _is_replaceable(word: str, stop_words: Collection[str]) -> bool:
    return is_word(word) and word.lower() not in stop_words


def match_case(word: str, example: str) -> str:
    """Return a word capitalised like an example.

    >>> match_case("oak", "Elm"), match_case("oak", "ELM"), match_case("Rome", "town"), match_case("oak", "I")
    ('Oak', 'OAK', 'Rome', 'Oak')
    """
    if len(example) > 1 and example.isupper():
        return word.upper()
    return word[0].upper() + word[1:] if example[0].isupper() else word


# (maximum rows, copies), as in TinyBERT: 30 copies of CoLA, MRPC, STS-B and RTE (up to 8,551 rows), 20 of SST-2 and
# QNLI (up to 104,743), 10 of QQP and MNLI (363,846 and more)
_COPIES = ((20_000, 30), (200_000, 20))
_MIN_COPIES = 10


class AugmentationConfig(Record):
    """Augmented rows for distillation; none unless `model` is set."""

    model: str | None = None
    """Bundled model or folder of the masked language model that replaces words; None for no augmentation."""
    copies: int | None = Field(default=None, gt=0)
    """Copies of every text of a training row, before duplicates are removed; None for 30 (up to 20,000 rows), 20 (up to
    200,000 rows) or 10."""
    share: float = Field(default=0.4, gt=0, le=1)
    """Probability that a word is replaced."""
    candidates: int = Field(default=15, gt=0)
    """Number of most probable replacements of a word; one of them is drawn uniformly."""
    stop_words: Literal["english", "none"] = "english"
    """Words that are never replaced: common English function words, or none."""
    long_words: Literal["replace", "keep"] = "replace"
    """Whether words of several tokens are replaced (one mask for the whole word) or kept."""
    precision: InferencePrecision = "auto"
    """Precision of matrix products; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    seed: int = Field(default=0, ge=0)
    """Seed of the replacements; separate from run.seed, so that runs with several seeds share the rows."""

    def copies_of(self, rows: int) -> int:
        """Return the number of copies of every text, given the number of training rows."""
        return self.copies or next((copies for max_rows, copies in _COPIES if rows <= max_rows), _MIN_COPIES)


NONE = -1  # pads the row of a word with too few candidates
_MAX_MASKS = 256  # per batch; each has logits over the whole vocabulary
_MAX_LENGTH = 512  # tokens of a sequence, even if the model takes more


@dataclass(frozen=True)
class MaskedSequence:
    """A sequence in which one word is masked.

    Shape: tokens and types (tokens,), int64.
    """

    word: int
    """Index of the word among all words."""
    tokens: np.ndarray
    types: np.ndarray
    mask: int
    """Position of the mask."""
    token: int
    """Token id of the word, or NONE if it has several tokens."""


class MaskedWords:
    """Predict the most probable replacements of words with a masked language model.

    The input is [CLS] masked text [SEP] original text [SEP], so that the model sees the word that is replaced. Long
    texts are truncated around the word in both segments.
    """

    def __init__(self, model: Model, config: AugmentationConfig) -> None:
        self.model, self.config = _masked_lm(model), config
        self.tokenizer = self.model.require_tokenizer()
        self.frame = self.tokenizer.pair_frame()
        self.mask = self.tokenizer.mask
        embedding = self.model.config.encoder.embedding
        self.has_types = embedding.types > 1
        specials = sum(len(tokens) for tokens in (self.frame.before, self.frame.between, self.frame.after))
        self.room = (min(embedding.max_length, _MAX_LENGTH) - specials) // 2
        """Maximum tokens of each of the two segments."""
        if self.room < 2:
            raise InputError(
                f"augmentation.model takes sequences of {embedding.max_length} tokens; at least {specials + 4} are "
                "needed"
            )
        self.words = _whole_words(self.tokenizer)
        """The text of every token that is a whole word, by its id."""
        if not self.words:
            raise InputError("augmentation.model has no token that is a whole word, so it cannot replace words")
        self._ids = np.array(sorted(self.words))
        self._folded = {token: word.casefold() for token, word in self.words.items()}

    @cached_property
    def key(self) -> str:
        """Hash of everything besides the passages that determines the candidates."""
        config = self.config
        settings = [self.tokenizer.hash, config.candidates, config.long_words]
        if is_half(self.model.device, config.precision):
            settings.append("bfloat16")
        digest = hashlib.sha256(" ".join(map(str, settings)).encode())
        digest.update(self.model.config.model_dump_json().encode())
        for name, tensor in sorted(tensors_of(self.model).items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @torch.inference_mode()
    def candidates(self, passages: Sequence[Passage], watch: Callable[[int], None] = lambda words: None) -> np.ndarray:
        """Return the token ids of the best replacements of every word, best first, padded with NONE.

        The word itself is excluded, and candidates that differ only in case count once. `watch` is called with the
        number of finished words.
        Shape: (words of all passages, candidates), int32.
        """
        words = [passage.text[slice(*position)] for passage in passages for position in passage.positions]
        candidates = np.full((len(words), self.config.candidates), NONE, dtype=np.int32)
        sequences = list(self._masked_sequences(passages))
        watch(len(words) - len(sequences))
        count = min(2 * self.config.candidates + 2, len(self._ids))
        with self.model.evaluating(), inference_autocast(self.model.device, self.config.precision):
            while sequences:
                incomplete = []
                for sequence, ranked in zip(sequences, self._best(sequences, count), strict=True):
                    chosen = self._distinct(sequence, words[sequence.word], ranked)
                    candidates[sequence.word, : len(chosen)] = chosen
                    if len(chosen) < self.config.candidates and count < len(self._ids):
                        incomplete.append(sequence)
                watch(len(sequences) - len(incomplete))
                # most of the best tokens were the same word: rank the whole vocabulary
                sequences, count = incomplete, len(self._ids)
        return candidates

    def _best(self, sequences: Sequence[MaskedSequence], count: int) -> list[np.ndarray]:
        """Return the indices of the `count` most probable whole words of every sequence, best first.

        On a GPU it waits once for all batches.
        """
        device, lengths = self.model.device, np.array([len(sequence.tokens) for sequence in sequences])
        batches = list(length_batches(lengths, token_budget(device), _MAX_MASKS))
        copies = [
            to_host(self._scores([sequences[index] for index in batch.tolist()]).topk(count).indices)
            for batch in batches
        ]
        finish_copies(device)
        best: list[np.ndarray] = [np.empty(0)] * len(sequences)
        for batch, ranked in zip(batches, copies, strict=True):
            for index, row in zip(batch.tolist(), ranked.numpy(), strict=True):
                best[index] = row
        return best

    def _masked_sequences(self, passages: Sequence[Passage]) -> Iterator[MaskedSequence]:
        """Yield a sequence for every word whose tokens do not reach beyond it."""
        word = 0
        for passage, (ids, offsets) in zip(
            passages, self.tokenizer.encode_offsets([passage.text for passage in passages]), strict=True
        ):
            for tokens in _own_tokens(passage, offsets):
                if len(tokens) == 1 or (len(tokens) and self.config.long_words == "replace"):
                    yield self._masked_sequence(word, ids.astype(np.int64), int(tokens[0]), int(tokens[-1]) + 1)
                word += 1

    def _masked_sequence(self, word: int, ids: np.ndarray, begin: int, end: int) -> MaskedSequence:
        """Return the sequence in which the tokens begin … end of a text are masked."""
        frame = self.frame
        masked = np.concatenate([ids[:begin], [self.mask], ids[end:]])
        first, second = _window(len(masked), begin, self.room), _window(len(ids), begin, self.room)
        parts: list[np.ndarray | list[int]] = [frame.before, masked[first], frame.between, ids[second], frame.after]
        types = [np.full(len(part), kind) for part, kind in zip(parts, frame.types, strict=True)]
        mask = len(frame.before) + begin - first.start
        token = int(ids[begin]) if end == begin + 1 else NONE
        return MaskedSequence(word, np.concatenate(parts).astype(np.int64), np.concatenate(types), mask, token)

    def _scores(self, batch: Sequence[MaskedSequence]) -> Tensor:
        """Return the logits of all whole words at the masks; Shape: (sequences, whole words)."""
        device, model = self.model.device, self.model
        tokens, layout = packed([sequence.tokens for sequence in batch], self.tokenizer.pad)
        types = to_device(packed([sequence.types for sequence in batch], 0)[0], device) if self.has_types else None
        starts = np.cumsum([0, *(len(sequence.tokens) for sequence in batch[:-1])])
        positions = to_device(torch.from_numpy(starts + [sequence.mask for sequence in batch]), device)
        inputs = EncoderInputs(to_device(tokens, device), to_device(layout, device), types)
        output = model.run(inputs, Want(masked_positions=positions))
        scores: Tensor = model.head("masked_tokens")(output.masked_states, model.token_table)
        return scores.float()[:, to_device(torch.from_numpy(self._ids), device)]

    def _distinct(self, sequence: MaskedSequence, word: str, ranked: np.ndarray) -> list[int]:
        """Return the first candidates of a ranking that differ from the word and from each other."""
        seen, chosen = {word.casefold(), self._folded.get(sequence.token)}, []
        for token in self._ids[ranked].tolist():
            if self._folded[token] not in seen:
                seen.add(self._folded[token])
                chosen.append(token)
            if len(chosen) == self.config.candidates:
                break
        return chosen


def _masked_lm(model: Model) -> Model:
    """Return the masked language model: `model` itself, or the generator it was trained with."""
    if model.tokenizer is None:
        raise InputError("augmentation.model has no tokenizer; its folder needs a tokenizer.json or a vocab.txt")
    if "masked_tokens" not in model.heads and model.generator is not None:
        model.generator.tokenizer = model.tokenizer
        model = model.generator
    if "masked_tokens" not in model.heads:
        have = ", ".join(model.heads) or "none"
        raise InputError(
            f"augmentation.model has no masked_tokens head (its heads: {have}); give a masked language model written "
            "by bertsmith pretrain"
        )
    return model


def _whole_words(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of every token that is a whole word, by its id.

    These are the tokens that start a word, except single letters, which spell rare words.
    """
    special, starts = set(tokenizer.special_ids), tokenizer.starts_word
    words = {
        token: tokenizer.decode([token]).strip()
        for token in tokenizer.vocabulary.values()
        if starts[token] and token not in special
    }
    return {token: word for token, word in words.items() if len(word) > 1 and is_word(word)}


def _own_tokens(passage: Passage, offsets: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the token indices of every word of a passage; empty if a token reaches beyond the word.

    Shape: offsets (tokens, 2) -> (tokens of the word,) each
    """
    text = passage.text
    begins, ends = offsets[:, 0].copy(), offsets[:, 1]
    for index, (begin, end) in enumerate(offsets.tolist()):
        # some tokenizers count the space before a word as part of its first token
        begins[index] += len(text[begin:end]) - len(text[begin:end].lstrip())
    for begin, end in passage.positions:
        touched = (begins < end) & (ends > begin) & (begins < ends)
        inside = touched & (begins >= begin) & (ends <= end)
        yield np.flatnonzero(inside) if (inside == touched).all() else np.empty(0, dtype=np.int64)


def _window(length: int, position: int, room: int) -> slice:
    """Return a slice of at most `room` tokens around a position."""
    begin = max(0, min(position - room // 2, length - room))
    return slice(begin, min(length, begin + room))


_SHARD_SIZE = 1 << 16  # characters × words of a shard: about 30,000 tokens


@dataclass(frozen=True)
class Processes:
    """Rank and number of the processes that share the shards and the cache folder."""

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
    """Return the candidates of every passage; equal passages are computed once.

    With a folder, each shard is written before the next one starts, and existing shards are reused. Shards do not
    depend on interruptions: the same passages are batched together, so rounding is the same.
    Shape: (words of the passage, candidates) each.
    """
    processes = processes or Processes()
    shards = list(_shards([passage for passage in dict.fromkeys(passages) if passage.positions]))
    own_shards = range(processes.rank, len(shards), processes.count)
    total, done = sum(len(passage.positions) for number in own_shards for passage in shards[number]), 0

    def count(words: int) -> None:
        nonlocal done
        done += words
        if watch is not None:
            watch(done, total)

    own = {number: _candidates(shards[number], number, masked_words, folder, count) for number in own_shards}
    processes.wait()
    by_passage: dict[Passage, np.ndarray] = {}
    for number, shard in enumerate(shards):
        ids = own[number] if number in own else _candidates(shard, number, masked_words, folder, lambda words: None)
        ends = np.cumsum([len(passage.positions) for passage in shard])
        by_passage |= zip(shard, np.split(ids, ends[:-1]), strict=True)
    return by_passage


def _candidates(
    shard: Sequence[Passage], number: int, masked_words: MaskedWords, folder: Path | None, count: Callable[[int], None]
) -> np.ndarray:
    """Return the candidates of a shard, read from its file or computed and written."""
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
    for position, passage in enumerate(passages):
        size += len(passage.positions) * len(passage.text)
        if size >= _SHARD_SIZE:
            yield passages[begin : position + 1]
            begin, size = position + 1, 0
    if begin < len(passages):
        yield passages[begin:]


def _key(masked_words: MaskedWords, shard: Sequence[Passage]) -> str:
    content = json.dumps([masked_words.key, [[passage.text, passage.positions] for passage in shard]])
    return hashlib.sha256(content.encode()).hexdigest()


def _read(file: Path, key: str) -> np.ndarray | None:
    """Read the candidates of a shard; None if the file is missing, broken or has another key."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            ids: np.ndarray = arrays["ids"]
            return ids if str(arrays["key"]) == key else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(file: Path, key: str, ids: np.ndarray) -> None:
    """Write a shard atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("wb") as stream:
        np.savez(stream, ids=ids, key=np.array(key))
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
