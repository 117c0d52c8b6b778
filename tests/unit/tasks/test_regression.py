"""Numbers of texts: reading them, their scale, a run that learns them."""

import numpy as np
import pytest
from helpers_choices import WORDS, encoding, finetuned

from bertsmith.errors import InputError
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.regression import Regression
from bertsmith.text.rows import table_of

ROWS = [{"sentence1": "red", "sentence2": "iron", "label": 5.0}, {"sentence1": "a", "sentence2": "b", "label": 1}]
TASK = Regression(text="sentence1", pair="sentence2")


def test_recognised_by_a_fraction() -> None:
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
def test_what_is_no_number_is_named(value: object) -> None:
    rows = [*ROWS, {**ROWS[0], "label": value}]
    with pytest.raises(InputError, match=r"train row 2: field 'label' is .*; it must be a finite number"):
        TASK.resolve(table_of(rows, "train"))


def test_numbers_may_be_written_as_text() -> None:
    assert TASK.examples(table_of([{**ROWS[0], "label": " 2.5"}], "dev"))[0].value == 2.5


def test_one_number_for_all_is_refused() -> None:
    with pytest.raises(InputError, match=r"column 'label' is 5 in every row"):
        TASK.resolve(table_of(ROWS[:1], "train"))
    with pytest.raises(InputError, match=r"task\.lowest is 7 and task\.highest 5"):
        TASK.changed(lowest=7.0).resolve(table_of(ROWS, "train"))


def test_both_orders() -> None:
    examples = TASK.examples(table_of(ROWS, "train"))
    doubled = TASK.changed(both_orders=True).augment(examples)
    assert [(e.text, e.pair, e.value) for e in doubled[2:]] == [("iron", "red", 5.0), ("b", "a", 1.0)]
    assert TASK.augment(examples) == examples
    with pytest.raises(InputError, match=r"task\.both_orders is true and the task has no pairs"):
        Regression(both_orders=True).augment(examples)


def test_a_run_learns_numbers() -> None:
    rows = [(first, second, 4.0 * (first == "red") + (second == "blue")) for first in WORDS[:4] for second in WORDS]
    result = finetuned(rows * 2, epochs=4)
    assert result["metric"] == "spearman"
    assert result["score"] > 50
    high, low = result.predict([("red", "blue"), ("green", "iron")])
    assert high > low + 1


def test_the_server_of_glue_gets_its_file() -> None:
    answers = [{"answer": 5.25}, {"answer": 1.0}]
    examples = TASK.examples(table_of(ROWS, "dev"))
    written = "index\tprediction\n0\t5.000\n1\t1.000\n"
    assert TASK.changed(name="STS-B").files(examples, answers) == {"STS-B.tsv": written}
    assert TASK.files(examples, answers) == {}
