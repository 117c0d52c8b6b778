"""Tokenise batches of sentences, encoding each distinct word only once.

Most tokenizers split at spaces first, so a table from words to tokens gives exactly the same ids several times faster.
With other tokenizers, and for sentences with unusual white space, the tokenizer encodes the whole sentence.
"""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the tokenizer has a cache
    from bertsmith.text.tokenizer import Tokenizer

_WHITE_SPACE = re.compile(r"\s")
# BERT splits at punctuation, so adding spaces around common marks changes nothing, and "word", "word," and "word."
# share an entry
_COMMON_PUNCTUATION = ',.()":;'

MAX_WORDS = 400_000
MAX_CHARACTERS = 8_000_000


class WordCache:
    """Computes the same tokens as `Tokenizer.encode_plain`, with bounded memory."""

    _index: "_WordIndex"
    _words: int
    _used: int
    _characters: int
    _tokens: np.ndarray
    _starts: np.ndarray
    _counts: np.ndarray
    _doubtful: np.ndarray

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._scheme = _scheme(tokenizer.content)
        added = tokenizer.content["added_tokens"]
        self._added = np.array(sorted(token["id"] for token in added), dtype=np.int64)
        self._punctuation = [
            mark
            for mark in _COMMON_PUNCTUATION
            if self._scheme == "bert" and not any(mark in token["content"] for token in added)
        ]
        self._clear()

    @property
    def splits_words(self) -> bool:
        """Whether words are encoded separately; without, `encode` takes as long as the tokenizer."""
        return bool(self._scheme)

    def encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated tokens of all sentences, and the number of tokens of each.

        Shape: (tokens,), uint32; (sentences,), int64
        """
        if not self._scheme or not sentences:
            return _concatenate(self._tokenizer.encode_plain(sentences))
        # a separator word between sentences, so that one pass looks up all words
        text = " \n ".join(sentences)
        for mark in self._punctuation:
            text = text.replace(mark, f" {mark} ")
        words = text.split(" ")
        indices = np.fromiter(map(self._index.__getitem__, words), dtype=np.int64, count=len(words))
        ends = np.flatnonzero(indices == 0)
        if len(ends) != len(sentences) - 1:  # a sentence contains a line end
            return _concatenate(self._tokenizer.encode_plain(sentences))
        try:
            self._add_words(self._index.new)
        except BaseException:
            self._clear()  # some words have an index and no tokens
            raise
        counts = self._counts[indices]
        firsts = np.concatenate(([0], ends))
        lengths = np.add.reduceat(counts, firsts)
        tokens = self._tokens[concatenated_ranges(self._starts[indices], counts)]
        doubtful = np.flatnonzero(np.logical_or.reduceat(self._doubtful[indices], firsts))
        if len(doubtful):
            tokens, lengths = self._encode_doubtful(tokens, lengths, doubtful, sentences)
        if len(self._index) > MAX_WORDS or self._characters > MAX_CHARACTERS:
            self._clear()
        return tokens, lengths

    def _encode_doubtful(
        self, tokens: np.ndarray, lengths: np.ndarray, doubtful: np.ndarray, sentences: list[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and lengths with the sentences `doubtful` encoded as a whole."""
        rows = np.split(tokens, np.cumsum(lengths)[:-1])
        exact = self._tokenizer.encode_plain([sentences[index] for index in doubtful])
        for index, ids in zip(doubtful, exact, strict=True):
            rows[index] = np.asarray(ids, dtype=np.uint32)
        return np.concatenate(rows), np.array([len(row) for row in rows], dtype=np.int64)

    def _add_words(self, words: list[str]) -> None:
        """Add the tokens of new words to the table."""
        # small batches: the library's encodings are a hundred times larger than the tokens
        for first in range(0, len(words), 1024):
            batch = words[first : first + 1024]
            ids, word_indices = self._tokenizer.encode_words(batch)
            tokens = np.asarray(ids, dtype=np.uint32)
            owners = np.asarray(word_indices, dtype=np.int64)
            counts = np.bincount(owners, minlength=len(batch))
            doubtful = np.zeros(len(batch), dtype=bool)
            if self._scheme == "marked":
                doubtful[owners[np.isin(tokens, self._added)]] = True
                doubtful |= np.fromiter(map(self._is_doubtful, batch), dtype=bool, count=len(batch))
            self._extend(tokens, counts, doubtful)
            self._characters += sum(map(len, batch))
        words.clear()

    def _is_doubtful(self, word: str) -> bool:
        """Whether a word's tokens could depend on its neighbours."""
        if not word or "▁" in word or _WHITE_SPACE.search(word):
            return True
        normalizer = self._tokenizer.normalizer
        return (
            normalizer is not None
            and not word.isascii()
            and _WHITE_SPACE.search(normalizer.normalize_str(word)) is not None
        )

    def _extend(self, tokens: np.ndarray, counts: np.ndarray, doubtful: np.ndarray) -> None:
        words, used = self._words, self._used
        self._tokens = _grow(self._tokens, used + len(tokens))
        self._tokens[used : used + len(tokens)] = tokens
        after = words + len(counts)
        self._starts = _grow(self._starts, after)
        self._counts = _grow(self._counts, after)
        self._doubtful = _grow(self._doubtful, after)
        self._starts[words:after] = used + np.cumsum(counts) - counts
        self._counts[words:after] = counts
        self._doubtful[words:after] = doubtful
        self._words = after
        self._used = used + len(tokens)

    def _clear(self) -> None:
        self._index = _WordIndex()
        # the line end between sentences is word 0, without tokens
        self._index["\n"] = 0
        self._words = 1
        self._used = 0
        self._characters = 0
        self._tokens = np.zeros(1024, dtype=np.uint32)
        self._starts = np.zeros(1024, dtype=np.int64)
        self._counts = np.zeros(1024, dtype=np.int64)
        self._doubtful = np.zeros(1024, dtype=bool)


