"""Multi-label classification: labels, weights, answers, and a training run."""

import numpy as np
import pytest
from helpers_choices import WORDS, encoding, finetune_small

from bertsmith.errors import InputError
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.multi_label import MultiLabel
from bertsmith.text.rows import table_of

ROWS = [
    {"text": "red rain", "labels": ["colour", "weather"]},
    {"text": "stone", "labels": []},
    {"text": "snow", "labels": ["weather"]},
    {"text": "wind", "labels": ["weather", "weather"]},
]
TASK = MultiLabel(label="labels")


def test_lists_of_labels_are_recognised() -> None:
    found = recognise(table_of(ROWS, "train"), None, [], {})
    assert found == {"kind": "multi_label", "text": "text", "label": "labels"}
    assert MultiLabel.find_columns({"text": "a", "label": "b"}) is None


def test_labels_targets_and_weights() -> None:
    task = TASK.resolve(table_of(ROWS, "train"))
    assert task.labels == ("colour", "weather")
    examples = task.examples(table_of(ROWS, "train"))
    targets = task.features(examples, encoding(WORDS)).targets["labels"]
    assert isinstance(targets, np.ndarray)
    assert targets.tolist() == [[1, 1], [0, 0], [0, 1], [0, 1]]
    assert task.objective(examples).weights == ()
    assert task.changed(label_weights="balanced").objective(examples).weights == pytest.approx((3, 1 / 3))
    assert task.notices(examples) == ["1 of 4 training rows have no label"]


def test_answers_are_labels_above_the_threshold() -> None:
    task = TASK.changed(labels=("colour", "weather"), threshold=0.7)
    examples = task.examples(table_of(ROWS[2:3], "dev"))
    outputs = [np.array([800.0, np.log(0.6 / 0.4)])]
    (answer,) = task.answers(examples, task.features(examples, encoding(WORDS)), outputs)
    assert answer["answer"] == ["colour"]
    assert answer["scores"] == pytest.approx({"colour": 1.0, "weather": 0.6})
    assert task.gold(examples[0]) == ["weather"]
    assert task.error(examples[0], answer) == pytest.approx(1.0)
    assert task.error(examples[0], {"answer": ["weather"], "scores": {}}) == 0.0


def test_strings_are_split_at_the_separator() -> None:
    rows = [{"text": "a", "labels": "x; y"}, {"text": "b", "labels": ""}]
    task = TASK.changed(separator=";").resolve(table_of(rows, "train"))
    assert [task.gold(example) for example in task.examples(table_of(rows, "train"))] == [["x", "y"], []]
    with pytest.raises(InputError, match=r"train row 0: 'labels' is the string 'x; y'.*task\.separator"):
        TASK.resolve(table_of(rows, "train"))


@pytest.mark.parametrize("value", [None, 3, ["a", None], [True], [""]])
def test_invalid_label_lists_raise(value: object) -> None:
    with pytest.raises(InputError, match=r"train row 4: 'labels' is .*; it must be a list of label names"):
        TASK.resolve(table_of([*ROWS, {"text": "a", "labels": value}], "train"))


def test_unknown_labels_raise() -> None:
    task = TASK.resolve(table_of(ROWS, "train"))
    with pytest.raises(InputError, match=r"dev row 0: 'labels' has 'colours', .*did you mean 'colour'\?"):
        task.examples(table_of([{"text": "a", "labels": ["colours"]}], "dev"))
    with pytest.raises(InputError, match=r"train: column 'labels' has no label in any row"):
        TASK.resolve(table_of(ROWS[1:2], "train"))


def test_training_on_multiple_labels() -> None:
    rows = [
        {"text": f"{a} {b}", "labels": [name for name in ("red", "iron") if name in (a, b)]}
        for a in WORDS[:6]
        for b in WORDS[:6]
    ]
    result = finetune_small(rows * 2, epochs=6, settings=["task.label_weights=balanced"], task="multi_label")
    assert result["metric"] == "micro_f1"
    assert result["score"] > 80
    assert result.predict(["red iron", "green blue"]) == [["iron", "red"], []]
