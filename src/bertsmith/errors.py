"""InputError, the exception for invalid user input, and parts of its message."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Invalid user input (a setting, a file, a folder); the message names it and states what is allowed."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return the end of an error message: the closest allowed word, or all allowed words.

    >>> nearest("widht", ["width", "heads"])
    "did you mean 'width'?"
    """
    names = sorted(set(allowed))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"allowed: {', '.join(names)}" if names else "nothing is allowed here"
