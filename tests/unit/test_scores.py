"""The benchmarks that judge a pre-trained model: their tasks, runs that are kept and resumed, tables and picture."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import bertsmith
from bertsmith.tasks.metrics.classes import CLASS_METRICS
from bertsmith.tasks.metrics.ranking import VALUE_METRICS
from bertsmith.text.learn import learn_tokenizer
from bertsmith.toml import override
from bertsmith.training.finetuning import FinetuneSettings
from bertsmith.training.trainer import Trainer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import scores
import scores_table
import small_curves
import small_elastic
from scores_tasks import COMMON, FRESH, LEAN, TASKS, flags, rows_of

WORDS = {1: ["fine", "lovely", "bright"], 0: ["awful", "broken", "sad"]}
THINGS = ["day", "smith", "river", "gate", "clock", "letter"]
SENTENCES = [(f"the {word} {thing}", label) for thing in THINGS for label, words in WORDS.items() for word in words]
SMALL = ["--set", "sequences.length=16", "--device", "cpu", "--rows", "24", "--epochs", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CoLA and STS-B in small."""
    folder = tmp_path_factory.mktemp("data")
    cola = [{"sentence": text, "label": label} for text, label in SENTENCES]
    pairs = zip(SENTENCES, SENTENCES[7:], strict=False)
    similar = [{"sentence1": a, "sentence2": b, "label": 5.0 * (x == y)} for (a, x), (b, y) in pairs]
    for name, rows in {"CoLA": cola, "STS-B": similar}.items():
        (folder / "glue" / name).mkdir(parents=True)
        for part, own in (("train", rows), ("dev", rows[::3])):
            lines = "".join(json.dumps(row) + "\n" for row in own)
            (folder / "glue" / name / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = learn_tokenizer((text for text, _ in SENTENCES), "wordpiece", 120, progress=False)
    config = bertsmith.preset("electra-small", vocabulary=tokenizer.size, width=16, layers=2, heads=2, max_length=32)
    made = bertsmith.build(config, seed=0)
    made.tokenizer = tokenizer
    out = tmp_path_factory.mktemp("models") / "small"
    bertsmith.save(made, out)
    return out


def carried_out(monkeypatch: pytest.MonkeyPatch, script: Any, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, words)])
    monkeypatch.setitem(sys.modules, "datasets", None)  # an extra that the scripts do not need
    return int(script.main())


def test_tasks_name_figures_and_settings_that_exist() -> None:
    known = {*CLASS_METRICS, *VALUE_METRICS, "f1", "exact"}
    kinds = {"STS-B": "regression", "SQuAD": "spans"}
    for name, task in TASKS.items():
        assert set(task.metrics) <= known, name
        plain = {"model": "bert-tiny", "task": {"kind": kinds.get(name, "classification")}}
        given = [*LEAN, *flags({**COMMON, **task.settings, **FRESH})]
        settings = FinetuneSettings.parse(override(plain, given), source=name)
        assert settings.optimizer.learning_rate == FRESH["optimizer.learning_rate"]


@pytest.mark.slow  # processes of its own
def test_runs_are_kept_resumed_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "scores.jsonl"
    words = ["--data", data, "--tasks", "CoLA,STS-B", "--seeds", "0,1", "--out", out, *SMALL]
    assert carried_out(monkeypatch, scores, model, f"gone={tmp_path / 'gone'}", *words) == 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    failed = [line for line in lines if "error" in line]
    assert {line["model"] for line in failed} == {"gone"}
    assert all("neither a bundled model nor the folder" in line["error"] for line in failed)
    assert len(lines) - len(failed) == 4
    # both orders of STS-B's pairs are learned from
    assert {(line["task"], line["steps"]) for line in lines if line not in failed} == {("CoLA", 1), ("STS-B", 2)}
    printed = capsys.readouterr().out
    assert "| model | seeds | CoLA Matthews | STS-B Pearson / Spearman | mean |" in printed
    assert "At most 24 training rows" in printed

    # what is there is not run again, other weights and rates are
    out.write_text(out.read_text() + '{"model": "torn')
    rates = ["--learning-rates", "0.0003", "0.01", "--fresh", model]
    assert carried_out(monkeypatch, scores, f"small={model}", *words, *rates) == 0
    again = [json.loads(line) for line in out.read_text().splitlines()][len(lines) :]
    assert [line["settings"]["optimizer.learning_rate"] for line in again if line["model"] == "small"] == [0.01] * 4
    assert sum(line["model"] == "random weights" for line in again) == 8
    printed = capsys.readouterr()
    assert "12 runs to do, 4 are done" in printed.err
    assert "chosen task by task by the mean over seeds on dev" in printed.out
    assert carried_out(monkeypatch, scores, "--out", out, "--table-only") == 0
    assert capsys.readouterr().out == printed.out


