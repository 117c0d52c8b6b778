"""Extend a tokenizer by the words of a domain: new tokens are appended, old ids do not change.

This continues byte-pair encoding: merge the most frequent pair of adjacent tokens inside words repeatedly; each merge
saves as many tokens as the pair has occurrences. Requirements of a new token by type of model:

    WordPiece   none: longest-match tokenisation finds it
    BPE         its merge, after all others, so that words are split as before and then merged further; intermediate
                tokens must stay
    Unigram     a score slightly above the sum of its parts, so that it replaces exactly this sequence
"""

import heapq
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bertsmith.errors import InputError
from bertsmith.text.tokenizer import Tokenizer, TokenizerContent

KINDS = ("BPE", "Unigram", "WordPiece")
REPORTED_GAINS = 10
MAX_TOKEN_LENGTH = 40  # characters; longer tokens are URLs or formulas
_CANDIDATE_FACTOR = 2  # candidates per new token for models that do not need intermediate tokens
_SCORE_MARGIN = 1e-4  # added to the sum of the parts' Unigram scores, per merge
_MAX_WORDS = 5_000_000
_BATCH = 10_000
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Gain:
    """Number of tokens that a new token saves on the training text."""

    token: str
    parts: tuple[str, ...]
    """Its tokens before the extension."""
    tokens_saved: int


@dataclass(frozen=True)
class Extension:
    """An extended tokenizer and its effect on the training text."""

    tokenizer: Tokenizer
    tokens: tuple[str, ...]
    words: int
    """Number of words separated by white space."""
    tokens_before: int
    tokens_after: int
    words_unchanged: int
    best: tuple[Gain, ...]
    """The new tokens with the largest savings, in descending order."""


def extend_tokenizer(
    base: Tokenizer, documents: Iterable[str], tokens: int, *, minimum_frequency: int = 2
) -> Extension:
    """Add at most `tokens` tokens for the words that the tokenizer splits most often in documents.

    Pairs with fewer than `minimum_frequency` occurrences are not merged. The result is deterministic.
    """
    kind = base.content["model"]["type"]
    if kind not in KINDS:
        raise InputError(f"the tokenizer's model is {kind}; an extension supports {', '.join(KINDS)}")
    if tokens < 1:
        raise InputError(f"tokens is {tokens}; it must be at least 1")
    if minimum_frequency < 1:
        raise InputError(f"minimum_frequency is {minimum_frequency}; it must be at least 1")
    words = _count_words(documents)
    candidates = tokens if kind == "BPE" else _CANDIDATE_FACTOR * tokens
    merger = _Merger(_split(base, words), _merge_rule(base))
    while len(merger.parts) < candidates and merger.merge_most_frequent(minimum_frequency):
        pass
    if not merger.parts:
        raise InputError(
            f"no pair of subwords occurs {minimum_frequency} times inside words; the tokenizer needs no extension"
        )
    parts = merger.parts
    if kind != "BPE":
        savings = merger.savings()
        parts = {token: parts[token] for token in sorted(parts, key=lambda token: (-savings[token], token))[:tokens]}
    return _measure(base, _with_tokens(base, parts, merger.merges), words, parts)


