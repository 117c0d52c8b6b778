"""Cut the vocabulary of a tokenizer to the tokens that texts use and those needed to spell any other text.

Tokens that must stay, by type of model:

    WordPiece   every single character, at the start of a word and inside one
    BPE         every single character or byte; and both parts of every merge that results in a token
    Unigram     every single character, the byte tokens, and one token of the lowest score, which determines the score
                of an unknown character

A text whose tokens all stay is tokenised as before: the longest match, the first merge or the best score of all tokens
is also that of the remaining ones. Every text that could be tokenised still can.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bertsmith.errors import InputError
from bertsmith.text.tokenizer import Tokenizer, TokenizerContent

KINDS = ("BPE", "Unigram", "WordPiece")
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BATCH = 1000


@dataclass(frozen=True)
class Cut:
    """A tokenizer with a smaller vocabulary, and the old ids of its tokens."""

    tokenizer: Tokenizer
    ids: tuple[int, ...]
    """The old id of every token, in the order of the new ids."""

    @cached_property
    def new_ids(self) -> dict[int, int]:
        """New id of every old id that remains."""
        return {old: new for new, old in enumerate(self.ids)}


def token_counts(base: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Count the occurrences of each token in texts, special tokens included.

    Shape: (size,), int64
    """
    counts = np.zeros(base.size, dtype=np.int64)
    for start in range(0, len(texts), _BATCH):
        rows = base.encode(texts[start : start + _BATCH], padding=False)["input_ids"]
        counts += np.bincount(np.concatenate(rows), minlength=base.size)
    return counts


def used_tokens(base: Tokenizer, counts: np.ndarray, *, at_least: int = 1, tokens: int | None = None) -> list[int]:
    """Ids of the tokens to keep, sorted: tokens that must stay and tokens counted `at_least` times.

    `pieces` limits their number: the most frequent tokens stay (ties: the lower id). A token that would exceed the
    limit together with the tokens it is merged from is skipped.
    """
    if at_least < 1:
        raise InputError(f"at_least is {at_least}; it must be at least 1")
    kept, parts = needed_tokens(base), _merge_parts(base)
    if tokens is not None and tokens < len(kept):
        raise InputError(f"tokens is {tokens}; this tokenizer needs {len(kept)} to spell any text, allowed: as many")
    frequent = np.flatnonzero(counts >= at_least)
    for token in frequent[np.argsort(-counts[frequent], kind="stable")].tolist():
        added = parts(token) - kept
        if tokens is None or len(kept) + len(added) <= tokens:
            kept |= added
    return sorted(kept)


def cut_tokenizer(base: Tokenizer, kept: Collection[int]) -> Cut:
    """Cut a tokenizer to these tokens, tokens that must stay and the parts of their merges.

    New ids are contiguous: special tokens first, then the other tokens, both in their old order. Added tokens outside
    the model's table stay after it, as in every tokenizer.json.
    """
    outside = sorted(set(kept) - {*base.vocabulary.values()})
    if outside:
        raise InputError(f"kept holds the id {outside[0]}, which is no piece of this tokenizer of {base.size}")
    parts = _merge_parts(base)
    chosen = needed_tokens(base).union(*(parts(token) for token in kept))
    special, inside = {*base.special_ids}, {*_table(base).values()}
    ids = sorted(chosen, key=lambda token: (token not in inside, token not in special, token))
    content = json.loads(json.dumps(base.content))
    new_ids = {old: new for new, old in enumerate(ids)}
    _renumber_model(content["model"], new_ids)
    for token in content["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    content["added_tokens"].sort(key=lambda token: token["id"])
    for holder, key in _frame_ids(content["post_processor"]):
        holder[key] = new_ids[holder[key]]
    cut = Cut(Tokenizer.from_json(json.dumps(content, ensure_ascii=False)), tuple(ids))
    assert cut.tokenizer.vocabulary == {
        piece: new_ids[token] for piece, token in base.vocabulary.items() if token in new_ids
    }
    return cut


def needed_tokens(base: Tokenizer) -> set[int]:
    """Ids that are needed to tokenise any text that the tokenizer can tokenise."""
    model, table = base.content["model"], _table(base)
    if model["type"] not in KINDS:
        raise InputError(f"the tokenizer's model is {model['type']}; allowed for a cut: {', '.join(KINDS)}")
    needed = {*base.special_ids, *(token["id"] for token in base.content["added_tokens"])}
    needed |= {holder[key] for holder, key in _frame_ids(base.content["post_processor"])}
    if model.get("unk_token") in table:
        needed.add(table[model["unk_token"]])
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    for piece, token in table.items():
        letters = piece.removeprefix(prefix).removesuffix(suffix)
        is_single = len(letters) <= 1 or len(piece) == 1 or _BYTE_PIECE.fullmatch(piece)
        if is_single or (model["type"] == "WordPiece" and not _is_spelled(piece, prefix, table)):
            needed.add(token)
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]]
        needed.add(scores.index(min(scores)))
        if model["unk_id"] is not None:
            needed.add(model["unk_id"])
    return needed


