"""Constraints of decoding: the tokens that may follow, row by row."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bertsmith.answers.tree_symbols import TreeState, allowed_tokens


class Constraint(Protocol):
    """Tracks the rows of a search and restricts the tokens that may follow."""

    def restrict(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Advance every row by the token it was given; return log-probabilities of the next token, -inf if it must not
        follow.

        Log-probabilities are not normalised again: a hypothesis that the model expects to continue otherwise must not
        become likelier than one that it expects to continue as admitted.

        Shape: (rows,), (rows, vocabulary) -> (rows, vocabulary).
        """

    def repeat(self, times: int) -> None:
        """Make every row `times` rows, one after the other."""

    def select(self, rows: Tensor) -> None:
        """Continue with these rows."""


class TreeConstraint:
    """Admit only trees of the words of each row, which begins in its state; the first call gets the start tokens."""

    def __init__(self, states: Sequence[TreeState], symbols: Mapping[int, str], end: int) -> None:
        self.states: list[TreeState | None] = [*states]
        self.symbols, self.end = symbols, end
        self._is_started = False
        self._knows_words = any(state.word_symbols for state in states)
        self._words = torch.tensor([token for token, symbol in symbols.items() if not symbol.startswith(("(", ")"))])
        self._masks: dict[tuple[object, ...] | None, Tensor] = {}

    def restrict(self, tokens: Tensor, scores: Tensor) -> Tensor:
        if self._is_started:
            self.states = [self._after(*pair) for pair in zip(self.states, tokens.tolist(), strict=True)]
        self._is_started = True
        if self._knows_words:
            # the next word is known: score the decision that a word follows, not the model's guess of it
            words = self._words.to(scores.device)
            total = scores[:, words].logsumexp(-1, keepdim=True)
            scores = scores.index_copy(1, words, total.expand(-1, len(words)))
        allowed = torch.stack([self._mask(state, scores.shape[-1]) for state in self.states])
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def repeat(self, times: int) -> None:
        self.states = [state for state in self.states for _ in range(times)]

    def select(self, rows: Tensor) -> None:
        self.states = [self.states[row] for row in rows.tolist()]

    def _after(self, state: TreeState | None, token: int) -> TreeState | None:
        """Return the next state; None after the end, or on a beam that was filled with an inadmissible token."""
        symbol = self.symbols.get(token)
        return state.after(symbol) if state is not None and symbol is not None and state.allows(symbol) else None

    def _mask(self, state: TreeState | None, vocabulary: int) -> Tensor:
        key = None if state is None else state.key
        if key not in self._masks:
            mask = torch.zeros(vocabulary, dtype=torch.bool)
            mask[allowed_tokens(state, self.symbols, self.end)] = True
            self._masks[key] = mask
        return self._masks[key]