def concatenated_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return start, start + 1, … for every start, as many numbers as its length: (sum of the lengths,), int64."""
    before = np.cumsum(lengths) - lengths
    ranges: np.ndarray = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return ranges


class _WordIndex(dict[str, int]):
    """Index of each word; a new word gets the next index and is listed in `new`."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        index = self[word] = len(self)
        self.new.append(word)
        return index


def _concatenate(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    tokens = np.fromiter((token for row in rows for token in row), dtype=np.uint32, count=int(lengths.sum()))
    return tokens, lengths


def _grow(array: np.ndarray, length: int) -> np.ndarray:
    """Return the array if it has the length, else a larger copy."""
    if length <= len(array):
        return array
    larger = np.zeros(max(length, 2 * len(array)), dtype=array.dtype)
    larger[: len(array)] = array
    return larger


def _scheme(content: dict[str, Any]) -> str:
    """Return how words can be encoded separately: "bert" always, "marked" by a leading space mark, "" not at all."""
    if any(_WHITE_SPACE.search(token["content"]) for token in content["added_tokens"]):
        return ""
    if content["model"].get("dropout"):
        return ""
    normalizer, splitter = content["normalizer"], content["pre_tokenizer"] or {}
    if splitter.get("type") == "BertPreTokenizer" and content["model"]["type"] == "WordPiece":
        return "bert" if normalizer is None or normalizer["type"] == "BertNormalizer" else ""
    adds_space = (
        splitter.get("type") == "ByteLevel" and splitter["add_prefix_space"] and splitter.get("use_regex", True)
    )
    adds_mark = (
        splitter.get("type") == "Metaspace"
        and splitter["replacement"] == "▁"
        and splitter.get("prepend_scheme") == "always"
        and splitter.get("split", True)
    )
    return "marked" if (adds_space or adds_mark) and _keeps_white_space(normalizer) else ""


def _keeps_white_space(normalizer: dict[str, Any] | None) -> bool:
    """Whether a normalizer keeps all white space."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_white_space, normalizer["normalizers"]))
    if normalizer["type"] == "Replace":
        return normalizer["pattern"] == {"Regex": r"\s+"} and normalizer["content"] == " "
    return normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")
