"""Extend a tokenizer by the words of a domain: new tokens are appended, old ids do not change.

Byte-pair encoding continued from the tokenizer: merge the most frequent pair of adjacent tokens inside words, again
and again; each merge saves as many tokens as the pair occurs. Requirements of a new token by type of model:

    WordPiece   none: the longest match finds it
    BPE         its merge, after all others, so that words are split as before and then merged further; intermediate
                tokens must stay
    Unigram     a score slightly above the sum of its parts: it replaces exactly this sequence
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
BEST = 10
LONGEST_PIECE = 40  # characters; longer ones are addresses or formulas
# models that do not need intermediate tokens create more candidates and keep the best
_SURPLUS = 2
_MARGIN = 1e-4  # score of a Unigram token above the sum of its parts, per merge
_CHUNKS_KEPT = 5_000_000
_BATCH = 10_000
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Gain:
    """Tokens that one new token saves on the text it was learned from."""

    piece: str
    parts: tuple[str, ...]
    """Its tokens before the extension."""
    tokens_saved: int


@dataclass(frozen=True)
class Extension:
    """An extended tokenizer, and its effect on the text it was learned from."""

    tokenizer: Tokenizer
    tokens: tuple[str, ...]
    words: int
    """Number of words, separated by white space."""
    tokens_before: int
    tokens_after: int
    words_unchanged: int
    best: tuple[Gain, ...]
    """The new tokens that save most, best first."""


def extend_tokenizer(
    base: Tokenizer, documents: Iterable[str], tokens: int, *, minimum_frequency: int = 2
) -> Extension:
    """Add at most `tokens` tokens for the words that the tokenizer splits most often in documents.

    Pairs that occur fewer than `minimum_frequency` times are not merged. The same documents give the same tokenizer.
    """
    kind = base.content["model"]["type"]
    if kind not in KINDS:
        raise InputError(f"the tokenizer's model is {kind}; allowed for an extension: {', '.join(KINDS)}")
    if tokens < 1:
        raise InputError(f"tokens is {tokens}; it must be at least 1")
    if minimum_frequency < 1:
        raise InputError(f"minimum_frequency is {minimum_frequency}; it must be at least 1")
    chunks = _count_words(documents)
    wanted = tokens if kind == "BPE" else _SURPLUS * tokens
    merger = _Merger(_split(base, chunks), _merge_rule(base))
    while len(merger.parts) < wanted and merger.merge_most_frequent(minimum_frequency):
        pass
    if not merger.parts:
        raise InputError(
            f"the text holds no two subwords of one word {minimum_frequency} times; this tokenizer needs no extension"
        )
    parts = merger.parts
    if kind != "BPE":
        savings = merger.savings()
        parts = {piece: parts[piece] for piece in sorted(parts, key=lambda piece: (-savings[piece], piece))[:tokens]}
    return _measure(base, _with_tokens(base, parts, merger.joins), chunks, parts)


def _count_words(documents: Iterable[str]) -> Counter[str]:
    """Count the words between white space."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(document.split())
        if len(counts) > _CHUNKS_KEPT:  # bound memory: drop words seen once so far
            counts = Counter({chunk: count for chunk, count in counts.items() if count > 1})
    if not counts:
        raise InputError("the data holds no text to learn new tokens from")
    return counts


def _split(base: Tokenizer, chunks: Counter[str]) -> Counter[tuple[str, ...]]:
    """Tokens of every word of more than one token, with its count."""
    words: Counter[tuple[str, ...]] = Counter()
    for texts in _batches(chunks):
        for text, found in zip(texts, base.split_words(_spaced(texts)), strict=True):
            for tokens in found:
                if len(tokens) > 1:
                    words[tuple(tokens)] += chunks[text]
    return words


def _spaced(texts: Sequence[str]) -> list[str]:
    """Words as inside a text: byte-level tokenizers treat the first word of a text differently."""
    return [f" {text}" for text in texts]


def _batches(chunks: Counter[str]) -> Iterable[list[str]]:
    texts = list(chunks)
    return (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH))


