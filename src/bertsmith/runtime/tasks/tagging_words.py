"""Running text → words with their places, for models that tag words."""

import re
import unicodedata

# read off the shape of a text: a letter or digit is "w", space " ", any other character itself
_WORD = re.compile(
    r"(?:w\.){2,}(?!w)"  # U.S.
    r"|w+(?:[-.,/:&@_’']w+)*"  # all-rounder, 1,000, 12:30, O'Brien
    r"|(\S)\1*"  # a mark, or one several times over: …, --
)
_CLITIC = re.compile(r"(?<=\w)['’](?:s|m|d|re|ve|ll)\Z", re.IGNORECASE)


def split_words(text: str) -> list[tuple[int, int]]:
    """Where each word of a text begins and ends: by spaces, marks apart from letters, and as newswire has it 's alone.

    >>> text = "Ann's U.S. trip (2 days) cost $1,000."
    >>> [text[begin:end] for begin, end in split_words(text)]
    ['Ann', "'s", 'U.S.', 'trip', '(', '2', 'days', ')', 'cost', '$', '1,000', '.']
    """
    found = []
    for match in _WORD.finditer("".join(map(_shape, text))):
        begin, end = match.span()
        clitic = _CLITIC.search(text, begin, end)
        if clitic is not None:
            found += [(begin, clitic.start()), (clitic.start(), end)]
        else:
            found.append((begin, end))
    return found


def _shape(character: str) -> str:
    if character.isspace():
        return " "
    # marks of combination, numbers of any script and joiners without width belong to words
    category = unicodedata.category(character)
    return "w" if category[0] in "LMN" or category == "Cf" else character
