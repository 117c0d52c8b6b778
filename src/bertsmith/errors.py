"""InputError, the exception for invalid user input, and parts of its message."""

import difflib
from collections.abc import Iterable

MAX_SHOWN = 80
"""Characters of a value, such as a label, in a message."""


class InputError(ValueError):
    """Invalid user input (a setting, a file, a folder); the message names it and states what is allowed."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def shorten(text: str, length: int) -> str:
    """Return at most `length` characters of a text; "…" marks a cut.

    >>> shorten("a long label", 7)
    'a long…'
    """
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}…"


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return the end of an error message: the closest allowed word, or all allowed words.

    >>> nearest("widht", ["width", "heads"])
    "did you mean 'width'?"
    """
    names = sorted(set(allowed))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {shorten(close[0], MAX_SHOWN)!r}?"
    shown = ", ".join(shorten(name, MAX_SHOWN) for name in names)
    return f"allowed: {shown}" if names else "nothing is allowed here"
