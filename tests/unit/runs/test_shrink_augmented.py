"""bertsmith shrink --augment: what learns from new rows, what does not, and what an interrupted run leaves."""

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
    """A folder with a task, a model for it and a masked language model."""
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


def shrunk(home: Path, out: Path, *changes: str, **more: Any) -> Any:
    given = {"augment": home / "lm", "widths": [1.0, 0.5], "depths": [1.0], **more}
    return bertsmith.shrink(
        home / "tuned", data=str(home / "data"), out=out, set=[*QUICK, *changes], device="cpu", **given
    )


def test_all_stages_but_labels_learn_from_new_rows(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: dict[str, tuple[int, int]] = {}
    make_stage = elastic.make_stage

    def seen(settings: Any, stage: str, student: Any, teacher: Any, work: Any, train: Any, *rest: Any) -> Any:
        learned[stage] = len(train.examples), len(train.features)
        return make_stage(settings, stage, student, teacher, work, train, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(elastic, "make_stage", seen)
    metrics = shrunk(home, tmp_path / "out", 'stages=["width","depth","labels"]')
    new = [json.loads(line) for line in (tmp_path / "out/augmented/rows.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (home / "data/train.jsonl").read_text().splitlines()]
    assert 40 < len(new) <= 128
    assert not {row["text"] for row in new} & {row["text"] for row in rows}
    whole = len(rows) + len(new)
    assert learned == {"width": (whole, whole), "depth": (whole, whole), "labels": (len(rows), len(rows))}
    assert metrics["rows"] == {"train": len(rows), "with_augmented": whole}


def test_without_a_model_there_are_no_new_rows(home: Path, tmp_path: Path) -> None:
    metrics = shrunk(home, tmp_path / "out", 'stages=["width"]', augment=None)
    assert metrics["rows"]["train"] == metrics["rows"]["with_augmented"] == 64
    assert not (tmp_path / "out/augmented").exists()


def test_an_interrupted_run_goes_on_to_the_same_rows(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_SHARD_SIZE", 400)
    work, asked = MaskedWords.candidates, []

    def interrupted(self: MaskedWords, passages: Any, *more: Any) -> Any:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(passages)
        return work(self, passages, *more)

    shrunk(home, tmp_path / "whole", 'stages=["width"]')
    monkeypatch.setattr(MaskedWords, "candidates", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shrunk(home, tmp_path / "out", 'stages=["width"]')
    assert not (tmp_path / "out/augmented/rows.jsonl").exists()
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "out/augmented").glob("*.npz")}
    assert len(kept) == 3
    monkeypatch.setattr(MaskedWords, "candidates", work)
    bertsmith.shrink(out=tmp_path / "out", resume=True, device="cpu")
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    names = {file.name for file in (tmp_path / "whole/augmented").iterdir()}
    assert len(names) > 4
    for name in ("rows.jsonl", "../model.safetensors"):
        one, other = ((tmp_path / run / "augmented" / name).read_bytes() for run in ("whole", "out"))
        assert one == other, name


def test_the_model_is_checked_before_anything_is_written(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"augmentation\.model is .*nowhere.*, which is not a folder"):
        shrunk(home, out, augment=home / "nowhere")
    with pytest.raises(InputError, match=r"augmentation\.model has no masked_tokens head \(its heads: classifier\)"):
        shrunk(home, out, augment=home / "tuned")
    shutil.copytree(home / "lm", tmp_path / "bare")
    (tmp_path / "bare/tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"augmentation\.model has no tokenizer"):
        shrunk(home, out, augment=tmp_path / "bare")
    with pytest.raises(InputError, match="lie inside each other"):
        shrunk(home, home / "lm", force=True)
    assert not out.exists()


def test_the_explanation_counts_new_rows(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shrunk(home, tmp_path / "out", 'stages=["width","labels"]', "run.epochs=1", explain=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "augmentation 64 rows become at most 192" in said
    assert "12 steps stage labels" in said
    assert said.endswith("4 steps")
    assert not (tmp_path / "out").exists()
