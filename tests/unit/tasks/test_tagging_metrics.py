"""Chunk metrics against the published rules of conlleval, written as tables."""

from itertools import pairwise

import numpy as np
import pytest
from sklearn.metrics import accuracy_score

from bertsmith.answers.tagging import chunks, complete_labels, tagging_scheme, to_iob2
from bertsmith.errors import InputError
from bertsmith.tasks.tagging import evaluate_tags

# (previous tag, tag) at which a chunk of one type ends, or begins; S and B after E, which conlleval lacks, follow its
# BIOES ports
ENDS = {"BB", "BS", "BO", "IB", "IS", "IO", "EB", "EI", "EE", "ES", "EO", "SB", "SI", "SE", "SS", "SO"}
BEGINS = {"OB", "OI", "OE", "OS", "BB", "BS", "IB", "IS", "EB", "EI", "EE", "ES", "SB", "SI", "SE", "SS"}


def _conlleval_counts(gold_rows: list[list[str]], predicted_rows: list[list[str]]) -> tuple[int, int, int]:
    """Count correct, predicted and gold chunks in one pass over both columns, as conlleval does."""

    def split(tag: str) -> tuple[str, str]:
        return (tag[0], tag[2:]) if "-" in tag else (tag, "")

    def ends(before: tuple[str, str], now: tuple[str, str]) -> bool:
        return before[0] + now[0] in ENDS or (before[0] != "O" and before[1] != now[1])

    def begins(before: tuple[str, str], now: tuple[str, str]) -> bool:
        return before[0] + now[0] in BEGINS or (now[0] != "O" and before[1] != now[1])

    correct = predicted = total = 0
    for gold, guess in zip(gold_rows, predicted_rows, strict=True):
        before = guess_before = ("O", "")
        in_correct = False
        for gold_tag, guess_tag in zip([*gold, "O"], [*guess, "O"], strict=True):
            now, guess_now = split(gold_tag), split(guess_tag)
            if in_correct:
                is_end, is_guess_end = ends(before, now), ends(guess_before, guess_now)
                if is_end and is_guess_end and before[1] == guess_before[1]:
                    in_correct = False
                    correct += 1
                elif is_end != is_guess_end or now[1] != guess_now[1]:
                    in_correct = False
            is_begin, is_guess_begin = begins(before, now), begins(guess_before, guess_now)
            if is_begin and is_guess_begin and now[1] == guess_now[1]:
                in_correct = True
            total += is_begin
            predicted += is_guess_begin
            before, guess_before = now, guess_now
    return correct, predicted, total


def _sentences(positions: str, kinds: str, count: int, seed: int) -> tuple[list[list[str]], list[list[str]]]:
    """Random gold tags, mostly in invalid order, and predictions that differ at some positions."""
    random = np.random.default_rng(seed)
    tags = ["O", *(f"{position}-{kind}" for position in positions for kind in kinds)]
    gold = [random.choice(tags, random.integers(1, 12)).tolist() for _ in range(count)]
    rates = random.choice([0.05, 0.3, 0.9], count)
    predicted = [
        [random.choice(tags).item() if random.random() < rate else tag for tag in row]
        for row, rate in zip(gold, rates, strict=True)
    ]
    return gold, predicted


@pytest.mark.parametrize("kinds", ["X", "XY", "XYZ"])
@pytest.mark.parametrize("positions", ["BI", "I", "BIES", "IE"])
def test_metrics_equal_conlleval(positions: str, kinds: str) -> None:
    gold, predicted = _sentences(positions, kinds, 1500, seed=len(positions) * 10 + len(kinds))
    correct, found, total = _conlleval_counts(gold, predicted)
    evaluation = evaluate_tags(predicted, gold, None, has_chunks=True)
    assert evaluation.metric == "f1"
    assert evaluation.metrics["precision"] == pytest.approx(100 * correct / found, abs=1e-9)
    assert evaluation.metrics["recall"] == pytest.approx(100 * correct / total, abs=1e-9)
    precision, recall = correct / found, correct / total
    assert evaluation.score == pytest.approx(100 * 2 * precision * recall / (precision + recall), abs=1e-9)
    flat = [[tag for row in rows for tag in row] for rows in (gold, predicted)]
    assert evaluation.metrics["accuracy"] == pytest.approx(100 * accuracy_score(*flat), abs=1e-9)


