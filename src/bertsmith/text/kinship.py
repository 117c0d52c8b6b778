"""Whether one tokenizer is another, or an extension of it, and what the new pieces of an extension are made of."""

from typing import Any

from bertsmith.text.tokenizer import Tokenizer


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
