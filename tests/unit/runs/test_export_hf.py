"""`bertsmith export --to hf` of a fine-tuned model: labels, task, and the printed format with its reason."""

import json
from pathlib import Path

import pytest
from helpers_finetune import ROWS, tune, write_task

import bertsmith
from bertsmith.checkpoint.hf.writing import plan_hf
from bertsmith.errors import InputError
from bertsmith.runs.exchange import export_model

TEXTS = [text for text, _ in ROWS[:6]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    tune(write_task(folder / "reviews"), folder / "run")
    return folder / "run"


def test_fine_tuned_model_keeps_its_labels(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    metrics = export_model(run, out=tmp_path / "hf")
    output = " ".join(capsys.readouterr().out.split())
    assert metrics["form"] == "native"
    assert "written as BertForSequenceClassification, which transformers opens without Bertsmith" in output
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert settings["id2label"] == {"0": "bad", "1": "good"}
    assert settings["problem_type"] == "single_label_classification"
    answers = [bertsmith.Predictor.load(folder).details(TEXTS) for folder in (run, tmp_path / "hf")]
    assert answers[0] == answers[1]
    again = export_model(tmp_path / "hf", out=tmp_path / "again")
    assert again["architecture"] == "BertForSequenceClassification"
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == settings


@pytest.mark.parametrize(
    ("choice", "why"),
    [({"width": 0.5}, "its heads do not fill its width"), ({"native": "never"}, "native was given as 'never'")],
)
def test_model_without_native_class_is_wrapped(
    choice: dict, why: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    metrics = export_model(run, out=tmp_path / "hf", **choice)
    output = " ".join(capsys.readouterr().out.split())
    assert metrics["form"] == "bertsmith"
    assert "which transformers opens with trust_remote_code=True, or after `import bertsmith.hf`, because" in output
    assert why in output
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert why in settings["why_not_native"]
    assert "import bertsmith.hf" in settings["opened_by"]
    assert settings["id2label"] == {"0": "bad", "1": "good"}
    assert why in (tmp_path / "hf" / "README.md").read_text()
    assert bertsmith.Predictor.load(tmp_path / "hf").predict(TEXTS[:1])[0] in ("bad", "good")


def test_native_always_raises_without_native_class(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^this model cannot be exported as a Hugging Face bert: its heads do not"):
        export_model(run, out=tmp_path / "hf", width=0.5, native="always")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(InputError, match=r"^native is 'yes'; allowed: always, auto, never$"):
        bertsmith.export(bertsmith.load(run), tmp_path / "hf", native="yes")


def test_fine_tuned_electra_is_native(run: Path, tmp_path: Path) -> None:
    tune(run.parent / "reviews", tmp_path / "run", "head.hidden=gelu", model="electra-small")
    assert export_model(tmp_path / "run", out=tmp_path / "hf")["architecture"] == "ElectraForSequenceClassification"


def test_fine_tuned_modern_is_native_by_default(run: Path, tmp_path: Path) -> None:
    """With the default head, not with another one."""
    sizes = "model.overrides={layers=4, width=32, heads=2, dropout=0.0}"
    tune(run.parent / "reviews", tmp_path / "run", sizes, model="modern-small")
    assert export_model(tmp_path / "run", out=tmp_path / "hf")["architecture"] == "ModernBertForSequenceClassification"
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert settings["classifier_pooling"] == "mean"
    answers = [bertsmith.Predictor.load(tmp_path / name).details(TEXTS) for name in ("run", "hf")]
    assert answers[0] == answers[1]
    tune(run.parent / "reviews", tmp_path / "plain", sizes, "head.hidden=none", model="modern-small")
    metrics = export_model(tmp_path / "plain", out=tmp_path / "ours")
    assert metrics["architecture"] == "BertsmithForSequenceClassification"
    assert "heads.classifier.hidden is None" in (tmp_path / "ours" / "README.md").read_text()


def test_scaled_regression_is_explained(run: Path) -> None:
    task = {"task": {"kind": "regression", "scale": True, "lowest": 1.0, "highest": 5.0}}
    plan = plan_hf(bertsmith.load(run), task=task)
    assert plan.remark.endswith("; its numbers are 1 + 4 · the output, since it was trained on 0 to 1")
    assert "its numbers" not in plan_hf(bertsmith.load(run), task={"task": {**task["task"], "scale": False}}).remark


def test_python_export_writes_the_task(run: Path, tmp_path: Path) -> None:
    output = bertsmith.export(bertsmith.load(run), tmp_path / "hf", task=run)
    assert output == "written as BertForSequenceClassification, which transformers opens without Bertsmith"
    assert bertsmith.Predictor.load(tmp_path / "hf").predict(TEXTS) == bertsmith.Predictor.load(run).predict(TEXTS)
    bertsmith.export(bertsmith.load(run), tmp_path / "hf", force=True)
    assert not (tmp_path / "hf" / "task.json").exists()
    with pytest.raises(InputError, match=r"which has no task\.json"):
        bertsmith.export(bertsmith.load(run), tmp_path / "other", task=tmp_path)
