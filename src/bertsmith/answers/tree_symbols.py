"""The grammar of linearised trees: which symbols may follow, so that a search writes only trees of the words."""

from collections.abc import Mapping
from typing import NamedTuple

MAX_OPEN_RUN = 8
"""Constituents that may begin at one word; without a limit a search could open them for ever."""


def symbol_token(symbol: str) -> str:
    """Return a symbol as a token of the vocabulary, which no word can be mistaken for."""
    return f"<{symbol}>"


class TreeState(NamedTuple):
    """A tree that is written up to some symbol; the start is `TreeState(words_left=n)`."""

    words_left: int
    open_labels: tuple[str, ...] = ()
    has_child: bool = False
    """Whether the innermost open constituent has a word or a constituent."""
    open_run: int = 0
    """Constituents opened since the last word or end of a constituent."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return not self.words_left and not self.open_labels

    def allows(self, symbol: str) -> bool:
        """Whether a symbol may follow: every word in order, no empty constituent, one root that closes last."""
        if symbol.startswith("("):
            return (
                self.words_left > 0 and self.open_run < MAX_OPEN_RUN and (bool(self.open_labels) or not self.has_child)
            )
        if symbol.startswith(")"):
            is_last = len(self.open_labels) == 1
            is_own = bool(self.open_labels) and self.open_labels[-1] == symbol[1:]
            return is_own and self.has_child and not (is_last and self.words_left)
        return self.words_left > 0 and bool(self.open_labels)

    def after(self, symbol: str) -> "TreeState":
        """Return the state after a symbol that is allowed."""
        if symbol.startswith("("):
            return TreeState(self.words_left, (*self.open_labels, symbol[1:]), False, self.open_run + 1)
        if symbol.startswith(")"):
            return TreeState(self.words_left, self.open_labels[:-1], True, 0)
        return TreeState(self.words_left - 1, self.open_labels, True, 0)

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that `allows` depends on."""
        last = self.open_labels[-1:]
        return self.words_left > 0, last, len(self.open_labels) == 1, self.has_child, self.open_run < MAX_OPEN_RUN


def allowed_tokens(state: TreeState | None, symbols: Mapping[int, str], end: int) -> list[int]:
    """Return the tokens that may follow a state; only the end follows a complete tree, or no tree at all (None)."""
    if state is None or state.is_complete:
        return [end]
    return [token for token, symbol in symbols.items() if state.allows(symbol)]