def test_what_is_asked_wrongly_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path, model: Path, tmp_path: Path
) -> None:
    words = ["--data", data, "--out", tmp_path / "scores.jsonl"]
    for wrong, sentence in {
        ("--tasks", "CoLa"): "did you mean 'CoLA'",
        (str(model),): "two models are called 'small'",
        ("--set", "MNLI:run.epochs=2"): "neither a task nor a model here",
    }.items():
        assert carried_out(monkeypatch, scores, model, *wrong, *words) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "scores.jsonl").exists()


def test_the_rate_with_the_best_mean_counts_once_all_its_seeds_are_there() -> None:
    def line(rate: float, seed: int, score: float) -> dict[str, Any]:
        settings = {"optimizer.learning_rate": rate}
        return {"task": "CoLA", "seed": seed, "settings": settings, "metrics": {"matthews": score}}

    lines = [line(1e-4, 0, 50), line(1e-4, 1, 40), line(3e-4, 0, 49), line(3e-4, 1, 47), line(1e-3, 0, 99)]
    assert [found["metrics"]["matthews"] for found in scores_table.best_settings(lines)] == [49, 47]


def test_cut_rows_are_the_same_every_time_and_no_beginning(data: Path) -> None:
    folder = str(data / "glue" / "CoLA")
    first = list(rows_of(folder, "train", 10))
    rows_of.cache_clear()
    assert list(rows_of(folder, "train", 10)) == first
    assert first != list(rows_of(folder, "train", None))[:10]


def test_sub_networks_in_a_grid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path, model: Path, tmp_path: Path
) -> None:
    words = ["--data", data, "--tasks", "STS-B", "--out", tmp_path / "elastic.jsonl", "--widths", "1", "0.5"]
    words += ["--depths", "1", "0.5", "--rows", "16", "--epochs", "1", "--device", "cpu"]
    words += ["--finetune", "run.epochs=1", "--finetune", "sequences.length=16"]
    assert carried_out(monkeypatch, small_elastic, model, *words) == 0
    line = json.loads((tmp_path / "elastic.jsonl").read_text())
    assert {(member["width"], member["depth"]) for member in line["grid"]} == {(1, 1), (0.5, 1), (1, 0.5), (0.5, 0.5)}
    printed = capsys.readouterr().out
    assert "small on STS-B, spearman, 1 seed, at most 16 training rows; fine-tuned" in printed
    assert "| width | depth 1 | depth 0.5 |" in printed


def test_curves_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    names = [name for panel in small_curves.PANELS for name in panel.lines]
    rows = [
        {"kind": kind, "step": step, **dict.fromkeys(names, 1 / step)}
        | ({"tokens": 1000 * step, "seconds": 1.5 * step} if kind == "training" else {})
        for step in range(1, 9)
        for kind in ("training", "held_out")[: 1 + (step % 4 == 0)]
    ]
    log, out = tmp_path / "log.jsonl", tmp_path / "images" / "curves.png"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert carried_out(monkeypatch, small_curves, log, "--out", out) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    log.write_text(json.dumps({"kind": "training", "step": 1, "loss": 1.0}) + "\n")
    assert carried_out(monkeypatch, small_curves, log, "--out", out) == 2
    assert "has no column 'replaced_loss'" in capsys.readouterr().err


def test_interrupted_run_returns_no_metrics(
    monkeypatch: pytest.MonkeyPatch, data: Path, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(Trainer, "_is_stop_requested", lambda *_: True)
    out = tmp_path / "scores.jsonl"
    assert carried_out(monkeypatch, scores, model, "--data", data, "--tasks", "STS-B", "--out", out, *SMALL) == 1
    line = json.loads(out.read_text())
    assert line["error"] == "stopped after step 1: no metrics"
    assert "metrics" not in line
