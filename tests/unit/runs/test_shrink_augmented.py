"""`bertsmith shrink --augment`: stages with augmented rows, resuming, invalid models."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers_finetune import ROWS, write_task

import bertsmith
from bertsmith import InputError
from bertsmith.data.examples import ExampleConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.shrinking import elastic
from bertsmith.shrinking import masked_words as shards
from bertsmith.shrinking.masked_words import MaskedWords
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.predictor import TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer

QUICK = ["run.epochs=0.1", "batch.examples=16", "run.log_every=1", "augmentation.copies=2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a task, a model for it and a masked language model."""
    folder = tmp_path_factory.mktemp("augmented")
    write_task(folder / "data")
    tokenizer = learn_tokenizer([text for text, _ in ROWS], "wordpiece", 200, progress=False)
    sizes = {"width": 16, "heads": 2, "layers": 1, "max_length": 32}
    config = bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, **sizes)
    labels = ("bad", "good")
    for name, one in (("tuned", config.changed(heads=(ClassifierConfig(labels=labels),))), ("lm", config)):
        model = bertsmith.build(one, seed=0)
        model.tokenizer = tokenizer
        bertsmith.save(model, folder / name)
    write_task_record(
        TaskRecord(task=Classification(labels=labels), sequences=ExampleConfig(length=16)), folder / "tuned"
    )
    return folder


def shrink(home: Path, out: Path, *changes: str, **more: Any) -> Any:
    given = {"augment": home / "lm", "widths": [1.0, 0.5], "depths": [1.0], **more}
    return bertsmith.shrink(
        home / "tuned", data=str(home / "data"), out=out, set=[*QUICK, *changes], device="cpu", **given
    )


def test_all_stages_but_labels_use_augmented_rows(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: dict[str, tuple[int, int]] = {}
    make_stage = elastic.make_stage

    def record_stage(settings: Any, stage: str, student: Any, teacher: Any, work: Any, train: Any, *rest: Any) -> Any:
        learned[stage] = len(train.examples), len(train.features)
        return make_stage(settings, stage, student, teacher, work, train, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(elastic, "make_stage", record_stage)
    metrics = shrink(home, tmp_path / "out", 'stages=["width","depth","labels"]')
    new = [json.loads(line) for line in (tmp_path / "out/augmented/rows.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (home / "data/train.jsonl").read_text().splitlines()]
    assert 40 < len(new) <= 128
    assert not {row["text"] for row in new} & {row["text"] for row in rows}
    whole = len(rows) + len(new)
    assert learned == {"width": (whole, whole), "depth": (whole, whole), "labels": (len(rows), len(rows))}
    assert metrics["rows"] == {"train": len(rows), "with_augmented": whole}


def test_no_rows_are_added_without_a_model(home: Path, tmp_path: Path) -> None:
    metrics = shrink(home, tmp_path / "out", 'stages=["width"]', augment=None)
    assert metrics["rows"]["train"] == metrics["rows"]["with_augmented"] == 64
    assert not (tmp_path / "out/augmented").exists()


def test_resumed_run_has_the_same_rows(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SHARD_SIZE", 400)
    work, calls = MaskedWords.candidates, []

    def interrupted(self: MaskedWords, passages: Any, *more: Any) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(passages)
        return work(self, passages, *more)

    shrink(home, tmp_path / "whole", 'stages=["width"]')
    monkeypatch.setattr(MaskedWords, "candidates", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shrink(home, tmp_path / "out", 'stages=["width"]')
    assert not (tmp_path / "out/augmented/rows.jsonl").exists()
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out/augmented").glob("*.npz")}
    assert len(times) == 3
    monkeypatch.setattr(MaskedWords, "candidates", work)
    bertsmith.shrink(out=tmp_path / "out", resume=True, device="cpu")
    assert {file: file.stat().st_mtime_ns for file in times} == times
    names = {file.name for file in (tmp_path / "whole/augmented").iterdir()}
    assert len(names) > 4
    for name in ("rows.jsonl", "../model.safetensors"):
        one, other = ((tmp_path / run / "augmented" / name).read_bytes() for run in ("whole", "out"))
        assert one == other, name


def test_model_is_checked_before_writing(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"augmentation\.model is .*nowhere.*, which is not a folder"):
        shrink(home, out, augment=home / "nowhere")
    with pytest.raises(InputError, match=r"augmentation\.model has no masked_tokens head \(its heads: classifier\)"):
        shrink(home, out, augment=home / "tuned")
    shutil.copytree(home / "lm", tmp_path / "bare")
    (tmp_path / "bare/tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"augmentation\.model has no tokenizer"):
        shrink(home, out, augment=tmp_path / "bare")
    with pytest.raises(InputError, match="lie inside each other"):
        shrink(home, home / "lm", force=True)
    assert not out.exists()


def test_explain_counts_augmented_rows(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shrink(home, tmp_path / "out", 'stages=["width","labels"]', "run.epochs=1", explain=True)
    output = " ".join(capsys.readouterr().out.split())
    assert "augmentation 64 rows become at most 192" in output
    assert "12 steps stage labels" in output
    assert output.endswith("4 steps")
    assert not (tmp_path / "out").exists()