def test_measure_computes_the_metric_of_a_sample_with_repetitions() -> None:
    gold, predicted = _sentences("BI", "XY", 60, seed=7)
    for metric in ("f1", "precision", "recall", "accuracy"):
        evaluation = evaluate_tags(predicted, gold, metric, has_chunks=True)
        assert evaluation.measure(np.arange(60)) == pytest.approx(evaluation.score)
        chosen = np.array([3, 3, 10, 41])
        sample = evaluate_tags([predicted[i] for i in chosen], [gold[i] for i in chosen], metric, has_chunks=True)
        assert evaluation.measure(chosen) == pytest.approx(sample.score)


def test_metrics_per_type() -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-LOC", "B-PER"]]
    metrics = evaluate_tags(predicted, gold, None, has_chunks=True).metrics
    assert metrics["precision_LOC"] == metrics["recall_LOC"] == metrics["f1_LOC"] == 100.0
    assert metrics["precision_PER"] == metrics["recall_PER"] == metrics["f1_PER"] == 0.0
    assert metrics["precision"] == 50.0
    assert metrics["recall"] == pytest.approx(200 / 3)
    assert metrics["accuracy"] == pytest.approx(400 / 6)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O I-A I-A O", [("A", 1, 3)]),
        ("I-A B-A I-A", [("A", 0, 1), ("A", 1, 3)]),
        ("B-A I-B", [("A", 0, 1), ("B", 1, 2)]),
        ("B-A B-A", [("A", 0, 1), ("A", 1, 2)]),
        ("S-A S-A B-B E-B", [("A", 0, 1), ("A", 1, 2), ("B", 2, 4)]),
        ("E-A I-A", [("A", 0, 1), ("A", 1, 2)]),
        ("U-A B-A L-A", [("A", 0, 1), ("A", 1, 3)]),
        ("B I O I", [("", 0, 2), ("", 3, 4)]),
        ("B-a-b I-a-b", [("a-b", 0, 2)]),
        ("O O", []),
        ("", []),
    ],
)
def test_chunks_of_tag_sequences(tags: str, expected: list[tuple[str, int, int]]) -> None:
    assert chunks(tags.split()) == expected


def test_score_without_chunks_is_0() -> None:
    assert evaluate_tags([["O"]], [["O"]], None, has_chunks=True).score == 0.0


def test_iob2_conversion_keeps_the_chunks() -> None:
    assert to_iob2(["I-A", "I-A", "B-A", "O", "I-B", "I-A"]) == ["B-A", "I-A", "B-A", "O", "B-B", "B-A"]
    for tags in _sentences("BI", "XY", 500, seed=3)[0]:
        changed = to_iob2(tags)
        assert chunks(changed) == chunks(tags)
        assert to_iob2(changed) == changed
        for before, tag in pairwise(["O", *changed]):
            assert tag[0] != "I" or before[1:] == tag[1:], changed  # I only follows a word of the same chunk


def test_scheme_detection() -> None:
    assert tagging_scheme({"O", "B-A", "I-A"}) == "iob"
    assert tagging_scheme({"O", "I-A"}) == "iob"
    assert tagging_scheme({"O", "B-A", "E-A"}) == "bioes"
    assert tagging_scheme({"O", "U-A", "L-A", "B-A"}) == "bioes"
    assert tagging_scheme({"NN", "VB", "O"}) == "plain"
    assert tagging_scheme({"O", "B-A", "NN"}) == "plain"
    assert tagging_scheme({"O"}) == "plain"


def test_labels_are_completed_with_all_prefixes() -> None:
    assert complete_labels({"O", "B-PER"}, "iob") == ("O", "B-PER", "I-PER")
    assert complete_labels({"S-A"}, "bioes") == ("O", "B-A", "I-A", "E-A", "S-A")
    assert complete_labels({"U-A"}, "bioes") == ("O", "B-A", "I-A", "L-A", "U-A")
    assert complete_labels({"VB", "NN"}, "plain") == ("NN", "VB")


def test_plain_tags_have_only_accuracy() -> None:
    evaluation = evaluate_tags([["NN", "VB"], ["NN"]], [["NN", "NN"], ["NN"]], None, has_chunks=False)
    assert evaluation.metrics == {"accuracy": pytest.approx(200 / 3)}
    assert evaluation.measure(np.array([0])) == 50.0
    with pytest.raises(InputError, match=r"task\.metric is 'f1'; allowed: accuracy"):
        evaluate_tags([["NN"]], [["NN"]], "f1", has_chunks=False)
