"""How tags mark stretches of words: which scheme they follow, and the chunks they stand for.

B begins a chunk and I continues it (IOB2; in IOB1 only a chunk right after one of its own type begins with B); in BIOES
E ends it and S is one of a single word. O stands outside. BILOU is BIOES with L for E and U for S.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Scheme = Literal["iob", "bioes", "plain"]

OUTSIDE = "O"
_SAME = {"L": "E", "U": "S"}
_PLACES = {"iob": "BI", "bioes": "BIES"}


class Chunk(NamedTuple):
    """A stretch of words of one type: from word `begin` to before word `end`."""

    type: str
    begin: int
    end: int


def tag_parts(tag: str) -> tuple[str, str]:
    """The place in a chunk that a tag names and the chunk's type, which may be empty: B-PER gives B and PER."""
    place, _, kind = tag.partition("-")
    return _SAME.get(place, place), kind


def scheme_of(tags: Iterable[str]) -> Scheme:
    """The scheme of a set of tags; "plain" where they mark no chunks, as parts of speech do not."""
    places = {tag_parts(tag)[0] for tag in tags if tag != OUTSIDE}
    if not places or not places <= set("BIES"):
        return "plain"
    return "iob" if places <= set("BI") else "bioes"


def whole_labels(tags: Iterable[str], scheme: Scheme) -> tuple[str, ...]:
    """The labels to choose among: those seen, and with each type of chunk all of its places.

    A type whose chunks all had one word in training may have longer ones elsewhere.
    """
    seen = set(tags)
    if scheme == "plain":
        return tuple(sorted(seen))
    letters = {"E": "L", "S": "U"} if {tag.partition("-")[0] for tag in seen} & {"L", "U"} else {}
    kinds = sorted({tag.partition("-")[2] for tag in seen if tag != OUTSIDE})
    places = [letters.get(place, place) for place in _PLACES[scheme]]
    return (OUTSIDE, *(f"{place}-{kind}" if kind else place for kind in kinds for place in places))


def chunks(tags: Sequence[str]) -> list[Chunk]:
    """The chunks of a sentence, read as conlleval reads them.

    B and S always begin one; I and E do so after O, after the end of a chunk, and where the type changes. A chunk ends
    where another begins, at O, and at the end of the sentence.
    """
    found: list[Chunk] = []
    begin, before, kind_before = 0, OUTSIDE, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        place, kind = tag_parts(tag)
        begins = place != OUTSIDE and (place in "BS" or before in "OES" or kind != kind_before)
        if before != OUTSIDE and (begins or place == OUTSIDE):
            found.append(Chunk(kind_before, begin, index))
        if begins:
            begin = index
        before, kind_before = place, kind
    return found


def as_iob2(tags: Sequence[str]) -> list[str]:
    """Tags in IOB1 or IOB2 as IOB2: the same chunks, the first word of each with B."""
    changed = list(tags)
    for kind, begin, _ in chunks(tags):
        changed[begin] = f"B-{kind}" if kind else "B"
    return changed