def _count_words(documents: Iterable[str]) -> Counter[str]:
    """Count words separated by white space."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(document.split())
        if len(counts) > _MAX_WORDS:  # bound memory: drop words seen once so far
            counts = Counter({word: count for word, count in counts.items() if count > 1})
    if not counts:
        raise InputError("the data has no text to learn new tokens from")
    return counts


def _split(base: Tokenizer, words: Counter[str]) -> Counter[tuple[str, ...]]:
    """Return the tokens of every word with more than one token, with its count."""
    splits: Counter[tuple[str, ...]] = Counter()
    for batch in _batches(words):
        for word, units in zip(batch, base.split_words(_with_space(batch)), strict=True):
            for tokens in units:
                if len(tokens) > 1:
                    splits[tuple(tokens)] += words[word]
    return splits


def _with_space(words: Sequence[str]) -> list[str]:
    """Prefix words with a space: byte-level tokenizers treat the first word of a text differently."""
    return [f" {word}" for word in words]


def _batches(words: Counter[str]) -> Iterable[list[str]]:
    distinct = list(words)
    return (distinct[start : start + _BATCH] for start in range(0, len(distinct), _BATCH))


def _merge_rule(base: Tokenizer) -> Callable[[str, str], str | None]:
    """Return a function from two tokens to the merged token, or None if they must not be merged."""
    model = base.content["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    known, special = base.vocabulary, {*base.tokens(base.special_ids)}
    # byte tokens of letters may look like punctuation; byte-level pre-tokenizers split punctuation themselves
    is_bytes = '"ByteLevel"' in json.dumps([base.content["normalizer"], base.content["pre_tokenizer"]])

    def merge(left: str, right: str) -> str | None:
        token = left + right.removeprefix(prefix)
        letters = token.removeprefix(prefix)
        if left in special or right in special or token in known or len(letters) > MAX_TOKEN_LENGTH:
            return None
        if _BYTE_TOKEN.fullmatch(left) or _BYTE_TOKEN.fullmatch(right):
            return None
        return token if is_bytes or not _has_punctuation(letters) else None

    return merge


def _has_punctuation(letters: str) -> bool:
    """Whether a string contains punctuation or a symbol."""
    return any(unicodedata.category(letter)[0] in "PS" for letter in letters.removeprefix("▁"))


class _Merger:
    """Words as token sequences, in which pairs of tokens are merged one by one."""

    def __init__(self, words: Counter[tuple[str, ...]], rule: Callable[[str, str], str | None]) -> None:
        self.parts: dict[str, tuple[str, ...]] = {}
        """Tokens of the base tokenizer in each new token."""
        self.merges: list[tuple[str, str]] = []
        self._rule = rule
        self._words = [list(tokens) for tokens in words]
        self._counts = list(words.values())
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._words_with: dict[tuple[str, str], set[int]] = {}
        self._merged: dict[tuple[str, str], str | None] = {}
        for index in range(len(self._words)):
            self._count_pairs(index, +1)
        self._heap = [(-count, pair) for pair, count in self._pairs.items()]
        heapq.heapify(self._heap)

    def merge_most_frequent(self, minimum: int) -> bool:
        """Merge the most frequent pair (ties: the first alphabetically); return False if no pair is left."""
        while self._heap:
            negative, pair = heapq.heappop(self._heap)
            count = self._pairs[pair]
            if count < minimum:
                continue
            if count == -negative:
                self._replace(pair)
                return True
            heapq.heappush(self._heap, (-count, pair))  # outdated: other merges have reduced its count
        return False

    def savings(self) -> Counter[str]:
        """Return the number of tokens that each new token currently saves."""
        saved: Counter[str] = Counter()
        for tokens, count in zip(self._words, self._counts, strict=True):
            for token in tokens:
                if token in self.parts:
                    saved[token] += count * (len(self.parts[token]) - 1)
        return saved

    def _replace(self, pair: tuple[str, str]) -> None:
        token = self._merged[pair]
        assert token is not None
        left, right = (self.parts.get(side, (side,)) for side in pair)
        self.parts.setdefault(token, left + right)
        self.merges.append(pair)
        changed: set[tuple[str, str]] = set()
        for index in sorted(self._words_with.pop(pair)):
            self._count_pairs(index, -1)
            self._words[index] = _replace_pair(self._words[index], pair, token)
            changed |= self._count_pairs(index, +1)
        del self._pairs[pair]
        for other in sorted(changed - {pair}):
            heapq.heappush(self._heap, (-self._pairs[other], other))

    def _count_pairs(self, index: int, sign: int) -> set[tuple[str, str]]:
        """Add (or subtract) the pairs of a word, and return them."""
        tokens = self._words[index]
        pairs = [pair for pair in pairwise(tokens) if self._merge(pair) is not None]
        for pair in pairs:
            self._pairs[pair] += sign * self._counts[index]
            words = self._words_with.setdefault(pair, set())
            words.add(index) if sign > 0 else words.discard(index)
        return {*pairs}

    def _merge(self, pair: tuple[str, str]) -> str | None:
        if pair not in self._merged:
            self._merged[pair] = self._rule(*pair)
        return self._merged[pair]


def _replace_pair(tokens: list[str], pair: tuple[str, str], token: str) -> list[str]:
    """Replace every occurrence of a pair, from the left."""
    result: list[str] = []
    index = 0
    while index < len(tokens):
        is_pair = tuple(tokens[index : index + 2]) == pair
        result.append(token if is_pair else tokens[index])
        index += 2 if is_pair else 1
    return result


def _with_tokens(base: Tokenizer, parts: dict[str, tuple[str, ...]], merges: list[tuple[str, str]]) -> Tokenizer:
    """Return the tokenizer with new tokens appended."""
    content = json.loads(json.dumps(base.content))
    model: TokenizerContent = content["model"]
    if model["type"] == "Unigram":
        _append_scored(model["vocab"], base, parts)
    else:
        # added tokens get ids after the model's tokens, unless they are among them
        model["vocab"] = {**model["vocab"], **base.vocabulary}
        model["vocab"] |= {token: base.size + index for index, token in enumerate(parts)}
    if model["type"] == "BPE":
        model["merges"] += [list(pair) for pair in merges]
    extended = Tokenizer.from_json(json.dumps(content, ensure_ascii=False))
    ids = base.vocabulary.items()
    moved = next((token for token, token_id in ids if extended.vocabulary.get(token) != token_id), None)
    if moved is not None:
        raise InputError(f"this tokenizer cannot be extended: the id of its token {moved!r} would change")
    return extended


def _append_scored(table: list[list[str | float]], base: Tokenizer, parts: dict[str, tuple[str, ...]]) -> None:
    """Append tokens to a Unigram table, whose indices are ids; added tokens are inserted as well."""
    scores = {str(token): float(score) for token, score in table}
    lowest = min(scores.values()) - 1000.0
    for index in range(len(table), base.size):
        table.append([base.tokens([index])[0] or f"<unused {index}>", lowest])
    for token, inner in parts.items():
        table.append([token, sum(scores[part] for part in inner) + _SCORE_MARGIN * (len(inner) - 1)])


def _measure(base: Tokenizer, extended: Tokenizer, words: Counter[str], parts: dict[str, tuple[str, ...]]) -> Extension:
    """Count the tokens of the training text before and after the extension."""
    before = after = unchanged = 0
    uses: Counter[int] = Counter()
    for batch in _batches(words):
        old, new = (tokenizer.encode_plain(_with_space(batch)) for tokenizer in (base, extended))
        for word, old_ids, new_ids in zip(batch, old, new, strict=True):
            count = words[word]
            before, after = before + count * len(old_ids), after + count * len(new_ids)
            unchanged += count * (old_ids == new_ids)
            for token_id in new_ids:
                if token_id >= base.size:
                    uses[token_id] += count
    gains = [Gain(token, inner, uses[extended.vocabulary[token]] * (len(inner) - 1)) for token, inner in parts.items()]
    best = sorted(gains, key=lambda gain: (-gain.tokens_saved, gain.token))[:REPORTED_GAINS]
    return Extension(extended, tuple(parts), words.total(), before, after, unchanged, tuple(best))


def tokenizer_difference(base: Tokenizer, other: Tokenizer) -> str | None:
    """Describe why `other` encodes texts differently from `base`; None if it equals or extends `base`.

    An extension has every token of its base under the same id, and normalises and splits text in the same way.
    """
    if base.hash == other.hash:
        return None
    tokens = {token_id: token for token, token_id in other.vocabulary.items()}
    for token, token_id in sorted(base.vocabulary.items(), key=lambda entry: entry[1]):
        if tokens.get(token_id) != token:
            actual = repr(tokens[token_id]) if token_id in tokens else "missing"
            return f"id {token_id} is {actual} instead of {token!r}"
    for component in ("normalizer", "pre_tokenizer"):
        if base.content[component] != other.content[component]:
            return f"all tokens are the same, but its {component} differs"
    return _model_difference(base.content["model"], other.content["model"])


def _model_difference(base: TokenizerContent, other: TokenizerContent) -> str | None:
    """Describe how the model of a tokenizer differs; None if it equals or extends `base`."""
    for name, value in base.items():
        if name == "merges" and other.get(name, [])[: len(value)] != value:
            return "all tokens are the same, but its merges differ"
        if name == "vocab" and isinstance(value, list) and other[name][: len(value)] != value:
            return "all tokens are the same, but their scores differ"
        if name not in ("merges", "vocab") and other.get(name) != value:
            return f"all tokens are the same, but its {name} is {other.get(name)!r} instead of {value!r}"
    return None


def new_tokens(base: Tokenizer, extended: Tokenizer) -> dict[int, list[int]]:
    """Return the ids that an extension adds, each with the ids of its parts in `base`; empty if it has none."""
    added = {token["content"] for token in extended.content["added_tokens"]}
    excluded = {*base.special_ids, base.vocabulary.get(str(base.content["model"].get("unk_token")), -1)}
    parts: dict[int, list[int]] = {}
    for token, token_id in sorted(extended.vocabulary.items(), key=lambda entry: entry[1]):
        if token not in base.vocabulary:
            # added tokens have no prefix
            ids = base.encode_plain([token])[0] if token in added else base.spell(token)
            parts[token_id] = [part for part in ids if part not in excluded]
    return parts
