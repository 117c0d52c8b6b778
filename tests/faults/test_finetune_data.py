"""Bad data prints one sentence, exits with code 2 and writes nothing; unusual data gives a notice."""

import json
from pathlib import Path
from typing import Any

import pytest

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.tasks.classification import Classification
from bertsmith.training.finetuning import FinetuneSettings, TaskData, read_data

GOOD = [{"text": f"word {index}", "label": index % 2} for index in range(6)]


def lines(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("files", "flags", "message"),
    [
        ({}, [], "has no train.jsonl"),
        ({"train.jsonl": ""}, [], "train.jsonl' has no rows"),
        ({"train.csv": ""}, [], "train.csv' is empty; its first line must name the columns"),
        ({"train.csv": "text,label\na,b\nc\n"}, [], "train.csv' line 3 has 1 fields"),
        ({"train.jsonl": lines(*GOOD * 205, "{")}, [], "train.jsonl' line 1231 is not valid JSON"),
        (
            {"train.jsonl": lines(*GOOD * 205, {"text": 5, "label": 1})},
            [],
            "train.jsonl' line 1231: field 'text' is int; it must be a string",
        ),
        ({"train.jsonl": lines(*GOOD, {"text": "a"})}, [], "line 7 has no field 'label'; allowed: text"),
        (
            {"train.jsonl": lines(*GOOD, {"text": "a", "label": None})},
            [],
            "line 7: 'label' is null; a label must be a string",
        ),
        (
            {"train.csv": "text,label\na,x\nb, \nc,y\n"},
            [],
            "train.csv' line 3: 'label' is ' '; a label must be a string",
        ),
        ({"train.jsonl": lines(*GOOD), "dev.jsonl": ""}, [], "dev.jsonl' has no rows"),
        (
            {"train.jsonl": lines(*GOOD), "valid.jsonl": lines({"text": "a", "label": 7})},
            [],
            "valid.jsonl' line 1: 'label' is '7', which is not a label of this task",
        ),
        ({"train.jsonl": lines(*GOOD), "train.csv": "text\n"}, [], "for one split; keep one of them"),
        ({"train.jsonl": lines(*GOOD)}, ["--column", "label=labl"], "has no column 'labl'; did you mean 'label'?"),
        ({"train.jsonl": lines(*GOOD)}, ["--column", "stars=label"], "'stars' is not a column role"),
        ({"train.jsonl": lines(*GOOD)}, ["--task", "clasification"], "did you mean 'classification'?"),
        ({"train.jsonl": lines({"body": "a", "label": 1})}, [], "which match no kind of task"),
        ({"train.jsonl": lines({"en": "a", "de": "b"})}, [], "translation needs a MODEL with a decoder"),
        (
            {"train.jsonl": lines({"en": "a", "de": "b"}), "dev.jsonl": lines({"en": "a", "de": "b"})},
            ["--task", "translation"],
            "has no decoder, which translation needs",
        ),
        (
            {"train.jsonl": lines({"text": " ", "label": 1}, {"text": "", "label": 2})},
            [],
            "train.jsonl' has no row with a text in text",
        ),
        ({"train.jsonl": lines(GOOD[0], GOOD[0])}, [], "has only one label, '0'"),
    ],
)
def test_bad_data_prints_one_sentence(
    files: dict[str, str], flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    for name, content in files.items():
        (data / name).write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as exit_info:
        main(["finetune", "bert-tiny", "--data", str(data), "--out", str(out), "--device", "cpu", *flags])
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(("model", "data"), [("bert-tiny", "nowhere"), ("bert-tiny", "x.csv"), ("bert-tinny", "x.csv")])
def test_missing_model_or_data_raises(model: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["finetune", model, "--data", data, "--out", str(tmp_path / "out")])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert f"MODEL is {model!r}" in error if model == "bert-tinny" else f"--data {data!r} does not exist" in error
    assert not (tmp_path / "out").exists()


def test_dev_without_train_raises() -> None:
    with pytest.raises(InputError, match=r"dev is given without train"):
        bertsmith.finetune("bert-tiny", dev=[("a", 1)])


def read(train: list[dict[str, Any]], dev: list[dict[str, Any]], **task: Any) -> TaskData:
    from bertsmith.tasks.data_source import read_rows

    settings = FinetuneSettings.parse({"model": "bert-tiny", "task": {"kind": "classification", **task}})
    return read_data(settings, read_rows(train, "train"), read_rows(dev, "dev"), ("first of all",))


class TestNotices:
    def test_counts_follow_earlier_notices(self) -> None:
        data = read(GOOD, [{"text": "new", "label": 1}])
        assert data.notices == ("first of all", "train: 6 rows (0: 3, 1: 3); dev: 1 row (1: 1)")
        assert data.counts["train"] == {"rows": 6, "labels": {"0": 3, "1": 3}}

    def test_rare_labels_give_a_notice_without_class_weights(self) -> None:
        train = [{"text": str(index), "label": "odd" if index == 0 else "usual"} for index in range(7)]
        dev = [{"text": "new", "label": "odd"}]
        (notice,) = [text for text in read(train, dev).notices if "class_weights" in text]
        expected = "the labels are imbalanced: 85.7 % of train is 'usual', 6.0 times as many rows as 'odd'"
        assert notice.startswith(expected)
        assert not [text for text in read(train, dev, class_weights="balanced").notices if "class_weights" in text]
        assert not [text for text in read(train[:6], dev).notices if "class_weights" in text]

    def test_empty_texts_are_dropped_from_train_and_kept_in_dev(self) -> None:
        empty = {"text": " \u200b", "label": 0}
        data = read([*GOOD, empty], [empty, GOOD[0]])
        assert (len(data.train), len(data.dev)) == (6, 2)
        assert "train: 1 row has no text (train row 6); left out of training" in data.notices
        assert "dev: 1 row has no text (dev row 0); kept, so that every row has an answer" in data.notices

    def test_dev_rows_in_train_give_a_notice(self) -> None:
        notices = read(GOOD, [{"text": "new", "label": 1}, GOOD[1], GOOD[2]]).notices
        assert "2 rows of dev are also in train (first: dev row 1); the score on dev may be too high" in notices

    def test_contradicting_labels_give_a_notice(self) -> None:
        notices = read([*GOOD, {"text": "word 0", "label": 1}, GOOD[0]], [{"text": "new", "label": 1}]).notices
        assert "train: 1 input occurs more than once with different answers (first: train row 6)" in notices

    def test_unused_label_gives_a_notice(self) -> None:
        notices = read(GOOD, [{"text": "new", "label": 1}], labels=("0", "1", "2")).notices
        assert "train has no row with the label 2" in notices

    def test_truncated_sequences_are_counted(self) -> None:
        from bertsmith.tasks.base import Encoding
        from bertsmith.tasks.notices import length_notices
        from bertsmith.text.learn import learn_tokenizer
        from bertsmith.text.rows import table_of

        tokenizer = learn_tokenizer(["a b c d e f"] * 3, "wordpiece", 40, progress=False)
        task = Classification(labels=("0", "1"))
        for pair in (None, "a"):
            task = task.changed(pair=None if pair is None else "pair")
            texts = ["a", "a b c", "a b c d", "a b c d e f"]
            rows = [{"text": text, "pair": pair, "label": 0} for text in texts]
            special = 2 if pair is None else 4  # the second text is one token
            features = task.features(task.examples(table_of(rows, "rows")), Encoding(tokenizer, 4 + special, True))
            assert features.tokens.lengths.tolist() == [1 + special, 3 + special, 4 + special, 4 + special]
            assert features.cut == 1
            assert features.whole_lengths is not None
            assert features.whole_lengths.tolist() == [1 + special, 3 + special, 4 + special, 6 + special]
            notices, facts = length_notices({"train": features}, 4 + special)
            assert notices == [
                f"train: 1 of 4 sequences are truncated to sequences.length={4 + special}; "
                f"{6 + special} would be enough for 99 %"
            ]
            assert facts == {"train": {"cut": 1, "length_for_99_percent": 6 + special}}
