"""Task recognition from rows and flags, rows passed in Python, and held-out splits."""

from types import SimpleNamespace
from typing import Any

import pytest

from bertsmith.errors import InputError
from bertsmith.tasks import TASKS
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.data_source import column_roles, hold_out, parse_columns, read_rows, recognise, sample_row
from bertsmith.text.rows import Table, table_of


def make_table(*rows: dict[str, Any]) -> Table:
    return table_of(rows, "rows")


@pytest.mark.parametrize(
    ("values", "sample"),
    [
        ([1, 2.5, 3], 2.5),
        ([None, 4], 4),
        ([5.0, 3], 5.0),
        (["1", "2"], "1"),
        (["1", "2.5"], 1.0),
        (["1", "many"], "1"),
        (["", "a"], "a"),
        ([[], ["x"]], ["x"]),
        ([True, False], True),
        ([None, None], None),
    ],
)
def test_sampled_value_represents_the_column(values: list[Any], sample: Any) -> None:
    value = sample_row(make_table(*({"label": value} for value in values)))["label"]
    assert (value, type(value)) == (sample, type(sample))


def test_columns_of_later_rows_are_used() -> None:
    rows = make_table({"text": "a"}, {"text": "b", "label": "x"})
    assert rows.columns == ("text", "label")
    assert recognise(rows, None, [], {}) == {"kind": "classification", "text": "text", "label": "label"}


def test_pairs_are_recognised_by_column_names() -> None:
    found = recognise(make_table({"idx": 1, "premise": "a", "hypothesis": "b", "label": 1}), None, [], {})
    assert found == {"kind": "classification", "text": "premise", "pair": "hypothesis", "label": "label"}


def test_named_columns_override_recognised_ones() -> None:
    rows = make_table({"question": "a", "passage": "b", "label": 1, "stars": 2})
    assert recognise(rows, None, ["label=stars"], {})["label"] == "stars"
    # a column has a single role
    assert "pair" not in recognise(rows, None, ["text=passage"], {})
    other = make_table({"first": "a", "second": "b", "mark": "x"})
    columns = ["text=first", "pair = second", "label=mark"]
    assert recognise(other, None, columns, {}) == {
        "kind": "classification",
        "text": "first",
        "pair": "second",
        "label": "mark",
    }


def test_settings_override_recognition() -> None:
    rows = make_table({"text": "a", "label": 1})
    assert recognise(rows, None, [], {"metric": "f1"})["metric"] == "f1"
    assert recognise(make_table({"body": "a", "label": 1}), "classification", ["text=body"], {})["text"] == "body"


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        ("clasification", [], r"--task is 'clasification'; did you mean 'classification'\?"),
        (None, ["label"], r"--column 'label' is not of the form role=name"),
        (None, ["=x"], r"is not of the form role=name"),
        (None, ["label=lable"], r"--column label=lable: rows has no column 'lable'; did you mean 'label'\?"),
        (
            "classification",
            ["lebel=label"],
            r"'lebel' is not a column role .* kind classification; did you mean 'label'\?",
        ),
        ("classification", ["zzz=label"], r"allowed: label, pair, text \(all: text, pair, label\)"),
        (None, ["zzz=label"], r"'zzz' is not a column role of any task"),
        (None, ["label=label", "label=body"], r"--column names 'label' twice, 'label' and 'body'"),
        ("classification", [], r"rows has no column 'text' for the text of classification; .* --column text="),
        (None, [], r"rows has the columns body, label, which match no kind of task"),
    ],
)
def test_invalid_flags_raise(kind: str | None, columns: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recognise(make_table({"body": "a", "label": 1}), kind, columns, {})


def test_two_text_columns_suggest_translation() -> None:
    with pytest.raises(InputError, match=r"two text columns, en and de, .* translation needs a MODEL with a decoder"):
        recognise(make_table({"id": "7", "en": "a", "de": "b"}), None, [], {})


def test_ambiguous_columns_give_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "another", Classification)
    notices: list[str] = []
    found = recognise(make_table({"text": "a", "label": 1}), None, [], {}, notices=notices)
    assert found["kind"] == "classification"
    assert [text for text in notices if "the columns match classification and also" in text and "another" in text]


