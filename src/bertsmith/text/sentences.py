"""Rule-based sentence splitting: at line ends, and at full stops that are not part of a word."""

import re

# abbreviations whose full stop never ends a sentence, because a name or a number follows
_TITLES = """mr mrs ms mx messrs dr drs prof rev fr hon pres gov sen rep sgt lt cpl capt cmdr col gen maj adm brig supt
    st ste mt ft vs viz cf ca approx e.g i.e eg ie al resp bzw z.b d.h u.a"""
# abbreviations only if a number follows: No. 5, Fig. 3, pp. 12
_BEFORE_NUMBERS = """no nos nr fig figs eq eqs vol vols p pp pg ch chap sec sect art para app ver v op c b d r est circa
    jan feb mar apr jun jul aug sep sept oct nov dec"""
_IS_TITLE = frozenset(_TITLES.split())
_IS_BEFORE_NUMBERS = frozenset(_BEFORE_NUMBERS.split())

# a stop with closing quotes or brackets, then white space and the opening marks of the next sentence
_CANDIDATE = re.compile(
    r"""(?P<stop>[.!?…][.!?…\"'”’»)\]}]*)[^\S\n]+(?=[\"'“‘«„(\[{¿¡]*(?P<next>[^\W_]))""",
)
# the full-width stops of Chinese and Japanese and the danda of Indian scripts need no space after them; this is a
# separate pattern because an alternative inside the other one makes that search five times slower
_UNSPACED_STOPS = "。！？｡।"
_UNSPACED = re.compile(r"""([。！？｡।][。！？｡।」』”’）】》〉\"')\]]*)[^\S\n]*""")
_MAX_ABBREVIATION = 12  # characters


def split_sentences(document: str) -> list[str]:
    """Split a document into non-empty, stripped sentences.

    >>> split_sentences('Dr. A. Smith paid 3.50 euros. "Why?" he asked. 東京です。はい。')
    ['Dr. A. Smith paid 3.50 euros.', '"Why?" he asked.', '東京です。', 'はい。']
    """
    marked = _CANDIDATE.sub(_mark_boundary, document)
    if any(stop in document for stop in _UNSPACED_STOPS):
        marked = _UNSPACED.sub("\\1\n", marked)
    return [sentence for line in marked.splitlines() if (sentence := line.strip())]


def _mark_boundary(match: re.Match[str]) -> str:
    """Replace the space by a line end if a sentence ends there."""
    stop, following = match["stop"], match["next"]
    if following.islower() or (stop == "." and _belongs_to_word(match.string, match.start(), following)):
        return match[0]
    return stop + "\n"


def _belongs_to_word(text: str, end: int, following: str) -> bool:
    """Whether the full stop at `end` is part of the word before it."""
    earliest = max(0, end - _MAX_ABBREVIATION)
    words = text[earliest:end].split()
    if not words or text[end - 1].isspace():
        return False
    word = words[-1].lstrip("\"'“‘«„([{¿¡").lower()
    if len(word) > 6:
        return False
    if word.isdigit():
        # the number of a list entry, not a year at the end of a sentence
        start = end - len(word)
        return len(word) <= 3 and (start == 0 or text[start - 1] == "\n")
    if len(word) == 1:
        return word.isalpha() and (text[end - 1].isupper() or following.isdigit())
    if word in _IS_TITLE:
        return True
    if following.isdigit() and word in _IS_BEFORE_NUMBERS:
        return True
    # initials and the like: U.S., Ph.D., a.m.
    parts = word.split(".")
    return len(parts) > 1 and all(part.isalpha() and len(part) <= 2 for part in parts)