def changed_tokens(base: Tokenizer, cut: Cut, texts: Sequence[str]) -> tuple[int, int]:
    """Number of tokens of texts that change (another token or other characters), and their total number."""
    changed = total = 0
    is_kept = np.zeros(base.size, dtype=bool)
    is_kept[list(cut.ids)] = True
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        rows = base.encode_plain(batch)
        total += sum(map(len, rows))
        # the others are split as before
        touched = [text for text, row in zip(batch, rows, strict=True) if not is_kept[row].all()]
        olds, news = base.encode_offsets(touched), cut.tokenizer.encode_offsets(touched)
        for (old_ids, old_positions), (new_ids, new_positions) in zip(olds, news, strict=True):
            before = Counter(zip(old_ids.tolist(), map(tuple, old_positions.tolist()), strict=True))
            back = (cut.ids[token] for token in new_ids.tolist())
            changed += (before - Counter(zip(back, map(tuple, new_positions.tolist()), strict=True))).total()
    return changed, total


def _table(base: Tokenizer) -> dict[str, int]:
    """Tokens of the model, without added tokens that are not part of it."""
    vocab = base.content["model"]["vocab"]
    return {piece: index for index, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab


def _is_spelled(piece: str, prefix: str, table: Mapping[str, int]) -> bool:
    """Whether each character of a WordPiece is a token, as is usual in such vocabularies."""
    mark = prefix if piece.startswith(prefix) else ""
    letters = piece.removeprefix(prefix)
    return mark + letters[0] in table and all(prefix + letter in table for letter in letters[1:])


def _merge_parts(base: Tokenizer) -> Callable[[int], set[int]]:
    """id → itself and, recursively, the ids of the tokens it is merged from."""
    model, table = base.content["model"], _table(base)
    if model["type"] != "BPE":
        return lambda token: {token}
    prefix = model.get("continuing_subword_prefix") or ""
    parents: dict[int, set[int]] = {}
    for left, right in model["merges"]:
        # a token may result from several merges, depending on the word
        parents.setdefault(table[left + right.removeprefix(prefix)], set()).update((table[left], table[right]))

    def closed(token: int) -> set[int]:
        found, waiting = {token}, [token]
        while waiting:
            new = parents.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    return closed


def _renumber_model(model: TokenizerContent, new_ids: Mapping[int, int]) -> None:
    if model["type"] == "Unigram":
        rows = {new_ids[old]: row for old, row in enumerate(model["vocab"]) if old in new_ids}
        model["vocab"] = [rows[new] for new in sorted(rows)]
        if model["unk_id"] is not None:
            model["unk_id"] = new_ids[model["unk_id"]]
        return
    model["vocab"] = {piece: new_ids[old] for piece, old in model["vocab"].items() if old in new_ids}
    if model["type"] == "BPE":
        prefix = model.get("continuing_subword_prefix") or ""
        known = model["vocab"]
        model["merges"] = [
            [left, right] for left, right in model["merges"] if left + right.removeprefix(prefix) in known
        ]


def _frame_ids(processor: TokenizerContent | None) -> Iterator[tuple[list[int], int]]:
    """Where the ids of the special tokens around a text are stored: lists and indices in them."""
    if processor is None:
        return
    for inner in processor.get("processors", ()):
        yield from _frame_ids(inner)
    for token in processor.get("special_tokens", {}).values():
        yield from ((token["ids"], index) for index in range(len(token["ids"])))
    yield from ((processor[role], 1) for role in ("cls", "sep") if role in processor)
