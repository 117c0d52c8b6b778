"""Regression: targets, scaling, and a training run."""

import numpy as np
import pytest
from helpers_choices import WORDS, encoding, finetune_small

from bertsmith.errors import InputError
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.regression import Regression
from bertsmith.text.rows import table_of

ROWS = [{"sentence1": "red", "sentence2": "iron", "label": 5.0}, {"sentence1": "a", "sentence2": "b", "label": 1}]
TASK = Regression(text="sentence1", pair="sentence2")


def test_float_labels_are_recognised() -> None:
    found = recognise(table_of(ROWS, "train"), None, [], {})
    assert found == {"kind": "regression", "text": "sentence1", "pair": "sentence2", "label": "label"}
    assert Regression.find_columns({"text": "a", "label": 3}) is None
    assert Regression.find_columns({"label": 3.0}) is None


@pytest.mark.parametrize("scale", [False, True])
def test_scale_is_undone_in_answers(scale: bool) -> None:
    table = table_of(ROWS, "train")
    task = TASK.changed(scale=scale).resolve(table)
    examples = task.examples(table)
    features = task.features(examples, encoding(WORDS))
    targets = features.targets["value"]
    assert isinstance(targets, np.ndarray)
    assert targets.tolist() == ([1.0, 0.0] if scale else [5.0, 1.0])
    answers = task.answers(examples, features, [np.array([target]) for target in targets])
    assert [answer["answer"] for answer in answers] == [5.0, 1.0]
    above = task.changed(clip=True).answers(examples, features, [np.array([9.0]), np.array([-9.0])])
    assert [answer["answer"] for answer in above] == [5.0, 1.0]
    assert task.error(examples[0], {"answer": 3.5}) == 1.5


@pytest.mark.parametrize("value", ["many", None, True, float("nan"), [1.0]])
def test_invalid_numbers_raise(value: object) -> None:
    rows = [*ROWS, {**ROWS[0], "label": value}]
    with pytest.raises(InputError, match=r"train row 2: field 'label' is .*; it must be a finite number"):
        TASK.resolve(table_of(rows, "train"))


def test_numbers_may_be_strings() -> None:
    assert TASK.examples(table_of([{**ROWS[0], "label": " 2.5"}], "dev"))[0].value == 2.5


def test_constant_targets_and_empty_ranges_raise() -> None:
    with pytest.raises(InputError, match=r"column 'label' is 5 in every row"):
        TASK.resolve(table_of(ROWS[:1], "train"))
    with pytest.raises(InputError, match=r"task\.lowest is 7 and task\.highest is 5"):
        TASK.changed(lowest=7.0).resolve(table_of(ROWS, "train"))


def test_both_orders_adds_swapped_pairs() -> None:
    examples = TASK.examples(table_of(ROWS, "train"))
    doubled = TASK.changed(both_orders=True).augment(examples)
    assert [(e.text, e.pair, e.value) for e in doubled[2:]] == [("iron", "red", 5.0), ("b", "a", 1.0)]
    assert TASK.augment(examples) == examples
    with pytest.raises(InputError, match=r"task\.both_orders is true, but the task has no pairs"):
        Regression(both_orders=True).augment(examples)


def test_training_on_numbers() -> None:
    rows = [(first, second, 4.0 * (first == "red") + (second == "blue")) for first in WORDS[:4] for second in WORDS]
    result = finetune_small(rows * 2, epochs=4)
    assert result["metric"] == "spearman"
    assert result["score"] > 50
    high, low = result.predict([("red", "blue"), ("green", "iron")])
    assert high > low + 1


def test_glue_prediction_file() -> None:
    answers = [{"answer": 5.25}, {"answer": 1.0}]
    examples = TASK.examples(table_of(ROWS, "dev"))
    content = "index\tprediction\n0\t5.000\n1\t1.000\n"
    assert TASK.changed(name="STS-B").files(examples, answers) == {"STS-B.tsv": content}
    assert TASK.files(examples, answers) == {}
