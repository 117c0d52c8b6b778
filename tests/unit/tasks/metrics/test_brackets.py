"""Bracket scores by EVALB's rules, with the cases of its own sample."""

import numpy as np
import pytest

from bertsmith.answers.trees import leaves, read_tree, write_tree
from bertsmith.tasks.metrics.brackets import BracketErrors, evaluate_trees, right_branching, score_tree

GOLD = "(S (A (P this)) (B (Q is) (A (R a) (T test))))"


def counts(gold: str, predicted: str) -> tuple[int, int, int, int]:
    score = score_tree(read_tree(gold), read_tree(predicted))
    return score.matched.total(), score.gold.total(), score.predicted.total(), score.crossing


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        (GOLD, (4, 4, 4, 0)),
        ("(S (A (P this)) (B (Q is) (C (R a) (T test))))", (3, 4, 4, 0)),
        ("(S (A (P this)) (B (Q is) (R a) (A (T test))))", (3, 4, 4, 0)),
        ("(S (A (P this) (Q is)) (A (R a) (T test)))", (2, 4, 3, 1)),
        ("(S (P this) (Q is) (R a) (T test))", (1, 4, 1, 0)),
        ("(S (A (P this)) (B (Q is) (A (A (R a) (T test)))))", (4, 4, 5, 0)),
        ("(S (A (P this)) (B (Q is) (A (A (A (A (A (R a) (T test))))))))", (4, 4, 8, 0)),
    ],
)
def test_cases_of_the_sample_of_evalb(predicted: str, expected: tuple[int, ...]) -> None:
    assert counts(GOLD, predicted) == expected


def test_punctuation_is_deleted_by_tag_and_top_is_not_counted() -> None:
    gold = "(TOP (S (NP (NN a)) (, ,) (VP (VB b)) (X (. .))))"
    assert counts(gold, "(TOP (S (NP (XX a) (XX ,)) (VP (XX b) (XX .))))") == (3, 3, 3, 0)
    # a comma tagged as a noun counts
    assert counts("(S (NP (NN ,)) (VP (VB b)))", "(S (NP (XX ,)) (VP (XX b)))") == (3, 3, 3, 0)


def test_prt_equals_advp() -> None:
    assert counts("(S (PRT (RP up)) (NN a))", "(S (ADVP (RP up)) (NN a))") == (2, 2, 2, 0)


def test_metrics_are_sums_over_sentences() -> None:
    scores = [
        score_tree(read_tree(GOLD), read_tree(GOLD)),
        score_tree(read_tree(GOLD), read_tree("(S (P this) (Q is) (R a) (T test))")),
    ]
    evaluation = evaluate_trees(scores, None)
    assert evaluation.metrics["precision"] == 100
    assert evaluation.metrics["recall"] == pytest.approx(100 * 5 / 8)
    assert evaluation.score == pytest.approx(100 * 10 / 13)
    assert evaluation.metrics["exact_match"] == 50
    assert evaluation.measure is not None
    assert evaluation.measure(np.array([1, 1])) == pytest.approx(40)


def test_errors_are_counted_by_kind_and_label() -> None:
    wrong = "(S (A (P this)) (C (Q is) (R a) (A (T test))))"
    errors = BracketErrors.of([score_tree(read_tree(GOLD), read_tree(wrong))])
    assert errors.kinds == {"B labelled C": 1, "A missing": 1, "A added": 1}
    assert errors.labels["A"].rates == (50.0, 50.0, 50.0)
    assert errors.labels["B"].rates == (0.0, 0.0, 0.0)


def test_right_branching_baseline() -> None:
    words = list(leaves(read_tree("(S (NN Anna) (VBZ is) (IN in) (NNP New) (NNP Rome) (. .))")))
    expected = "(S (NN Anna) (VP (VBZ is) (PP (IN in) (NP (NNP New) (NNP Rome)))) (. .))"
    assert write_tree(right_branching(words)) == expected
    assert write_tree(right_branching(words[-1:])) == "(S (. .))"