def _merge_rule(base: Tokenizer) -> Callable[[str, str], str | None]:
    """(left, right) → the merged token, or None if they must not be merged."""
    model = base.content["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    known, special = base.vocabulary, {*base.tokens(base.special_ids)}
    # bytes of a letter may look like punctuation, and byte-level pre-tokenizers split punctuation themselves
    is_bytes = '"ByteLevel"' in json.dumps([base.content["normalizer"], base.content["pre_tokenizer"]])

    def joined(left: str, right: str) -> str | None:
        piece = left + right.removeprefix(prefix)
        letters = piece.removeprefix(prefix)
        if left in special or right in special or piece in known or len(letters) > LONGEST_PIECE:
            return None
        if _BYTE_PIECE.fullmatch(left) or _BYTE_PIECE.fullmatch(right):
            return None
        return piece if is_bytes or not _has_signs(letters) else None

    return joined


def _has_signs(letters: str) -> bool:
    """Whether it contains punctuation or a symbol."""
    return any(unicodedata.category(letter)[0] in "PS" for letter in letters.removeprefix("▁"))


class _Merger:
    """The words of a text, whose tokens are merged pair by pair."""

    def __init__(self, words: Counter[tuple[str, ...]], join: Callable[[str, str], str | None]) -> None:
        self.parts: dict[str, tuple[str, ...]] = {}
        """Tokens of the base tokenizer in each new token."""
        self.joins: list[tuple[str, str]] = []
        self._join = join
        self._words = [list(tokens) for tokens in words]
        self._counts = list(words.values())
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._homes: dict[tuple[str, str], set[int]] = {}
        self._made: dict[tuple[str, str], str | None] = {}
        for index in range(len(self._words)):
            self._count(index, +1)
        self._heap = [(-count, pair) for pair, count in self._pairs.items()]
        heapq.heapify(self._heap)

    def merge_most_frequent(self, minimum: int) -> bool:
        """Merge the most frequent pair (ties: the first in the alphabet); return False if no pair is left."""
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
        """Tokens that each new token saves at present."""
        saved: Counter[str] = Counter()
        for tokens, count in zip(self._words, self._counts, strict=True):
            for piece in tokens:
                if piece in self.parts:
                    saved[piece] += count * (len(self.parts[piece]) - 1)
        return saved

    def _replace(self, pair: tuple[str, str]) -> None:
        piece = self._made[pair]
        assert piece is not None
        left, right = (self.parts.get(side, (side,)) for side in pair)
        self.parts.setdefault(piece, left + right)
        self.joins.append(pair)
        touched: set[tuple[str, str]] = set()
        for index in sorted(self._homes.pop(pair)):
            self._count(index, -1)
            self._words[index] = _replaced(self._words[index], pair, piece)
            touched |= self._count(index, +1)
        del self._pairs[pair]
        for other in sorted(touched - {pair}):
            heapq.heappush(self._heap, (-self._pairs[other], other))

    def _count(self, index: int, sign: int) -> set[tuple[str, str]]:
        """Add (or subtract) the pairs of a word, and return them."""
        tokens = self._words[index]
        found = [pair for pair in pairwise(tokens) if self._piece_of(pair) is not None]
        for pair in found:
            self._pairs[pair] += sign * self._counts[index]
            homes = self._homes.setdefault(pair, set())
            homes.add(index) if sign > 0 else homes.discard(index)
        return {*found}

    def _piece_of(self, pair: tuple[str, str]) -> str | None:
        if pair not in self._made:
            self._made[pair] = self._join(*pair)
        return self._made[pair]


def _replaced(tokens: list[str], pair: tuple[str, str], piece: str) -> list[str]:
    """Replace every occurrence of the pair, from the left."""
    result: list[str] = []
    index = 0
    while index < len(tokens):
        is_pair = tuple(tokens[index : index + 2]) == pair
        result.append(piece if is_pair else tokens[index])
        index += 2 if is_pair else 1
    return result


def _with_tokens(base: Tokenizer, parts: dict[str, tuple[str, ...]], merges: list[tuple[str, str]]) -> Tokenizer:
    """The tokenizer with new tokens appended."""
    content = json.loads(json.dumps(base.content))
    model: TokenizerContent = content["model"]
    if model["type"] == "Unigram":
        _append_scored(model["vocab"], base, parts)
    else:
        # added tokens get ids after the model's tokens, unless they are among them
        model["vocab"] = {**model["vocab"], **base.vocabulary}
        model["vocab"] |= {piece: base.size + index for index, piece in enumerate(parts)}
    if model["type"] == "BPE":
        model["merges"] += [list(pair) for pair in merges]
    extended = Tokenizer.from_json(json.dumps(content, ensure_ascii=False))
    moved = next((piece for piece, token in base.vocabulary.items() if extended.vocabulary.get(piece) != token), None)
    if moved is not None:
        raise InputError(f"this tokenizer cannot be extended: its piece {moved!r} would get another id")
    return extended


def _append_scored(table: list[list[str | float]], base: Tokenizer, parts: dict[str, tuple[str, ...]]) -> None:
    """Append tokens to a Unigram table, whose indices are ids; added tokens are inserted as well."""
    scores = {str(piece): float(score) for piece, score in table}
    lowest = min(scores.values()) - 1000.0
    for index in range(len(table), base.size):
        table.append([base.tokens([index])[0] or f"<unused {index}>", lowest])
    for piece, inner in parts.items():
        table.append([piece, sum(scores[part] for part in inner) + _MARGIN * (len(inner) - 1)])


def _measure(
    base: Tokenizer, extended: Tokenizer, chunks: Counter[str], parts: dict[str, tuple[str, ...]]
) -> Extension:
    before = after = unchanged = 0
    seen: Counter[int] = Counter()
    for texts in _batches(chunks):
        old, new = (tokenizer.encode_plain(_spaced(texts)) for tokenizer in (base, extended))
        for text, was, now in zip(texts, old, new, strict=True):
            count = chunks[text]
            before, after = before + count * len(was), after + count * len(now)
            unchanged += count * (was == now)
            for token in now:
                if token >= base.size:
                    seen[token] += count
    gains = [Gain(piece, inner, seen[extended.vocabulary[piece]] * (len(inner) - 1)) for piece, inner in parts.items()]
    best = sorted(gains, key=lambda gain: (-gain.tokens_saved, gain.piece))[:BEST]
    return Extension(extended, tuple(parts), chunks.total(), before, after, unchanged, tuple(best))


def tokenizer_difference(base: Tokenizer, other: Tokenizer) -> str | None:
    """Describe why `other` gives a text other ids than `base`; None if it equals or extends `base`.

    An extension has every token of its base under the same id, and normalises and splits text in the same way.
    """
    if base.hash == other.hash:
        return None
    tokens = {token: piece for piece, token in other.vocabulary.items()}
    for piece, token in sorted(base.vocabulary.items(), key=lambda entry: entry[1]):
        if tokens.get(token) != piece:
            there = repr(tokens[token]) if token in tokens else "missing"
            return f"id {token} is {there} instead of {piece!r}"
    for part in ("normalizer", "pre_tokenizer"):
        if base.content[part] != other.content[part]:
            return f"all tokens are the same, but its {part} is another"
    return _model_difference(base.content["model"], other.content["model"])


def _model_difference(base: TokenizerContent, other: TokenizerContent) -> str | None:
    """The same for the models."""
    for name, value in base.items():
        if name == "merges" and other.get(name, [])[: len(value)] != value:
            return "all tokens are the same, but it joins them otherwise"
        if name == "vocab" and isinstance(value, list) and other[name][: len(value)] != value:
            return "all tokens are the same, but their scores are others"
        if name not in ("merges", "vocab") and other.get(name) != value:
            return f"all tokens are the same, but its {name} is {other.get(name)!r} instead of {value!r}"
    return None


def new_tokens(base: Tokenizer, extended: Tokenizer) -> dict[int, list[int]]:
    """Ids of the tokens that an extension adds, with the ids of their spelling in `base`, empty if impossible."""
    added = {token["content"] for token in extended.content["added_tokens"]}
    nothing = {*base.special_ids, base.vocabulary.get(str(base.content["model"].get("unk_token")), -1)}
    found: dict[int, list[int]] = {}
    for piece, token in sorted(extended.vocabulary.items(), key=lambda entry: entry[1]):
        if piece not in base.vocabulary:
            # added tokens have no prefix
            ids = base.encode_plain([piece])[0] if piece in added else base.spell(piece)
            found[token] = [part for part in ids if part not in nothing]
    return found
