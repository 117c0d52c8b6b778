"""evaluate and predict with a fine-tuned model: input formats, output files, invalid input."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.models.attach_heads import with_task_head
from bertsmith.runs import predict as predict_run
from bertsmith.runs.predict import describe_answer, one_line
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.predictor import Predictor, TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tables import file_windows


def fine_tuned(folder: Path, **task: Any) -> Path:
    """Write a model with a fresh head, in the format of a fine-tuned one."""
    tokenizer = learn_tokenizer(["good bad fine awful words"] * 4, "wordpiece", 80, progress=False)
    config = bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, width=16, heads=2, layers=1, max_length=32)
    model = bertsmith.build(config, seed=0)
    model.tokenizer = tokenizer
    settings = {"kind": "classification", "labels": ["no", "yes"], **task}
    record = TaskRecord.parse({"task": settings, "sequences": {"length": 16}})
    assert isinstance(record.task, Classification)
    model = with_task_head(model, record.task.head(model.config), seed=0)
    bertsmith.save(model, folder)
    write_task_record(record, folder)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fine_tuned(tmp_path_factory.mktemp("models") / "single")


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fine_tuned(tmp_path_factory.mktemp("models") / "paired", text="question", pair="answer")


def predictions(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


TEXTS = ["good words", "", "bad bad, awful"]


def test_windows_of_a_file_give_the_same_files(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "many.csv"
    data.write_text("id,text\n" + "".join(f"r{row},{TEXTS[row % 2]} {'fine ' * row}\n" for row in range(11)))
    bertsmith.predict(single, data=str(data), out=tmp_path / "whole", device="cpu")
    monkeypatch.setattr("bertsmith.runs.predict.WINDOW_ROWS", 3)
    result = bertsmith.predict(single, data=str(data), out=tmp_path / "windows", device="cpu")
    assert result["inputs"] == 11
    whole, windows = predictions(tmp_path / "whole"), predictions(tmp_path / "windows")
    assert [row["id"] for row in windows] == [f"r{row}" for row in range(11)]
    assert [row["answer"] for row in windows] == [row["answer"] for row in whole]
    assert [row["score"] for row in windows] == pytest.approx([row["score"] for row in whole], abs=1e-6)
    for name in ("predictions.txt", "predictions.jsonl"):
        assert len((tmp_path / "windows" / name).read_text().splitlines()) == 11


def test_interrupted_prediction_is_resumed(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the third window, after half of its lines: complete windows are not answered again."""
    monkeypatch.setattr(predict_run, "WINDOW_ROWS", 4)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"good words {number}"}) + "\n" for number in range(14)))
    whole, out = tmp_path / "whole", tmp_path / "out"
    bertsmith.predict(single, data=str(rows), out=whole, device="cpu", top=1)
    real, answered = Predictor.answers, []

    def answers(self: Predictor, examples: list[Any]) -> Any:
        answered.append(len(examples))
        if answered == [4, 4, 4]:
            raise KeyboardInterrupt
        return real(self, examples)

    monkeypatch.setattr(Predictor, "answers", answers)
    with pytest.raises(KeyboardInterrupt):
        bertsmith.predict(single, data=str(rows), out=out, device="cpu", top=1)
    with (out / "predictions.jsonl").open("a") as file:
        file.write('{"answer": "yes"}\n{"ans')
    with pytest.raises(InputError, match="--resume: top is 2, but the run was started with 1"):
        bertsmith.predict(single, data=str(rows), out=out, device="cpu", top=2, resume=True)
    bertsmith.predict(single, data=str(rows), out=out, device="cpu", top=1, resume=True)
    assert answered == [4, 4, 4, 4, 2]
    for name in ("predictions.jsonl", "predictions.txt"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert all(list(line["scores"]) == [line["answer"]] for line in lines)
    with pytest.raises(InputError, match="is finished; there is nothing to resume"):
        bertsmith.predict(single, data=str(rows), out=out, device="cpu", top=1, resume=True)


def test_bad_row_of_a_later_window_changes_nothing(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertsmith.runs.predict.WINDOW_ROWS", 2)
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text('{"text": "good"}\n' * 5)
    bertsmith.predict(single, data=str(data), out=out, device="cpu")
    before = predictions(out)
    data.write_text('{"text": "good"}\n' * 4 + '{"text": 3}\n')
    with pytest.raises(InputError, match=r"line 5: field 'text' is int; it must be a string"):
        bertsmith.predict(single, data=str(data), out=out, device="cpu", force=True)
    assert predictions(out) == before


def test_windows_hold_few_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def count(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
        nonlocal read
        for read in range(1, 1001):
            yield read, {"text": "good"}

    (tmp_path / "rows.jsonl").touch()
    monkeypatch.setattr("bertsmith.text.tables.table_rows", count)
    for number, table in enumerate(file_windows(tmp_path / "rows.jsonl", 10), 1):
        assert len(table) == 10
        assert read == 10 * number
    assert read == 1000


def test_precision_is_a_setting(single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["good words", "awful"]
    scores = {}
    for precision in ("auto", "float32", "bfloat16"):
        out = tmp_path / precision
        bertsmith.predict(single, text=texts, out=out, device="cpu", precision=precision)
        scores[precision] = [row["score"] for row in predictions(out)]
    assert scores["auto"] == scores["float32"]
    assert scores["bfloat16"] != scores["float32"]
    assert scores["bfloat16"] == pytest.approx(scores["float32"], abs=1e-2)
    with pytest.raises(InputError, match="precision is 'half'; allowed: auto, float32, bfloat16"):
        bertsmith.predict(single, text=texts, out=tmp_path / "half", device="cpu", precision="half")
    with pytest.raises(SystemExit):
        main(["predict", str(single), "--text", "a", "--precision", "half", "--out", str(tmp_path / "cli")])
    assert "--precision" in capsys.readouterr().err
    with pytest.raises(InputError, match="--precision is given with --metric residues, which does not use it"):
        bertsmith.evaluate(single, data=".", metric="residues", precision="bfloat16", out=tmp_path / "metric")


@pytest.mark.parametrize("form", [".txt", ".jsonl", ".csv", ".tsv", "folder"])
def test_all_input_formats_give_the_same_answers(form: str, single: Path, tmp_path: Path) -> None:
    content = {
        ".txt": "".join(f"{text}\n" for text in TEXTS),
        ".csv": "text,id\n" + "".join(f'"{text}",r{index}\n' for index, text in enumerate(TEXTS)),
        ".tsv": "text\tid\n" + "".join(f"{text}\tr{index}\n" for index, text in enumerate(TEXTS)),
    }
    rows = "".join(json.dumps({"text": text, "id": f"r{index}"}) + "\n" for index, text in enumerate(TEXTS))
    data = tmp_path / (f"mine{form}" if form != "folder" else "test.jsonl")
    data.write_text(content.get(form, rows), encoding="utf-8")
    out = tmp_path / "out" / "predictions"
    given = data if form != "folder" else tmp_path
    metrics = bertsmith.predict(single, data=str(given), out=out, device="cpu")
    assert metrics["inputs"] == 3
    expected = bertsmith.Predictor.load(single).details(TEXTS)
    found = predictions(out)
    assert [row.pop("id", None) for row in found] == ([None] * 3 if form == ".txt" else ["r0", "r1", "r2"])
    assert found == expected
    assert (out / "predictions.txt").read_text().splitlines() == [row["answer"] for row in expected]


def test_texts_on_the_command_line(single: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["predict", str(single), "--text", "good", "--text", "", "--out", str(tmp_path / "out"), "--device", "cpu"])
    output = capsys.readouterr().out.splitlines()
    details = bertsmith.Predictor.load(single).details(["good", ""])
    assert output[:2] == [f"{row['answer']}  {100 * row['score']:.1f} %" for row in details]
    written = json.loads((tmp_path / "out" / "result.json").read_text())["predictions"]
    assert written == [row["answer"] for row in details]
    main(["predict", str(single), "-t", "good", "-t", "", "--device", "cpu"])
    assert capsys.readouterr().out.splitlines() == output[:2]


def test_entities_are_printed_with_their_probability() -> None:
    entities = [{"type": "PER", "text": "Ada", "begin": 0, "end": 3, "score": 0.98}]
    answer = {"answer": ["B-PER", "O"], "words": ["Ada", "sits"], "score": 0.9, "entities": entities}
    assert describe_answer(answer) == "PER: Ada  98.0 %"
    assert len(describe_answer({"answer": "x" * 3000, "score": 1.0})) < 600


def test_pairs_by_two_flags_or_two_columns(paired: Path, tmp_path: Path) -> None:
    inputs = [("good", "bad"), ("fine words", "awful")]
    result = bertsmith.predict(
        paired, text=["good", "fine words"], pair=["bad", "awful"], out=tmp_path / "a", device="cpu"
    )
    assert result["predictions"] == bertsmith.Predictor.load(paired).predict(inputs)
    (tmp_path / "b.tsv").write_text("question\tsecond\n" + "".join("\t".join(pair) + "\n" for pair in inputs))
    bertsmith.predict(paired, data=str(tmp_path / "b.tsv"), column=["pair=second"], out=tmp_path / "b", device="cpu")
    assert predictions(tmp_path / "a") == predictions(tmp_path / "b")


def test_evaluate_accepts_splits_files_and_renamed_columns(single: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "valid.csv").write_text("text,stars,idx\ngood,yes,7\nbad,no,8\n,no,9\n")
    arguments: dict[str, Any] = {"column": ["label=stars"], "device": "cpu"}
    by_split = bertsmith.evaluate(single, data=str(tmp_path / "data"), out=tmp_path / "a", **arguments)
    by_file = bertsmith.evaluate(single, data=str(tmp_path / "data" / "valid.csv"), out=tmp_path / "b", **arguments)
    assert (by_split["split"], by_file["split"], by_split["examples"]) == ("dev", "valid.csv", 3)
    assert by_split["score"] == by_file["score"]
    assert [row["idx"] for row in predictions(tmp_path / "a")] == ["7", "8", "9"]
    right = [row["answer"] for row in predictions(tmp_path / "a")]
    share = sum(answer == label for answer, label in zip(right, ["yes", "no", "no"], strict=True)) / 3
    assert by_split["accuracy"] == pytest.approx(100 * share)


def test_official_scorer_files_are_written(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(task: object, examples: list[Any], answers: list[Any]) -> dict[str, str]:
        return {"scored.tsv": f"{len(examples)} {len(answers)}"}

    monkeypatch.setattr(Classification, "files", files)
    (tmp_path / "mine.csv").write_text("text,label\ngood,yes\n")
    for command, out in ((bertsmith.evaluate, tmp_path / "a"), (bertsmith.predict, tmp_path / "b")):
        command(single, data=str(tmp_path / "mine.csv"), out=out, device="cpu")
        assert (out / "official" / "scored.tsv").read_text() == "1 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "SINGLE"], "give either --data with a file or --text with a text"),
        (["predict", "SINGLE", "--text", "a", "--data", "x.txt"], "give either --data"),
        (["predict", "SINGLE", "--text", "a", "--pair", "b"], "--pair is given, but this task reads one text, 'text'"),
        (["predict", "PAIRED", "--text", "a"], "--text is given 1 times and --pair 0 times"),
        (
            ["predict", "PAIRED", "--data", "lines.txt"],
            "has one text per line, but this task reads question, answer",
        ),
        (["predict", "SINGLE", "--data", "absent.txt"], "'absent.txt' does not exist"),
        (["predict", "SINGLE", "--data", "absent.csv"], "'absent.csv' does not exist"),
        (["predict", "SINGLE", "--data", "empty.txt"], "'empty.txt' has no lines"),
        (["predict", "SINGLE", "--data", "other.csv"], "line 2 has no field 'text'"),
        (["predict", "SINGLE", "--data", "other.csv", "--column", "txt=body"], "did you mean 'text'?"),
        (["predict", "SINGLE", "--data", ".", "--split", "tset"], "has no tset.jsonl"),
        (
            ["evaluate", "SINGLE", "--data", "other.csv", "--column", "text=body"],
            "'label' is 'maybe', which is not a label",
        ),
        (["evaluate", "SINGLE", "--data", "nowhere"], "--data 'nowhere' does not exist"),
    ],
)
def test_invalid_input_prints_one_line_and_writes_nothing(
    arguments: list[str],
    message: str,
    single: Path,
    paired: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("a\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "other.csv").write_text("body,label\na,maybe\n")
    (tmp_path / "test.csv").write_text("text\na\n")
    folders = {"SINGLE": str(single), "PAIRED": str(paired)}
    with pytest.raises(SystemExit) as stopped:
        main([*(folders.get(word, word) for word in arguments), "--out", "out", "--device", "cpu"])
    output = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in output
    assert output.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("labels", [["no"], ["no", "yes", "maybe"]])
def test_task_with_other_labels_than_outputs_raises(labels: list[str], single: Path, tmp_path: Path) -> None:
    shutil.copytree(single, tmp_path / "model")
    record = json.loads((single / "task.json").read_text())
    (tmp_path / "model" / "task.json").write_text(json.dumps({**record, "task": {**record["task"], "labels": labels}}))
    with pytest.raises(InputError, match=f"the model has 2 outputs, but task.labels .* lists {len(labels)}"):
        bertsmith.predict(tmp_path / "model", text=["a"], device="cpu")


def test_model_without_task_raises(tmp_path: Path) -> None:
    bertsmith.save(bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=40, layers=1), seed=0), tmp_path / "model")
    with pytest.raises(InputError, match=r"no task.json, so its model was not fine-tuned; use bertsmith finetune"):
        bertsmith.predict(tmp_path / "model", text=["a"], out=tmp_path / "out")


@pytest.mark.parametrize(("answer", "line"), [("a\nb", "a b"), (2.5, "2.5"), (["O"], None), ({}, None)])
def test_answer_is_formatted_on_one_line(answer: object, line: str | None) -> None:
    assert one_line(answer) == line


def test_file_without_dev_is_split_with_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [f"{('bad', 'good')[index % 2]} words {index},{('no', 'yes')[index % 2]}" for index in range(40)]
    (tmp_path / "mine.csv").write_text("review,stars\n" + "\n".join([*rows, ",yes"]) + "\n")
    sizes = {"width": 16, "heads": 2, "layers": 1}
    result = bertsmith.finetune(
        "bert-tiny",
        data=str(tmp_path / "mine.csv"),
        column=["text=review", "label=stars"],
        out=tmp_path / "run",
        set=[*(f"model.overrides.{name}={size}" for name, size in sizes.items()), "tokenizer.vocabulary=300"],
        device="cpu",
    )
    counts = json.loads((tmp_path / "run" / "result.json").read_text())["data"]
    assert counts["train"]["rows"] + counts["dev"]["rows"] == 40
    assert counts["dev"] == {"rows": 4, "labels": {"no": 2, "yes": 2}}
    output = " ".join(capsys.readouterr().err.split())
    assert "there is no dev split: 4 rows are held out of 41 for evaluation, stratified by label" in output
    assert all(" ".join(notice.split()) in output for notice in counts["notices"])
    assert result.predict([""])[0] in ("no", "yes")
    assert bertsmith.evaluate(tmp_path / "run", data=str(tmp_path / "mine.csv"), out=tmp_path / "e")["examples"] == 41
