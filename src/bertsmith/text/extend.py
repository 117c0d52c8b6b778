"""A tokenizer that has learned the words of a domain: new pieces after its own, whose ids never move.

Byte-pair encoding, begun where the tokenizer ends: of all neighbouring pieces inside a word, the two that stand
together most often become one, again and again; each such join saves as many tokens as it is seen. What a new piece
needs to be used differs by kind:

    WordPiece   nothing: the longest match finds it
    BPE         the join itself, after all the others, so that words are split as before and then joined further; a
                piece on the way to a longer one has to stay
    Unigram     a score a little above that of its parts: it wins where they stand side by side today, nowhere else
"""

import heapq
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bertsmith.errors import InputError
from bertsmith.text.tokenizer import Tokenizer

KINDS = ("BPE", "Unigram", "WordPiece")
BEST = 10
LONGEST_PIECE = 40  # letters; what is longer is an address or a formula, not a word
# kinds that can leave out a piece on the way to a longer one make more than they need and keep the best
_SURPLUS = 2
_MARGIN = 1e-4  # by which a Unigram piece beats its parts, for every join
_CHUNKS_KEPT = 5_000_000
_BATCH = 10_000
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Gain:
    """What one new piece gives on the text it was learned from."""

    piece: str
    parts: tuple[str, ...]
    """What the tokenizer made of it before."""
    tokens_saved: int


@dataclass(frozen=True)
class Extension:
    """An extended tokenizer, and what the extension does to the text it was learned from."""

    tokenizer: Tokenizer
    pieces: tuple[str, ...]
    words: int
    """Of the text, told apart by white space."""
    tokens_before: int
    tokens_after: int
    words_unchanged: int
    best: tuple[Gain, ...]
    """The new pieces that save most, best first."""


def extend_tokenizer(
    base: Tokenizer, documents: Iterable[str], pieces: int, *, minimum_frequency: int = 2
) -> Extension:
    """The tokenizer with at most `pieces` new ones for what it splits most often in documents.

    Two pieces that stand together fewer than `minimum_frequency` times are never joined. The same documents give the
    same tokenizer.
    """
    kind = base.content["model"]["type"]
    if kind not in KINDS:
        raise InputError(f"the tokenizer's model is {kind}; allowed for an extension: {', '.join(KINDS)}")
    if pieces < 1:
        raise InputError(f"pieces is {pieces}; it must be at least 1")
    if minimum_frequency < 1:
        raise InputError(f"minimum_frequency is {minimum_frequency}; it must be at least 1")
    chunks = _counted(documents)
    wanted = pieces if kind == "BPE" else _SURPLUS * pieces
    joining = _Joining(_split(base, chunks), _joins_of(base))
    while len(joining.parts) < wanted and joining.join_most_frequent(minimum_frequency):
        pass
    if not joining.parts:
        raise InputError(
            f"the text holds no two pieces of one word {minimum_frequency} times; this tokenizer needs no extension"
        )
    parts = joining.parts
    if kind != "BPE":
        savings = joining.savings()
        parts = {piece: parts[piece] for piece in sorted(parts, key=lambda piece: (-savings[piece], piece))[:pieces]}
    return _measured(base, _with_pieces(base, parts, joining.joins), chunks, parts)


def _counted(documents: Iterable[str]) -> Counter[str]:
    """How often each stretch between white space occurs."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(document.split())
        if len(counts) > _CHUNKS_KEPT:  # a text of any size: what was seen once so far is forgotten
            counts = Counter({chunk: count for chunk, count in counts.items() if count > 1})
    if not counts:
        raise InputError("the data holds no text to learn new pieces from")
    return counts


def _split(base: Tokenizer, chunks: Counter[str]) -> Counter[tuple[str, ...]]:
    """The pieces of every word that is more than one, with the number of times it occurs."""
    words: Counter[tuple[str, ...]] = Counter()
    for texts in _batches(chunks):
        for text, found in zip(texts, base.split_words(_spaced(texts)), strict=True):
            for pieces in found:
                if len(pieces) > 1:
                    words[tuple(pieces)] += chunks[text]
    return words


def _spaced(texts: Sequence[str]) -> list[str]:
    """Stretches as they stand inside a text; byte-level kinds tell the first word of a text from the others."""
    return [f" {text}" for text in texts]


def _batches(chunks: Counter[str]) -> Iterable[list[str]]:
    texts = list(chunks)
    return (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH))


def _joins_of(base: Tokenizer) -> Callable[[str, str], str | None]:
    """(left, right) → the piece they would make, or None where they must stay two."""
    model = base.content["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    known, special = base.vocabulary, {*base.pieces(base.special_ids)}
    # the bytes of one letter may look like anything; and a byte-level splitter keeps signs apart by itself
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
    """Whether there is punctuation or a symbol in it, which no word of ours takes in."""
    return any(unicodedata.category(letter)[0] in "PS" for letter in letters.removeprefix("▁"))


class _Joining:
    """The words of a text, whose pieces are joined pair by pair."""

    def __init__(self, words: Counter[tuple[str, ...]], join: Callable[[str, str], str | None]) -> None:
        self.parts: dict[str, tuple[str, ...]] = {}
        """The pieces of the tokenizer that each new one is made of."""
        self.joins: list[tuple[str, str]] = []
        self._join = join
        self._words = [list(pieces) for pieces in words]
        self._counts = list(words.values())
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._homes: dict[tuple[str, str], set[int]] = {}
        self._made: dict[tuple[str, str], str | None] = {}
        for index in range(len(self._words)):
            self._count(index, +1)
        self._heap = [(-count, pair) for pair, count in self._pairs.items()]
        heapq.heapify(self._heap)

    def join_most_frequent(self, minimum: int) -> bool:
        """Makes one piece of the pair that is seen most often, the first in the alphabet of several; False if none."""
        while self._heap:
            negative, pair = heapq.heappop(self._heap)
            count = self._pairs[pair]
            if count < minimum:
                continue
            if count == -negative:
                self._replace(pair)
                return True
            heapq.heappush(self._heap, (-count, pair))  # it was seen more often before other joins took some of it
        return False

    def savings(self) -> Counter[str]:
        """The tokens that each new piece saves as the words stand now."""
        saved: Counter[str] = Counter()
        for pieces, count in zip(self._words, self._counts, strict=True):
            for piece in pieces:
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
        """Adds a word's pairs, or takes them away; returns them."""
        pieces = self._words[index]
        found = [pair for pair in pairwise(pieces) if self._piece_of(pair) is not None]
        for pair in found:
            self._pairs[pair] += sign * self._counts[index]
            homes = self._homes.setdefault(pair, set())
            homes.add(index) if sign > 0 else homes.discard(index)
        return {*found}

    def _piece_of(self, pair: tuple[str, str]) -> str | None:
        if pair not in self._made:
            self._made[pair] = self._join(*pair)
        return self._made[pair]


