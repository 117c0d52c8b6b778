"""Tokenise many sentences at once, encoding each distinct word only once.

Most tokenizers split at spaces first, so a table from word to tokens gives exactly the same ids several times faster.
Otherwise (another tokenizer, a sentence with unusual white space) the tokenizer encodes the whole sentence.
"""

import re

import numpy as np

from bertsmith.text.tokenizer import Tokenizer, TokenizerContent

_WHITE_SPACE = re.compile(r"\s")
# BERT splits at punctuation, so spaces around common marks change nothing, and "word", "word," and "word." share an
# entry
_COMMON_SIGNS = ',.()":;'

WORDS_KEPT = 400_000
CHARACTERS_KEPT = 8_000_000


class WordCache:
    """The same tokens as `Tokenizer.encode_plain`, with bounded memory."""

    _index: "_WordIndex"
    _words: int
    _used: int
    _characters: int
    _pieces: np.ndarray
    _starts: np.ndarray
    _counts: np.ndarray
    _doubtful: np.ndarray

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._scheme = _scheme(tokenizer.content)
        added = tokenizer.content["added_tokens"]
        self._added = np.array(sorted(token["id"] for token in added), dtype=np.int64)
        self._signs = [
            sign
            for sign in _COMMON_SIGNS
            if self._scheme == "bert" and not any(sign in token["content"] for token in added)
        ]
        self._clear()

    def encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Concatenated tokens of all sentences, and the number of tokens of each.

        Shape: (tokens,), uint32; (sentences,), int64
        """
        if not self._scheme or not sentences:
            return _joined(self._tokenizer.encode_plain(sentences))
        # sentences are joined by a word of their own, so that one pass looks up the words of all of them
        text = " \n ".join(sentences)
        for sign in self._signs:
            text = text.replace(sign, f" {sign} ")
        words = text.split(" ")
        indices = np.fromiter(map(self._index.__getitem__, words), dtype=np.int64, count=len(words))
        ends = np.flatnonzero(indices == 0)
        if len(ends) != len(sentences) - 1:  # a sentence holds a line end itself
            return _joined(self._tokenizer.encode_plain(sentences))
        self._learn(self._index.new)
        counts = self._counts[indices]
        firsts = np.concatenate(([0], ends))
        lengths = np.add.reduceat(counts, firsts)
        # position of every token in the table: the start of its word's pieces, plus its place in the word
        before = np.cumsum(counts) - counts
        positions = np.repeat(self._starts[indices] - before, counts) + np.arange(int(lengths.sum()))
        tokens = self._pieces[positions]
        doubtful = np.flatnonzero(np.logical_or.reduceat(self._doubtful[indices], firsts))
        if len(doubtful):
            tokens, lengths = self._replaced(tokens, lengths, doubtful, sentences)
        if len(self._index) > WORDS_KEPT or self._characters > CHARACTERS_KEPT:
            self._clear()
        return tokens, lengths

    def _replaced(
        self, tokens: np.ndarray, lengths: np.ndarray, doubtful: np.ndarray, sentences: list[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and lengths, with doubtful sentences encoded as a whole."""
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        exact = self._tokenizer.encode_plain([sentences[index] for index in doubtful])
        for index, ids in zip(doubtful, exact, strict=True):
            parts[index] = np.asarray(ids, dtype=np.uint32)
        return np.concatenate(parts), np.array([len(part) for part in parts], dtype=np.int64)

    def _learn(self, words: list[str]) -> None:
        """Add the tokens of new words to the table."""
        # small groups: the library's records are a hundred times larger than the tokens
        for first in range(0, len(words), 1024):
            group = words[first : first + 1024]
            ids, owners = self._tokenizer.encode_words(group)
            tokens = np.asarray(ids, dtype=np.uint32)
            counts = np.bincount(np.asarray(owners, dtype=np.int64), minlength=len(group))
            doubtful = np.zeros(len(group), dtype=bool)
            if self._scheme == "marked":
                is_added = np.isin(tokens, self._added)
                doubtful[np.asarray(owners, dtype=np.int64)[is_added]] = True
                doubtful |= np.fromiter(map(self._is_doubtful, group), dtype=bool, count=len(group))
            self._extend(tokens, counts, doubtful)
            self._characters += sum(map(len, group))
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
        self._pieces = _grown(self._pieces, used + len(tokens))
        self._pieces[used : used + len(tokens)] = tokens
        after = words + len(counts)
        self._starts = _grown(self._starts, after)
        self._counts = _grown(self._counts, after)
        self._doubtful = _grown(self._doubtful, after)
        self._starts[words:after] = used + np.cumsum(counts) - counts
        self._counts[words:after] = counts
        self._doubtful[words:after] = doubtful
        self._words = after
        self._used = used + len(tokens)

    def _clear(self) -> None:
        self._index = _WordIndex()
        # the line end between sentences is word 0, without pieces
        self._index["\n"] = 0
        self._words = 1
        self._used = 0
        self._characters = 0
        self._pieces = np.zeros(1024, dtype=np.uint32)
        self._starts = np.zeros(1024, dtype=np.int64)
        self._counts = np.zeros(1024, dtype=np.int64)
        self._doubtful = np.zeros(1024, dtype=bool)


class _WordIndex(dict[str, int]):
    """Index of each word; a new word gets the next index and is listed in `new`."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        index = self[word] = len(self)
        self.new.append(word)
        return index


def _joined(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    tokens = np.fromiter((token for row in rows for token in row), dtype=np.uint32, count=int(lengths.sum()))
    return tokens, lengths


def _grown(array: np.ndarray, needed: int) -> np.ndarray:
    """The array if it is long enough, else a larger copy."""
    if needed <= len(array):
        return array
    larger = np.zeros(max(needed, 2 * len(array)), dtype=array.dtype)
    larger[: len(array)] = array
    return larger


def _scheme(content: TokenizerContent) -> str:
    """How words can be tokenised separately: "bert" always, "marked" by a leading space mark, "" not at all."""
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


def _keeps_white_space(normalizer: TokenizerContent | None) -> bool:
    """Whether a normaliser keeps every white space."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_white_space, normalizer["normalizers"]))
    if normalizer["type"] == "Replace":
        return normalizer["pattern"] == {"Regex": r"\s+"} and normalizer["content"] == " "
    return normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")
