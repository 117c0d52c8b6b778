"""GLUE: official files, predictions in the server's format byte for byte, and the average of the paper."""

from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import InputError
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.data_source import recognise, task_splits
from bertsmith.tasks.glue import (
    GLUE,
    glue_average,
    glue_file,
    glue_settings,
    name_in_split,
)
from bertsmith.tasks.metrics.classes import CLASS_METRICS
from bertsmith.text.rows import table_of

WIDE = [f"c{number}" for number in range(8)]


@pytest.mark.parametrize(
    ("name", "predicted", "file", "content"),
    [
        ("CoLA", ["1", "0"], "CoLA.tsv", "index\tprediction\n0\t1\n1\t0\n"),
        ("SST-2", [0, 1], "SST-2.tsv", "index\tprediction\n0\t0\n1\t1\n"),
        ("MRPC", ["1"], "MRPC.tsv", "index\tprediction\n0\t1\n"),
        ("STS-B", [-0.25, 2.71828, 7], "STS-B.tsv", "index\tprediction\n0\t0.000\n1\t2.718\n2\t5.000\n"),
        ("QQP", ["0"], "QQP.tsv", "index\tprediction\n0\t0\n"),
        ("MNLI", ["0", "1", "2"], "MNLI-m.tsv", "index\tprediction\n0\tentailment\n1\tneutral\n2\tcontradiction\n"),
        ("MNLI-mm", ["neutral"], "MNLI-mm.tsv", "index\tprediction\n0\tneutral\n"),
        ("QNLI", ["0", "1"], "QNLI.tsv", "index\tprediction\n0\tentailment\n1\tnot_entailment\n"),
        ("RTE", ["not_entailment"], "RTE.tsv", "index\tprediction\n0\tnot_entailment\n"),
        ("WNLI", ["1"], "WNLI.tsv", "index\tprediction\n0\t1\n"),
    ],
)
def test_prediction_files_have_the_servers_format(name: str, predicted: list[Any], file: str, content: str) -> None:
    assert glue_file(name, predicted) == {file: content}


def test_no_file_for_labels_outside_glue() -> None:
    assert glue_file("MRPC", ["good", "bad"]) == {}
    assert glue_file("imdb", ["1"]) == {}


def test_settings_depend_on_the_folder_name() -> None:
    assert glue_settings("/data/glue/MRPC", "classification") == {"name": "MRPC", "metric": "f1"}
    assert glue_settings(Path("cola"), "classification") == {"name": "CoLA", "metric": "matthews"}
    assert glue_settings("STS-B", "regression") == {"name": "STS-B", "metric": "spearman"}
    assert glue_settings("STS-B", "classification") == {}
    assert glue_settings("imdb", "classification") == glue_settings(None, "classification") == {}
    for task in GLUE.values():
        assert task.kind == "regression" or set(task.metrics) <= set(CLASS_METRICS)


def test_recognise_adds_the_glue_name_and_settings_override_it() -> None:
    table = table_of([{"sentence1": "a", "sentence2": "b", "label": 1}], "train")
    assert recognise(table, None, [], {}, "x/MRPC")["name"] == "MRPC"
    assert recognise(table, None, [], {"metric": "accuracy"}, "x/MRPC")["metric"] == "accuracy"
    assert "name" not in recognise(table, None, [], {}, "x/other")


def test_classification_returns_its_prediction_file() -> None:
    table = table_of([{"text": "a", "label": 0}, {"text": "b", "label": 1}], "dev")
    answers = [{"answer": "1"}, {"answer": "0"}]
    task = Classification(labels=("0", "1"), name="RTE")
    files = task.files(task.examples(table), answers)
    assert files == {"RTE.tsv": "index\tprediction\n0\tnot_entailment\n1\tentailment\n"}
    assert task.changed(name=None).files(task.examples(table), answers) == {}


def test_positive_label_by_name() -> None:
    table = table_of([{"text": "a", "label": label} for label in ("no", "no", "yes", "yes")], "dev")
    answers = [{"answer": label} for label in ("no", "no", "no", "yes")]
    task = Classification(labels=("no", "yes"), metric="f1")
    assert task.evaluate(task.examples(table), answers).score == pytest.approx(200 / 3)
    assert task.changed(positive="no").evaluate(task.examples(table), answers).score == pytest.approx(80.0)
    with pytest.raises(InputError, match=r"task\.positive is 'maybe'"):
        task.changed(positive="maybe").evaluate(task.examples(table), answers)


def test_mnli_splits_have_their_own_names() -> None:
    assert name_in_split("MNLI", "dev_mismatched") == "MNLI-mm"
    assert name_in_split("MNLI", "dev_matched") == "MNLI"
    assert name_in_split("RTE", "dev_mismatched") == "RTE"
    assert name_in_split(None, "dev") is None


def write_file(folder: Path, file: str, *rows: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / file).write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


