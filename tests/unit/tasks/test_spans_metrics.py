"""Exact match and F1 of answers, and the best threshold, against a transcription of what SQuAD's scorers publish."""

import math
import random
import re
import string

import numpy as np
import pytest

from bertsmith.errors import InputError
from bertsmith.tasks.spans import best_threshold, evaluate_answers, exact, f1, normalised

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


def _plain_normalised(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _plain_exact(said: str, golds: list[str]) -> int:
    return max(int(_plain_normalised(said) == _plain_normalised(gold)) for gold in golds)


def _plain_f1(said: str, golds: list[str]) -> float:
    best = 0.0
    for gold in golds:
        own, other = _plain_normalised(said).split(), _plain_normalised(gold).split()
        if len(own) == 0 or len(other) == 0:
            best = max(best, float(len(own) == len(other)))
            continue
        same, left = 0, list(other)
        for word in own:
            if word in left:
                left.remove(word)
                same += 1
        if same:
            precision, recall = same / len(own), same / len(other)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def _plain_golds(golds: list[str]) -> list[str]:
    return [gold for gold in golds if _plain_normalised(gold)] or [""]


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
        ("the-end", "theend"),  # punctuation goes first, so this is no article any more
        ("24–10", "24–10"),  # an en dash is no ASCII punctuation
        ("“the” end", "“ ” end"),
        ("", ""),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalised(text) == expected


def test_random_answers_score_as_published() -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(5_000):
        golds = [_text(rng) for _ in range(rng.randint(0, 4))]
        said = rng.choice([*golds, _text(rng), _text(rng)])
        right = _plain_golds(golds)
        assert exact(said, golds) == _plain_exact(said, right)
        assert math.isclose(f1(said, golds), _plain_f1(said, right), abs_tol=1e-12)
        seen.add((exact(said, golds), f1(said, golds) in (0.0, 1.0), right == [""], said == ""))
    assert len(seen) == 7  # all the ways they can come out did


def test_best_threshold_as_published() -> None:
    rng = random.Random(2)
    for _ in range(500):
        count = rng.randint(1, 30)
        has_answer = [rng.random() < 0.5 for _ in range(count)]
        texts = [rng.choice(["", "x", "y"]) for _ in range(count)]
        scores = [rng.choice([0.0, 0.25, 1.0]) if has else 0.0 for has in has_answer]
        odds = [rng.choice([-5.0, -1.0, 0.0, 2.0, 1e9, rng.uniform(-9, 9)]) for _ in range(count)]
        said = np.array([text != "" for text in texts])
        ours = best_threshold(np.array(scores), np.array(odds), np.array(has_answer), said)
        assert ours == pytest.approx(_plain_threshold(texts, scores, odds, has_answer))


def test_figures_apart_for_questions_with_and_without_an_answer() -> None:
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
    # null everywhere scores 2, the first answer lifts it to 3; "wrong" costs 1, "Carolina" gives back 2/3
    assert metrics["best_f1"] == 75
    assert metrics["best_f1_threshold"] == -3
    assert evaluation.score == 50


def test_measure_is_the_main_figure_over_a_sample() -> None:
    evaluation = evaluate_answers(["a b", "c", "x"], [["b"], ["c d"], ["y"]], None)
    assert evaluation.measure(np.array([0, 1, 2])) == evaluation.score
    assert evaluation.measure(np.array([1, 1])) == pytest.approx(200 / 3)
    assert evaluation.measure(np.array([2])) == 0
    assert math.isclose(evaluate_answers(["c"], [["c d"]], "exact").score, 0.0)


def test_an_unknown_metric_is_named() -> None:
    with pytest.raises(InputError, match=r"task\.metric is 'accuracy'"):
        evaluate_answers(["a"], [["a"]], "accuracy")