def _replaced(pieces: list[str], pair: tuple[str, str], piece: str) -> list[str]:
    """The pieces with every such pair, from the left, as one."""
    result: list[str] = []
    index = 0
    while index < len(pieces):
        is_pair = tuple(pieces[index : index + 2]) == pair
        result.append(piece if is_pair else pieces[index])
        index += 2 if is_pair else 1
    return result


def _with_pieces(base: Tokenizer, parts: dict[str, tuple[str, ...]], merges: list[tuple[str, str]]) -> Tokenizer:
    """The tokenizer with new pieces at its end."""
    content = json.loads(json.dumps(base.content))
    model: dict[str, Any] = content["model"]
    if model["type"] == "Unigram":
        _append_scored(model["vocab"], base, parts)
    else:
        # added tokens get ids after the model's pieces, unless they are among these
        model["vocab"] = {**model["vocab"], **base.vocabulary}
        model["vocab"] |= {piece: base.size + index for index, piece in enumerate(parts)}
    if model["type"] == "BPE":
        model["merges"] += [list(pair) for pair in merges]
    extended = Tokenizer.from_json(json.dumps(content, ensure_ascii=False))
    moved = next((piece for piece, token in base.vocabulary.items() if extended.vocabulary.get(piece) != token), None)
    if moved is not None:
        raise InputError(f"this tokenizer cannot be extended: its piece {moved!r} would get another id")
    return extended


def _append_scored(table: list[list[Any]], base: Tokenizer, parts: dict[str, tuple[str, ...]]) -> None:
    """Puts pieces at the end of a Unigram table, where places are ids; added tokens come to stand in it, too."""
    scores = dict(table)
    lowest = min(scores.values()) - 1000.0
    for index in range(len(table), base.size):
        table.append([base.pieces([index])[0] or f"<unused {index}>", lowest])
    for piece, inner in parts.items():
        table.append([piece, sum(scores[part] for part in inner) + _MARGIN * (len(inner) - 1)])


def _measured(
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


def first_difference(base: Tokenizer, other: Tokenizer) -> str | None:
    """Where `other` gives a text other ids than `base`, in words; None if it is `base`, or `base` with more pieces.

    An extension has every piece of its base under the same id, and prepares and splits text in the same way.
    """
    if base.hash == other.hash:
        return None
    pieces = {token: piece for piece, token in other.vocabulary.items()}
    for piece, token in sorted(base.vocabulary.items(), key=lambda entry: entry[1]):
        if pieces.get(token) != piece:
            there = repr(pieces[token]) if token in pieces else "missing"
            return f"id {token} is {there} instead of {piece!r}"
    for part in ("normalizer", "pre_tokenizer"):
        if base.content[part] != other.content[part]:
            return f"all pieces are the same, but its {part} is another"
    return _first_difference_of_models(base.content["model"], other.content["model"])


def _first_difference_of_models(base: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The same for what splits words into pieces."""
    for name, value in base.items():
        if name == "merges" and other.get(name, [])[: len(value)] != value:
            return "all pieces are the same, but it joins them otherwise"
        if name == "vocab" and isinstance(value, list) and other[name][: len(value)] != value:
            return "all pieces are the same, but their scores are others"
        if name not in ("merges", "vocab") and other.get(name) != value:
            return f"all pieces are the same, but its {name} is {other.get(name)!r} instead of {value!r}"
    return None


def new_pieces(base: Tokenizer, extended: Tokenizer) -> dict[int, list[int]]:
    """The id of every piece that an extension adds, with the ids that `base` has for its letters; none if it cannot."""
    added = {token["content"] for token in extended.content["added_tokens"]}
    nothing = {*base.special_ids, base.vocabulary.get(str(base.content["model"].get("unk_token")), -1)}
    found: dict[int, list[int]] = {}
    for piece, token in sorted(extended.vocabulary.items(), key=lambda entry: entry[1]):
        if piece not in base.vocabulary:
            # an added token is plain text, without the marks that pieces carry
            ids = base.encode_plain([piece])[0] if piece in added else base.spell(piece)
            found[token] = [part for part in ids if part not in nothing]
    return found
