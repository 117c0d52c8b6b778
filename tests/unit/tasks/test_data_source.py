"""Which task rows are: found out from several rows, told by flags, refused in one sentence."""

from types import SimpleNamespace
from typing import Any

import pytest

from bertsmith.errors import InputError
from bertsmith.tasks import TASKS
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.data_source import held_out, named_columns, read_rows, recognise, roles_of, sample_row
from bertsmith.text.rows import Table, table_of


def table(*rows: dict[str, Any]) -> Table:
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
def test_a_column_is_known_by_all_its_values(values: list[Any], sample: Any) -> None:
    found = sample_row(table(*({"label": value} for value in values)))["label"]
    assert (found, type(found)) == (sample, type(sample))


def test_columns_of_later_rows_count() -> None:
    rows = table({"text": "a"}, {"text": "b", "label": "x"})
    assert rows.columns == ("text", "label")
    assert recognise(rows, None, [], {}) == {"kind": "classification", "text": "text", "label": "label"}


def test_pairs_are_found_by_their_usual_names() -> None:
    found = recognise(table({"idx": 1, "premise": "a", "hypothesis": "b", "label": 1}), None, [], {})
    assert found == {"kind": "classification", "text": "premise", "pair": "hypothesis", "label": "label"}


def test_named_columns_come_before_what_was_found() -> None:
    rows = table({"question": "a", "passage": "b", "label": 1, "stars": 2})
    assert recognise(rows, None, ["label=stars"], {})["label"] == "stars"
    # a column plays one part only
    assert "pair" not in recognise(rows, None, ["text=passage"], {})
    other = table({"first": "a", "second": "b", "mark": "x"})
    told = ["text=first", "pair = second", "label=mark"]
    assert recognise(other, None, told, {}) == {
        "kind": "classification",
        "text": "first",
        "pair": "second",
        "label": "mark",
    }


def test_what_was_given_stays() -> None:
    rows = table({"text": "a", "label": 1})
    assert recognise(rows, None, [], {"metric": "f1"})["metric"] == "f1"
    assert recognise(table({"body": "a", "label": 1}), "classification", ["text=body"], {})["text"] == "body"


@pytest.mark.parametrize(
    ("kind", "columns", "sentence"),
    [
        ("clasification", [], r"--task is 'clasification'; did you mean 'classification'\?"),
        (None, ["label"], r"--column 'label' is not of the form role=name"),
        (None, ["=x"], r"is not of the form role=name"),
        (None, ["label=lable"], r"--column label=lable: rows has no column 'lable'; did you mean 'label'\?"),
        ("classification", ["lebel=label"], r"'lebel' is no part .* kind classification; did you mean 'label'\?"),
        ("classification", ["zzz=label"], r"allowed: label, pair, text \(all: text, pair, label\)"),
        (None, ["zzz=label"], r"'zzz' is no part a column plays in any task"),
        (None, ["label=label", "label=body"], r"--column names 'label' twice, 'label' and 'body'"),
        ("classification", [], r"rows has no column 'text' for the text of classification; .* --column text="),
        (None, [], r"rows has the columns body, label, which no kind of task is known by"),
    ],
)
def test_slips_are_one_sentence(kind: str | None, columns: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        recognise(table({"body": "a", "label": 1}), kind, columns, {})


def test_two_columns_of_texts_look_like_a_translation() -> None:
    with pytest.raises(InputError, match=r"two columns of texts, en and de, .* that needs a MODEL with a decoder"):
        recognise(table({"id": "7", "en": "a", "de": "b"}), None, [], {})


def test_two_kinds_that_fit_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "another", Classification)
    notices: list[str] = []
    found = recognise(table({"text": "a", "label": 1}), None, [], {}, notices=notices)
    assert found["kind"] == "classification"
    assert [said for said in notices if "the columns fit classification and also" in said and "another" in said]


def test_roles_are_the_fields_that_name_columns() -> None:
    assert roles_of(Classification) == ["text", "pair", "label"]
    assert named_columns(["label=a"], Classification) == {"label": "a"}


class TestGivenRows:
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
        ("rows", "sentence"),
        [
            ([], r"train is empty"),
            ("file.csv", r"train is a str; allowed: a list of rows"),
            ({"text": ["a"]}, r"train is a dict"),
            ([("a", 1), ("b",)], r"train\[1\] is \('b',\); allowed: mappings, or tuples"),
            (["a"], r"train\[0\] is 'a'"),
            ([{"text": "a"}, ("a", 1)], r"train\[0\] is"),
        ],
    )
    def test_others_are_refused(self, rows: Any, sentence: str) -> None:
        with pytest.raises(InputError, match=sentence):
            read_rows(rows, "train")


class TestHeldOut:
    task = Classification(labels=("a", "b"))

    def rows(self, labels: str) -> Table:
        return table(*({"text": str(index), "label": label} for index, label in enumerate(labels)))

    def test_every_label_gives_its_share(self) -> None:
        all_rows = self.rows("a" * 80 + "b" * 20)
        train, dev, said = held_out(self.task, all_rows, "no dev")
        assert [row["label"] for row in dev].count("a") == 8
        assert len(dev) == 10
        assert sorted([*train.numbers, *dev.numbers]) == list(range(100))
        assert said == "no dev: 10 rows are held out of 100, with each label's share, and not trained on"
        assert held_out(self.task, all_rows, "")[1].numbers == dev.numbers

    def test_the_only_row_of_a_label_is_trained_on(self) -> None:
        train, dev, _ = held_out(self.task, self.rows("aaaaaab"), "no dev")
        assert (len(train), len(dev)) == (6, 1)
        assert "b" in {row["label"] for row in train}

    def test_bounds(self) -> None:
        assert len(held_out(self.task, self.rows("ab" * 15_000), "")[1]) == 2000
        rows = self.rows("ab")
        train, dev, said = held_out(self.task, rows, "no dev")
        assert train is dev is rows
        assert "too few rows to hold any out" in said

    def test_without_labels_rows_are_drawn(self) -> None:
        other: Any = SimpleNamespace(label="label")
        rows = table(*({"label": index / 7} for index in range(40)))
        train, dev, said = held_out(other, rows, "no dev")
        assert (len(train), len(dev)) == (36, 4)
        assert "at random" in said


def test_texts_are_found_where_a_kind_is_named() -> None:
    """As in a .csv file, in which numbers are texts."""
    row = {"sentence1": "a", "sentence2": "b", "label": "3.8"}
    found = recognise(table(row), "regression", [], {})
    assert (found["kind"], found["text"], found["pair"]) == ("regression", "sentence1", "sentence2")
    assert recognise(table({**row, "label": "4"}), "regression", [], {})["pair"] == "sentence2"
    alone = recognise(table({**row, "label": "4"}), "regression", ["text=sentence2"], {})
    assert alone == {"kind": "regression", "text": "sentence2"}
    assert recognise(table(row), "embedding", [], {}) == {"kind": "embedding"}  # which finds all its columns itself
