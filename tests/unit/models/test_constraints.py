"""Constraints of decoding."""

import torch

from bertsmith.answers.tree_symbols import TreeState
from bertsmith.models.constraints import TreeConstraint

SYMBOLS = {1: "(S", 2: ")S", 3: "=iron", 4: "~0"}
END = 0


def test_inadmissible_tokens_are_excluded_and_others_keep_their_probabilities() -> None:
    scores = torch.randn(1, 6, dtype=torch.float64).log_softmax(-1)
    constraint = TreeConstraint([TreeState(2)], {1: "(S", 2: ")S", 3: "XX"}, END)
    first = constraint.restrict(torch.tensor([5]), scores)
    assert first.isfinite().nonzero().tolist() == [[0, 1]]
    second = constraint.restrict(torch.tensor([1]), scores)
    assert second.isfinite().nonzero().tolist() == [[0, 1], [0, 3]]
    assert torch.equal(second[0, [1, 3]], scores[0, [1, 3]])


def test_known_word_has_the_probability_that_any_word_follows() -> None:
    scores = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    states = [TreeState(1, word_symbols=("=iron",)), TreeState(2, word_symbols=("~0", "=iron"))]
    constraint = TreeConstraint(states, SYMBOLS, END)
    constraint.restrict(torch.tensor([5, 5]), scores)
    restricted = constraint.restrict(torch.tensor([1, 1]), scores)
    any_word = scores[:, [3, 4]].exp().sum(-1).log()
    torch.testing.assert_close(restricted[[0, 1], [3, 4]], any_word)
    assert restricted.isfinite().nonzero().tolist() == [[0, 1], [0, 3], [1, 1], [1, 4]]
    assert torch.equal(restricted[:, 1], scores[:, 1])
