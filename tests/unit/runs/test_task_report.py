"""Confidence interval, report and official files of a fine-tuning and an evaluation."""

import json
from pathlib import Path

import pytest

from bertsmith.runs.evaluate import evaluate
from bertsmith.runs.finetune import finetune

TINY = ["model.overrides={layers=1,width=16,heads=2}", "tokenizer.vocabulary=300"]
TINY += ["sequences.length=16", "run.epochs=1", "run.log_every=1"]
HOSTILE = "<script>alert(1)</script>"


def rows(count: int) -> str:
    lines = []
    for number in range(count):
        text = f"{HOSTILE} {'good' if number % 2 else 'bad'} {number}"
        lines.append(json.dumps({"idx": number, "sentence1": text, "sentence2": "so", "label": number % 2}))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "RTE").mkdir()
    (folder / "RTE" / "train.jsonl").write_text(rows(64), encoding="utf-8")
    (folder / "RTE" / "dev.jsonl").write_text(rows(30), encoding="utf-8")
    finetune("bert-tiny", data=str(folder / "RTE"), out=folder / "out", set=TINY, device="cpu")
    evaluate(folder / "out", data=str(folder / "RTE"), out=folder / "evaluated", device="cpu")
    return folder


@pytest.mark.parametrize("name", ["out", "evaluated"])
def test_result_has_an_interval_and_a_report(run: Path, name: str) -> None:
    result = json.loads((run / name / "result.json").read_text(encoding="utf-8"))
    low, high = result["interval"]
    assert low <= result["score"] <= high
    page = (run / name / "report.html").read_text(encoding="utf-8")
    assert f"Accuracy {result['score']:.1f} on 30 dev examples" in page
    assert f"95 % interval {low:.1f} to {high:.1f}" in page
    assert HOSTILE not in page
    assert ("Training curves" in page) == (name == "out")


def test_finetune_and_evaluate_give_the_same_scores(run: Path) -> None:
    trained, evaluated = (json.loads((run / name / "result.json").read_text()) for name in ("out", "evaluated"))
    for metric in ("metric", "score", "interval", "accuracy", "f1", "matthews"):
        assert trained[metric] == evaluated[metric]


def test_official_file_is_named_after_the_data(run: Path) -> None:
    text = (run / "out" / "dev.official" / "RTE.tsv").read_text(encoding="utf-8")
    assert text == (run / "evaluated" / "official" / "RTE.tsv").read_text(encoding="utf-8")
    header, *lines = text.splitlines()
    assert header == "index\tprediction"
    answers = [json.loads(line)["answer"] for line in (run / "out" / "dev.predictions.jsonl").read_text().splitlines()]
    names = {"0": "entailment", "1": "not_entailment"}
    assert lines == [f"{number}\t{names[answer]}" for number, answer in enumerate(answers)]