OFFICIAL = {
    "CoLA": ([], ["gj04", "0", "*", 'a "b'], {"sentence": 'a "b', "label": 0}),
    "SST-2": ([["sentence", "label"]], ["fine film ", "1"], {"sentence": "fine film ", "label": 1}),
    "MRPC": (
        [["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]],
        ["1", "7", "8", 'He predicted "x', "He predicted x"],
        {"sentence1": 'He predicted "x', "sentence2": "He predicted x", "label": 1},
    ),
    "STS-B": ([[*WIDE]], ["0", "g", "f", "y", "5", "a", "b", "A.", "B.", "3.8"], ("A.", "B.", 3.8)),
    "QQP": ([[*WIDE]], ["1", "2", "3", "why?", "how?", "0"], ("why?", "how?", 0)),
    "MNLI": ([[*WIDE]], [*WIDE, "P", "H", "neutral", "x", "neutral"], ("P", "H", "neutral")),
    "QNLI": ([[*WIDE]], ["0", "who?", "he", "entailment"], ("who?", "he", "entailment")),
    "RTE": ([[*WIDE]], ["0", "P", "H", "not_entailment"], ("P", "H", "not_entailment")),
    "WNLI": ([[*WIDE]], ["0", "P", "H", "1"], ("P", "H", 1)),
}


@pytest.mark.parametrize("name", GLUE)
def test_official_folders_are_read(name: str, tmp_path: Path) -> None:
    header, row, expected = OFFICIAL[name]
    if isinstance(expected, tuple):
        expected = dict(zip(("sentence1", "sentence2", "label"), expected, strict=True))
    split = "dev_matched.tsv" if name == "MNLI" else "dev.tsv"
    write_file(tmp_path / name, split, *header, row, row)
    table = task_splits(tmp_path / name).read("dev")
    assert list(table) == [{"idx": 0, **expected}, {"idx": 1, **expected}]
    assert table.location(1).endswith(f"line {len(header) + 2}")


def test_official_folder_is_recognised_as_a_task(tmp_path: Path) -> None:
    labels = ("not_entailment", "entailment", "not_entailment")
    write_file(tmp_path / "RTE", "train.tsv", WIDE, *(["0", "P", "H", label] for label in labels))
    table = task_splits(tmp_path / "RTE").read("train")
    task = Classification.parse(recognise(table, None, [], {}, str(tmp_path / "RTE"))).resolve(table)
    assert (task.name, task.metric, task.labels) == ("RTE", "accuracy", ("entailment", "not_entailment"))
    examples = task.examples(table)
    assert [task.gold(example) for example in examples] == list(labels)
    files = task.files(examples, [{"answer": label} for label in labels])
    assert files["RTE.tsv"].splitlines()[1:] == ["0\tnot_entailment", "1\tentailment", "2\tnot_entailment"]


def test_official_test_splits_have_no_labels(tmp_path: Path) -> None:
    write_file(tmp_path / "CoLA", "test.tsv", ["index", "sentence"], ["0", "A cat."])
    assert list(task_splits(tmp_path / "CoLA").read("test")) == [{"idx": 0, "sentence": "A cat."}]
    write_file(tmp_path / "STS-B", "test.tsv", WIDE, [*WIDE[:7], "A", "B"])
    assert list(task_splits(tmp_path / "STS-B").read("test")) == [{"idx": 0, "sentence1": "A", "sentence2": "B"}]
    write_file(tmp_path / "MNLI", "test_mismatched.tsv", WIDE, [*WIDE, "P", "H"])
    assert list(task_splits(tmp_path / "MNLI").read("test_mismatched")) == [
        {"idx": 0, "sentence1": "P", "sentence2": "H"}
    ]


def test_broken_rows_raise_but_are_skipped_in_qqp(tmp_path: Path) -> None:
    write_file(tmp_path / "RTE", "dev.tsv", WIDE, ["0", "P", "H", "entailment"], ["1", "P"])
    with pytest.raises(InputError, match=r"line 3 has 2 columns"):
        task_splits(tmp_path / "RTE").read("dev")
    write_file(tmp_path / "RTE", "train.tsv", WIDE, ["0", "P", "H", "maybe"])
    with pytest.raises(InputError, match=r"line 2: the label is 'maybe'; allowed: entailment, not_entailment"):
        task_splits(tmp_path / "RTE").read("train")
    write_file(tmp_path / "STS-B", "train.tsv", WIDE, [*WIDE[:7], "A", "B", "high"])
    with pytest.raises(InputError, match=r"line 2: the score is 'high'"):
        task_splits(tmp_path / "STS-B").read("train")
    write_file(tmp_path / "QQP", "train.tsv", WIDE, ["1", "2", "3", "torn"], ["1", "2", "3", "a", "b", "1"])
    assert list(task_splits(tmp_path / "QQP").read("train")) == [
        {"idx": 0, "sentence1": "a", "sentence2": "b", "label": 1}
    ]
    with pytest.raises(InputError, match=r"has no dev\.tsv"):
        task_splits(tmp_path / "QQP").read("dev")


@pytest.mark.parametrize(
    ("scores", "average"),
    [
        ((80.6, 80.1, 66.1, 82.3, 93.2, 35.0, 81.0, 86.0, 61.7), 74.0),
        ((82.1, 81.4, 70.3, 87.4, 91.3, 45.4, 80.0, 82.3, 56.0), 75.1),
        ((84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4), 79.6),
        ((86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1), 82.1),
    ],
)
def test_average_equals_the_paper(scores: tuple[float, ...], average: float) -> None:
    names = ("MNLI", "MNLI-mm", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE")
    by_name = dict(zip(names, scores, strict=True))
    assert round(glue_average(by_name), 1) == average
    assert glue_average({**by_name, "WNLI": 0.0}) == glue_average(by_name)


def test_average_requires_all_tasks() -> None:
    with pytest.raises(InputError, match="the GLUE average needs the scores of MNLI-mm"):
        glue_average(dict.fromkeys(GLUE, 1.0))
