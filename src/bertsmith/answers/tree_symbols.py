"""The grammar of linearised trees: which symbols may follow, so that a search writes only trees of the words."""

from collections.abc import Container, Mapping
from typing import NamedTuple

from bertsmith.answers.trees import escape, surface

MAX_OPEN_RUN = 8
"""Constituents that may begin at one word; without a limit a search could open them for ever."""


def symbol_token(symbol: str) -> str:
    """Return a symbol as a token of the vocabulary, which no word can be mistaken for."""
    return f"<{symbol}>"


WORD_CLASSES = ("~0", "~A", "~", *(f"~{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"))
"""Symbols of rare words: with a digit, capitalised, others by their last letter."""


def word_symbol(word: str, frequent: Container[str]) -> str:
    """Return the symbol of a word: itself if it is frequent, otherwise its class.

    >>> [word_symbol(word, {"the", "-LRB-"}) for word in ("the", "-LRB-", "1,200", "Paris", "forged", "%")]
    ['=the', '=-LRB-', '~0', '~A', '~d', '~']
    """
    plain = plain_word(word)
    if plain in frequent:
        return f"={plain}"
    if any(letter.isdigit() for letter in plain):
        return "~0"
    if plain[0].isupper():
        return "~A"
    last = f"~{plain[-1]}"
    return last if last in WORD_CLASSES else "~"


def plain_word(word: str) -> str:
    """Return a word of a treebank or of a text in the form that symbols have: without brackets and quote styles."""
    return escape(surface(word))


class TreeState(NamedTuple):
    """A tree that is written up to some symbol; the start is `TreeState(words_left=n)`."""

    words_left: int
    open_labels: tuple[str, ...] = ()
    has_child: bool = False
    """Whether the innermost open constituent has a word or a constituent."""
    open_run: int = 0
    """Constituents opened since the last word or end of a constituent."""
    word_symbols: tuple[str, ...] = ()
    """Symbols of all words of the sentence, one after the other; empty if any symbol of a word may follow."""

    @property
    def next_word(self) -> str | None:
        """The only symbol of a word that may follow; None if there is no such symbol, or any may."""
        return self.word_symbols[-self.words_left] if self.word_symbols and self.words_left else None

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
        is_next = not self.word_symbols or symbol == self.next_word
        return self.words_left > 0 and bool(self.open_labels) and is_next

    def after(self, symbol: str) -> "TreeState":
        """Return the state after a symbol that is allowed."""
        if symbol.startswith("("):
            labels = (*self.open_labels, symbol[1:])
            return self._replace(open_labels=labels, has_child=False, open_run=self.open_run + 1)
        if symbol.startswith(")"):
            return self._replace(open_labels=self.open_labels[:-1], has_child=True, open_run=0)
        return self._replace(words_left=self.words_left - 1, has_child=True, open_run=0)

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that `allows` depends on."""
        last = self.open_labels[-1:]
        is_root, may_open = len(self.open_labels) == 1, self.open_run < MAX_OPEN_RUN
        return self.words_left > 0, last, is_root, self.has_child, may_open, self.next_word


def allowed_tokens(state: TreeState | None, symbols: Mapping[int, str], end: int) -> list[int]:
    """Return the tokens that may follow a state; only the end follows a complete tree, or no tree at all (None)."""
    if state is None or state.is_complete:
        return [end]
    return [token for token, symbol in symbols.items() if state.allows(symbol)]