def test_column_roles_are_inputs_and_targets() -> None:
    assert column_roles(Classification) == ["text", "pair", "label"]
    assert parse_columns(["label=a"], Classification) == {"label": "a"}


class TestReadRows:
    def test_lists_of_tuples_and_mappings(self) -> None:
        assert list(read_rows([("a", 1), ["b", 0]], "train")) == [{"text": "a", "label": 1}, {"text": "b", "label": 0}]
        assert read_rows([("a", "b", 1)], "train").columns == ("sentence1", "sentence2", "label")
        assert list(read_rows(({"x": i} for i in range(2)), "train")) == [{"x": 0}, {"x": 1}]

    def test_a_data_frame(self) -> None:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"text": ["a", None], "label": [1, 0], "score": [0.5, float("nan")]})
        rows = list(read_rows(frame, "train"))
        assert rows == [{"text": "a", "label": 1, "score": 0.5}, {"text": None, "label": 0, "score": None}]
        assert type(rows[0]["label"]) is int

    def test_a_dataset(self) -> None:
        datasets = pytest.importorskip("datasets")
        classes = datasets.ClassLabel(names=["no", "yes"])
        features = datasets.Features({"text": datasets.Value("string"), "label": classes})
        data = datasets.Dataset.from_dict({"text": ["a"], "label": [1]}, features=features)
        assert list(read_rows(data, "train")) == [{"text": "a", "label": "yes"}]

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([], r"train is empty"),
            ("file.csv", r"train is a str; allowed: a list of rows"),
            ({"text": ["a"]}, r"train is a dict"),
            ([("a", 1), ("b",)], r"train\[1\] is \('b',\); allowed: mappings, or tuples"),
            (["a"], r"train\[0\] is 'a'"),
            ([{"text": "a"}, ("a", 1)], r"train\[0\] is"),
        ],
    )
    def test_other_types_raise(self, rows: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            read_rows(rows, "train")


class TestHoldOut:
    task = Classification(labels=("a", "b"))

    def rows(self, labels: str) -> Table:
        return make_table(*({"text": str(index), "label": label} for index, label in enumerate(labels)))

    def test_split_is_stratified_and_reproducible(self) -> None:
        all_rows = self.rows("a" * 80 + "b" * 20)
        train, dev, notice = hold_out(self.task, all_rows, "no dev")
        assert [row["label"] for row in dev].count("a") == 8
        assert len(dev) == 10
        assert sorted([*train.numbers, *dev.numbers]) == list(range(100))
        expected = "no dev: 10 rows are held out of 100 for evaluation, stratified by label, and not trained on"
        assert notice == expected
        assert hold_out(self.task, all_rows, "")[1].numbers == dev.numbers

    def test_the_only_row_of_a_label_stays_in_training(self) -> None:
        train, dev, _ = hold_out(self.task, self.rows("aaaaaab"), "no dev")
        assert (len(train), len(dev)) == (6, 1)
        assert "b" in {row["label"] for row in train}

    def test_limits(self) -> None:
        assert len(hold_out(self.task, self.rows("ab" * 15_000), "")[1]) == 2000
        rows = self.rows("ab")
        train, dev, notice = hold_out(self.task, rows, "no dev")
        assert train is dev is rows
        assert "too few rows to hold any out" in notice

    def test_rows_without_labels_are_drawn_at_random(self) -> None:
        other: Any = SimpleNamespace(label="label")
        rows = make_table(*({"label": index / 7} for index in range(40)))
        train, dev, notice = hold_out(other, rows, "no dev")
        assert (len(train), len(dev)) == (36, 4)
        assert "at random" in notice


def test_text_columns_are_recognised_for_a_named_kind() -> None:
    """Numbers are strings, as in a .csv file."""
    row = {"sentence1": "a", "sentence2": "b", "label": "3.8"}
    found = recognise(make_table(row), "regression", [], {})
    assert (found["kind"], found["text"], found["pair"]) == ("regression", "sentence1", "sentence2")
    assert recognise(make_table({**row, "label": "4"}), "regression", [], {})["pair"] == "sentence2"
    alone = recognise(make_table({**row, "label": "4"}), "regression", ["text=sentence2"], {})
    assert alone == {"kind": "regression", "text": "sentence2"}
    assert recognise(make_table(row), "embedding", [], {}) == {"kind": "embedding"}  # finds its columns in resolve()
