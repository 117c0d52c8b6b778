"""Console output of a fine-tuning: notices, summary and errors."""

import io
from pathlib import Path

import pytest
from helpers_finetune import ROWS, SMALL, tune, write_task
from rich.console import Console

import bertsmith
from bertsmith.answers.choice import ChoiceExample
from bertsmith.answers.tagging import TaggedWords
from bertsmith.errors import InputError
from bertsmith.runs.predict import format_answer
from bertsmith.tasks.choice import Choice
from bertsmith.tasks.degenerate import has_constant_answers
from bertsmith.tasks.tagging import Tagging
from bertsmith.training import display


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


def console(capsys: pytest.CaptureFixture) -> str:
    return " ".join("".join(capsys.readouterr()).split())


def test_summary_lists_the_written_files(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tune(data, tmp_path / "run")
    output = console(capsys)
    assert "bert-tiny is a preset: its weights are fresh" in output
    assert "95 % interval" in output
    assert "report.html" in output
    assert "bertsmith predict" in output
    bertsmith.finetune(tmp_path / "run", data=data, out=tmp_path / "further", epochs=1, device="cpu")
    assert "is a preset" not in console(capsys)


def test_run_without_folder_prints_no_path(capsys: pytest.CaptureFixture) -> None:
    bertsmith.finetune("bert-tiny", train=ROWS, set=SMALL, device="cpu")
    output = console(capsys)
    assert "dev: accuracy" in output
    assert "written to" not in output


def test_several_runs_print_data_notices_once(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tune(data, tmp_path / "runs", seeds=2)
    output = console(capsys)
    assert output.count("train: 64 rows") == 1
    assert "seed-0, run 1 of 2" in output
    assert "seed-1, run 2 of 2" in output
    assert "report.html" in output


@pytest.mark.parametrize(
    ("model", "changes", "output"),
    [
        ("bert-tinny", [], "neither a bundled model nor the folder of a model nor a preset; did you mean 'bert-tiny'"),
        ("bert-tiny", ["head.features.layers=4"], "head.features.layers is 4 .* at most 1, the encoder's"),
        ("bert-tiny", ["task.class_weights=heavy"], "task.class_weights is 'heavy': input should be"),
    ],
)
def test_invalid_input_creates_no_folder(
    model: str, changes: list[str], output: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=output):
        tune(data, tmp_path / "run", *changes, model=model)
    assert not (tmp_path / "run").exists()


def test_folder_without_model_or_task_raises(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not the folder of a model: it has no config.json"):
        tune(data, tmp_path / "run", model=data)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"has no train.jsonl .*; it has no such file"):
        tune(tmp_path / "empty", tmp_path / "run")
    write_task(tmp_path / "several" / "one")
    (tmp_path / "several" / "two").mkdir()
    (tmp_path / "several" / "two" / "train.jsonl").write_text('{"other": [1]}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"has no split of a task: a file train, dev or test"):
        tune(tmp_path / "several", tmp_path / "run")


def test_booleans_are_labels(tmp_path: Path) -> None:
    rows = [{"text": text, "label": label == "good"} for text, label in ROWS]
    made = bertsmith.finetune("bert-tiny", train=rows, set=SMALL, device="cpu")
    assert set(made["data"]["train"]["labels"]) == {"true", "false"}
    assert made.predict(["the fine day"])[0] in ("true", "false")


def test_single_tag_is_degenerate() -> None:
    task = Tagging(labels=("O", "B-X"))
    examples = [TaggedWords(words=("a", "b"), tags=(0, 1)), TaggedWords(words=("c",), tags=(0,))]
    assert has_constant_answers(task, examples, [{"answer": ["O", "O"]}, {"answer": ["O"]}])
    assert not has_constant_answers(task, examples, [{"answer": ["O", "B-X"]}, {"answer": ["O"]}])


def test_printed_answers_are_short() -> None:
    assert format_answer([0.25] * 128) == "0.25, 0.25, 0.25, 0.25, 0.25, 0.25, … (128 numbers)"
    assert format_answer(1.6721363067626953) == "1.67214"
    assert format_answer([]) == format_answer("") == "(none)"
    assert format_answer(["B-PER", "O"]) == "B-PER, O"


def test_choice_task_requires_a_file(tmp_path: Path) -> None:
    rows = [{"context": text, "choices": ["good", "bad"], "label": int(label == "bad")} for text, label in ROWS]
    bertsmith.finetune("bert-tiny", train=rows, out=tmp_path / "run", set=SMALL, device="cpu")
    with pytest.raises(InputError, match=r"this task needs the columns context, choices; pass --data"):
        bertsmith.predict(tmp_path / "run", text=["the day"], out=tmp_path / "answers")


def test_choice_is_printed_with_its_text() -> None:
    example = ChoiceExample(context="the day", question="", choices=("it  rains", "it snows"), label=1)
    assert Choice().describe_answer(example, 0) == "0: it rains"


@pytest.mark.parametrize("metric", ["f1", "average_precision"])
def test_progress_line_fits_a_narrow_terminal(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(display, "Console", lambda stderr: Console(file=file, width=80))
    with display.Display(36813, 18406, visible=True) as shown:
        shown.show({"kind": "held_out", "score": 77.3, "metric": metric})
        shown.show({"kind": "training", "tokens_per_second": 120345.0, "loss": 0.123})
    line = file.getvalue().splitlines()[-1]
    assert len(line) <= 80
    assert "18406/36813 loss 0.123 · dev" in line
    assert line.endswith("left")
    assert ("tokens/s" in line) == (metric == "f1")
