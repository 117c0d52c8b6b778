"""Exact match, F1 and best threshold against a plain implementation of the published SQuAD scorers."""

import math
import random
import re
import string

import numpy as np
import pytest

from bertsmith.errors import InputError
from bertsmith.tasks.spans import best_threshold, evaluate_answers, exact_match, f1, normalise_answer

WORDS = ["the", "The", "a", "an", "AN", "theory", "an-apple", "Denver", "Broncos", "24–10", "U.S.", "café", "naïve"]
WORDS += [
    "東京",
    "'the'",
    "(a)",
    "!",
    "…",
    "$12",
    "100%",
    "",
    "the\u00a0end",
    "a_the",
    "İstanbul",
    "ß",
    "50",
    "nth\tthe",
]


def _plain_normalise(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _plain_exact(predicted: str, golds: list[str]) -> int:
    return max(int(_plain_normalise(predicted) == _plain_normalise(gold)) for gold in golds)


def _plain_f1(predicted: str, golds: list[str]) -> float:
    best = 0.0
    for gold in golds:
        words, gold_words = _plain_normalise(predicted).split(), _plain_normalise(gold).split()
        if len(words) == 0 or len(gold_words) == 0:
            best = max(best, float(len(words) == len(gold_words)))
            continue
        same, rest = 0, list(gold_words)
        for word in words:
            if word in rest:
                rest.remove(word)
                same += 1
        if same:
            precision, recall = same / len(words), same / len(gold_words)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def _plain_golds(golds: list[str]) -> list[str]:
    return [gold for gold in golds if _plain_normalise(gold)] or [""]


def _plain_threshold(texts, scores, odds, has_answer):
    current = best = sum(not has for has in has_answer)
    threshold = 0.0
    for index in sorted(range(len(texts)), key=lambda index: odds[index]):
        if has_answer[index]:
            current += scores[index]
        elif texts[index]:
            current -= 1
        if current > best:
            best, threshold = current, odds[index]
    return 100 * best / len(texts), threshold


def _text(rng: random.Random) -> str:
    return rng.choice([" ", "  ", "-", ", "]).join(rng.choice(WORDS) for _ in range(rng.randint(0, 5)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Denver Broncos!", "denver broncos"),
        ("a theory of the an", "theory of"),
        ("a.", ""),
        ("the-end", "theend"),  # punctuation is removed before articles
        ("24–10", "24–10"),  # an en dash is not ASCII punctuation
        ("“the” end", "“ ” end"),
        ("", ""),
    ],
)
def test_answers_are_normalised(text: str, expected: str) -> None:
    assert normalise_answer(text) == expected


def test_random_answers_score_like_the_published_scorer() -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(5_000):
        golds = [_text(rng) for _ in range(rng.randint(0, 4))]
        predicted = rng.choice([*golds, _text(rng), _text(rng)])
        nonempty = _plain_golds(golds)
        assert exact_match(predicted, golds) == _plain_exact(predicted, nonempty)
        assert math.isclose(f1(predicted, golds), _plain_f1(predicted, nonempty), abs_tol=1e-12)
        seen.add((exact_match(predicted, golds), f1(predicted, golds) in (0.0, 1.0), nonempty == [""], predicted == ""))
    assert len(seen) == 7  # every possible combination occurred


def test_best_threshold_equals_the_published_scorer() -> None:
    rng = random.Random(2)
    for _ in range(500):
        count = rng.randint(1, 30)
        has_answer = [rng.random() < 0.5 for _ in range(count)]
        texts = [rng.choice(["", "x", "y"]) for _ in range(count)]
        scores = [rng.choice([0.0, 0.25, 1.0]) if has else 0.0 for has in has_answer]
        odds = [rng.choice([-5.0, -1.0, 0.0, 2.0, 1e9, rng.uniform(-9, 9)]) for _ in range(count)]
        has_text = np.array([text != "" for text in texts])
        ours = best_threshold(np.array(scores), np.array(odds), np.array(has_answer), has_text)
        assert ours == pytest.approx(_plain_threshold(texts, scores, odds, has_answer))


def test_metrics_of_questions_with_and_without_an_answer() -> None:
    evaluation = evaluate_answers(
        ["Denver", "", "wrong", ""],
        [["denver", "Denver Broncos"], [], [], ["Carolina Panthers"]],
        None,
        texts=["Denver", "noise", "wrong", "Carolina"],
        null_odds=[-3.0, 4.0, -1.0, 0.5],
    )
    metrics = evaluation.metrics
    assert metrics["f1"] == metrics["exact"] == 50
    assert metrics["has_answer_f1"] == metrics["has_answer_exact"] == 50
    assert metrics["no_answer_f1"] == metrics["no_answer_exact"] == 50
    # no answer everywhere scores 2, the first answer adds 1; "wrong" subtracts 1, "Carolina" adds 2/3
    assert metrics["best_f1"] == 75
    assert metrics["best_f1_threshold"] == -3
    assert evaluation.score == 50


def test_measure_computes_the_main_metric_of_a_subset() -> None:
    evaluation = evaluate_answers(["a b", "c", "x"], [["b"], ["c d"], ["y"]], None)
    assert evaluation.measure(np.array([0, 1, 2])) == evaluation.score
    assert evaluation.measure(np.array([1, 1])) == pytest.approx(200 / 3)
    assert evaluation.measure(np.array([2])) == 0
    assert math.isclose(evaluate_answers(["c"], [["c d"]], "exact").score, 0.0)


def test_unknown_metric_raises() -> None:
    with pytest.raises(InputError, match=r"task\.metric is 'accuracy'"):
        evaluate_answers(["a"], [["a"]], "accuracy")
