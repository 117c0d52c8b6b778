"""Cut the vocabulary of a tokenizer to the tokens that texts use and the tokens needed to encode any other text.

Tokens that must stay, by type of model:

    WordPiece   every single character, at the start of a word and inside one
    BPE         every single character or byte, and both parts of every merge that results in a token
    Unigram     every single character, the byte tokens, and one token of the lowest score, which determines the score
                of an unknown character

A text whose tokens all stay is tokenised as before, because the longest match, first merge or best score among all
tokens is unchanged among the remaining ones. Every text that could be tokenised still can.
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
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BATCH = 1000


@dataclass(frozen=True)
class Cut:
    """A tokenizer with a smaller vocabulary, and the old ids of its tokens."""

    tokenizer: Tokenizer
    ids: tuple[int, ...]
    """Old id of every token, in the order of the new ids."""

    @cached_property
    def new_ids(self) -> dict[int, int]:
        """Map from old to new ids."""
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
    """Return the sorted ids of the tokens to keep: required tokens and tokens counted `at_least` times.

    `tokens` limits their number: the most frequent tokens stay (ties: the lower id). A token that would exceed the
    limit together with the tokens it is merged from is skipped.
    """
    if at_least < 1:
        raise InputError(f"at_least is {at_least}; it must be at least 1")
    ids, parts = needed_tokens(base), _merge_parts(base)
    if tokens is not None and tokens < len(ids):
        raise InputError(
            f"tokens is {tokens}; this tokenizer needs {len(ids)} to encode any text; allowed: {len(ids)} or more"
        )
    frequent = np.flatnonzero(counts >= at_least)
    for token_id in frequent[np.argsort(-counts[frequent], kind="stable")].tolist():
        added = parts(token_id) - ids
        if tokens is None or len(ids) + len(added) <= tokens:
            ids |= added
    return sorted(ids)


def cut_tokenizer(base: Tokenizer, keep_ids: Collection[int]) -> Cut:
    """Cut a tokenizer to the tokens `keep_ids`, required tokens and the parts of their merges.

    New ids are contiguous: special tokens first, then the other tokens, both in their old order. Added tokens outside
    the model's vocabulary stay after it, as in every tokenizer.json.
    """
    unknown = sorted(set(keep_ids) - {*base.vocabulary.values()})
    if unknown:
        raise InputError(f"keep_ids contains {unknown[0]}, which is not an id of this tokenizer of size {base.size}")
    parts = _merge_parts(base)
    remaining = needed_tokens(base).union(*(parts(token_id) for token_id in keep_ids))
    special, inside = {*base.special_ids}, {*_model_vocabulary(base).values()}
    ids = sorted(remaining, key=lambda token_id: (token_id not in inside, token_id not in special, token_id))
    content = json.loads(json.dumps(base.content))
    new_ids = {old: new for new, old in enumerate(ids)}
    _renumber_model(content["model"], new_ids)
    for token in content["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    content["added_tokens"].sort(key=lambda token: token["id"])
    for ids_list, index in _template_ids(content["post_processor"]):
        ids_list[index] = new_ids[ids_list[index]]
    cut = Cut(Tokenizer.from_json(json.dumps(content, ensure_ascii=False)), tuple(ids))
    assert cut.tokenizer.vocabulary == {
        token: new_ids[token_id] for token, token_id in base.vocabulary.items() if token_id in new_ids
    }
    return cut


def needed_tokens(base: Tokenizer) -> set[int]:
    """Return the ids needed to tokenise every text that the tokenizer can tokenise."""
    model, vocabulary = base.content["model"], _model_vocabulary(base)
    if model["type"] not in KINDS:
        raise InputError(f"the tokenizer's model is {model['type']}; a vocabulary cut supports {', '.join(KINDS)}")
    needed = {*base.special_ids, *(token["id"] for token in base.content["added_tokens"])}
    needed |= {ids[index] for ids, index in _template_ids(base.content["post_processor"])}
    if model.get("unk_token") in vocabulary:
        needed.add(vocabulary[model["unk_token"]])
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    for token, token_id in vocabulary.items():
        letters = token.removeprefix(prefix).removesuffix(suffix)
        is_single = len(letters) <= 1 or len(token) == 1 or _BYTE_TOKEN.fullmatch(token)
        if is_single or (model["type"] == "WordPiece" and not _has_all_letters(token, prefix, vocabulary)):
            needed.add(token_id)
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]]
        needed.add(scores.index(min(scores)))
        if model["unk_id"] is not None:
            needed.add(model["unk_id"])
    return needed


def changed_tokens(base: Tokenizer, cut: Cut, texts: Sequence[str]) -> tuple[int, int]:
    """Return the number of tokens of texts that change (in id or offsets), and their total number."""
    changed = total = 0
    remains = np.zeros(base.size, dtype=bool)
    remains[list(cut.ids)] = True
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        rows = base.encode_plain(batch)
        total += sum(map(len, rows))
        # other texts are tokenised as before
        affected = [text for text, row in zip(batch, rows, strict=True) if not remains[row].all()]
        before, after = base.encode_offsets(affected), cut.tokenizer.encode_offsets(affected)
        for (old_ids, old_offsets), (new_ids, new_offsets) in zip(before, after, strict=True):
            old_tokens = Counter(zip(old_ids.tolist(), map(tuple, old_offsets.tolist()), strict=True))
            mapped = (cut.ids[token_id] for token_id in new_ids.tolist())
            changed += (old_tokens - Counter(zip(mapped, map(tuple, new_offsets.tolist()), strict=True))).total()
    return changed, total


def _model_vocabulary(base: Tokenizer) -> dict[str, int]:
    """Return the tokens of the model, without added tokens that are not part of it."""
    vocab = base.content["model"]["vocab"]
    return {token: index for index, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab


def _has_all_letters(token: str, prefix: str, vocabulary: Mapping[str, int]) -> bool:
    """Whether each character of a WordPiece token is itself a token, as usual in such vocabularies."""
    mark = prefix if token.startswith(prefix) else ""
    letters = token.removeprefix(prefix)
    return mark + letters[0] in vocabulary and all(prefix + letter in vocabulary for letter in letters[1:])


def _merge_parts(base: Tokenizer) -> Callable[[int], set[int]]:
    """Return a function from an id to itself and, recursively, the ids of the tokens it is merged from."""
    model, vocabulary = base.content["model"], _model_vocabulary(base)
    if model["type"] != "BPE":
        return lambda token_id: {token_id}
    prefix = model.get("continuing_subword_prefix") or ""
    parents: dict[int, set[int]] = {}
    for left, right in model["merges"]:
        # a token may result from several merges, depending on the word
        merged = vocabulary[left + right.removeprefix(prefix)]
        parents.setdefault(merged, set()).update((vocabulary[left], vocabulary[right]))

    def closure(token_id: int) -> set[int]:
        ids, queue = {token_id}, [token_id]
        while queue:
            new = parents.get(queue.pop(), set()) - ids
            ids |= new
            queue += new
        return ids

    return closure


def _renumber_model(model: TokenizerContent, new_ids: Mapping[int, int]) -> None:
    if model["type"] == "Unigram":
        rows = {new_ids[old]: row for old, row in enumerate(model["vocab"]) if old in new_ids}
        model["vocab"] = [rows[new] for new in sorted(rows)]
        if model["unk_id"] is not None:
            model["unk_id"] = new_ids[model["unk_id"]]
        return
    model["vocab"] = {token: new_ids[old] for token, old in model["vocab"].items() if old in new_ids}
    if model["type"] == "BPE":
        prefix = model.get("continuing_subword_prefix") or ""
        known = model["vocab"]
        model["merges"] = [
            [left, right] for left, right in model["merges"] if left + right.removeprefix(prefix) in known
        ]


def _template_ids(processor: TokenizerContent | None) -> Iterator[tuple[list[int], int]]:
    """Yield the locations of special token ids in a post-processor: a list and an index in it."""
    if processor is None:
        return
    for inner in processor.get("processors", ()):
        yield from _template_ids(inner)
    for token in processor.get("special_tokens", {}).values():
        yield from ((token["ids"], index) for index in range(len(token["ids"])))
    yield from ((processor[role], 1) for role in ("cls", "sep") if role in processor)
