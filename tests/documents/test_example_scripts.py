"""The example scripts run from start to end with tiny settings."""

import csv
import json
import runpy
import sys
from pathlib import Path

import pytest

from bertsmith.text import support_desk

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *words: str | Path) -> None:
    sys.argv = [name, *map(str, words)]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the arguments of the process after each test."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))


def write_reviews(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["review", "stars"])
        writer.writerows(["it works well", "five"] if index % 2 else ["it broke at once", "one"] for index in range(60))


def test_classify_csv_then_elastic_and_fit(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_reviews(workplace / "reviews.csv")
    columns = ("--text", "review", "--label", "stars")
    run_example("classify_csv", "reviews.csv", *columns, "--epochs", 1, "--out", "runs/reviews")
    answers = capsys.readouterr().out.splitlines()[-2:]
    assert all(answer.split()[0] in {"one", "five"} for answer in answers)

    flags = ("--latency-ms", 50, "--epochs", 1, "--engine", "torch")
    run_example("elastic_and_fit", "runs/reviews", "--data", "reviews.csv", *flags)
    printed = capsys.readouterr().out
    assert "width 0.50  depth 0.50" in printed
    assert (workplace / "runs" / "fitted" / "task.json").is_file()
    assert "ms" in printed.splitlines()[-1]


def test_named_entities(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"words": ["Ada", "lives", "in", "Paris"], "tags": ["B-PER", "O", "O", "B-LOC"]}
    (workplace / "people.jsonl").write_text(f"{json.dumps(row)}\n" * 40, encoding="utf-8")
    run_example("named_entities", "people.jsonl", "--epochs", 1, "--sentence", "Grace moved to London")
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-4:]] == [
        "Grace",
        "moved",
        "to",
        "London",
    ]


def test_semantic_search(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [row["text"] for row in support_desk.support_desk("train")]
    (workplace / "notes.txt").write_text("\n".join(texts), encoding="utf-8")
    run_example("semantic_search", "notes.txt", texts[7], "--top", 3)
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"1.00  {texts[7]}"
    assert len(others) == 2


def test_continue_pretraining(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "texts.txt").write_text("\n\n".join(support_desk.messages()), encoding="utf-8")
    tiny = ("sequences.length=32", "sequences.micro_tokens=512", "batch.tokens=512", "run.workers=0")
    settings = [word for setting in tiny for word in ("--set", setting)]
    run_example("continue_pretraining", "texts.txt", "--new-tokens", 10, "--budget", "1k", *settings)
    assert "held-out loss" in capsys.readouterr().out
    assert (workplace / "runs" / "domain" / "pretrained" / "model.safetensors").is_file()


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "classify_csv",
        "continue_pretraining",
        "elastic_and_fit",
        "named_entities",
        "semantic_search",
    }
