"""The one exception for bad input: its message is a sentence a person can act on."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something a person gave (a setting, a file, a folder) cannot be used; the message names it and says what can."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """A clause for the end of an error sentence: the closest allowed word, or all of them.

    >>> nearest("widht", ["width", "heads"])
    "did you mean 'width'?"
    """
    names = sorted(set(allowed))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"allowed: {', '.join(names)}" if names else "nothing is allowed here"
