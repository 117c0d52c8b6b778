"""`bertsmith finetune` as a command and in Python: defaults, files, early stopping, best weights, invalid input."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers_finetune import ROWS, SMALL, log, tune, write_task

import bertsmith
from bertsmith.checkpoint.files import read_tensors
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.degenerate import has_constant_answers
from bertsmith.text.rows import table_of
from bertsmith.toml import read_toml
from bertsmith.training.display import Display
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.trainer import Trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    tune(data, out)
    return out


def test_run_writes_model_result_and_log(run: Path, data: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 8
    assert result["score"] == result[result["metric"]]
    names = {path.name for path in run.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json", "task.json", "recipe.toml", "log.jsonl"}
    assert "checkpoints" not in names
    held_out = log(run, "held_out")
    assert [row["step"] for row in held_out] == [4, 8]
    assert result["score"] == max(row["score"] for row in held_out)
    assert {row["metric"] for row in held_out} == {result["metric"]}


def test_recipe_of_a_run_reproduces_it(run: Path, tmp_path: Path) -> None:
    recorded = read_toml(run / "recipe.toml")
    assert recorded["schedule"]["warmup"] == 0.1
    assert recorded["optimizer"]["betas"] == [0.9, 0.999]
    bertsmith.finetune(recipe=run / "recipe.toml", out=tmp_path / "again", device="cpu")
    assert read_toml(tmp_path / "again" / "recipe.toml") == recorded
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_flags_override_recipe_and_defaults(run: Path, data: Path, tmp_path: Path) -> None:
    arguments = ["finetune", str(run), "--data", str(data), "--out", str(tmp_path / "run"), "--device", "cpu"]
    main([*arguments, "--epochs", "1", "--learning-rate", "5e-05", "--batch", "32", "--seed", "3"])
    recorded = read_toml(tmp_path / "run" / "recipe.toml")
    assert recorded["run"]["epochs"] == 1
    assert recorded["optimizer"]["learning_rate"] == 5e-5
    assert recorded["batch"]["examples"] == 32
    assert recorded["run"]["seed"] == 3
    assert recorded["sequences"]["length"] == 32  # the papers' 128, limited by the model


def test_explain_prints_settings_and_writes_nothing(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    main(["finetune", str(run), "--data", str(data), "--explain"])
    printed = capsys.readouterr().out
    for text in ("Devlin et al. 2019", "(tiny)", "learning_rate = 0.0003", "batch", "64 in train, 16 in dev"):
        assert text in printed
    # 64 examples, 8 per step and at most 20 epochs
    assert "160, 8 an epoch, 16 of warm-up" in printed
    assert "training FLOPs in all" in printed
    assert list(tmp_path.iterdir()) == []


def test_python_api_without_output_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = [ROWS[index] for index in (0, 1, 10, 11, 40, 41, 50, 51)]
    made = bertsmith.finetune("bert-tiny", train=rows, dev=rows, device="cpu")
    assert made["score"] == 100.0
    assert made.predict([text for text, _ in rows]) == [label for _, label in rows]
    assert made.predictor.details(["the fine day"])[0]["score"] > 0.5
    assert list(tmp_path.iterdir()) == []  # no files are written


def test_model_given_in_python_is_not_changed(run: Path, tmp_path: Path) -> None:
    model = bertsmith.load(run)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = bertsmith.finetune(model, train=ROWS, epochs=1, set=["sequences.length=16"], device="cpu")
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    changed = [name for name, tensor in made.model.state_dict().items() if not tensor.equal(before[name])]
    assert changed
    # equal to a run from its folder
    folder = bertsmith.finetune(str(run), train=ROWS, epochs=1, set=["sequences.length=16"], device="cpu")
    assert folder["training_loss"] == made["training_loss"]
    with pytest.raises(InputError, match=r"model.overrides is set, but the model is a Python object"):
        bertsmith.finetune(model, train=ROWS, set=["model.overrides.dropout=0.2"], device="cpu")


def script_scores(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> None:
    """Let evaluations return these scores, in order."""
    left, real = iter(scores), Evaluator.__call__

    def call(self: Evaluator, train_step: Any) -> dict[str, Any]:
        return real(self, train_step) | {"score": next(left)}

    monkeypatch.setattr(Evaluator, "__call__", call)


def test_early_stopping_keeps_the_best_weights(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script_scores(monkeypatch, [1.0, 3.0, 2.0, 2.5, 9.0])
    stopped = tune(data, tmp_path / "stopped", "run.epochs=10", "run.patience=2", "schedule.kind=constant")
    assert (stopped["steps"], stopped["best_step"]) == (16, 8)  # 4 steps per epoch
    monkeypatch.undo()
    # at a constant rate, the best weights equal the final weights of a run that ends there
    tune(data, tmp_path / "short", "run.epochs=2", "run.choose=last", "schedule.kind=constant", "schedule.warmup=0.0")
    script_scores(monkeypatch, [1.0, 3.0, 2.0, 2.0])
    tune(data, tmp_path / "long", "run.epochs=4", "schedule.kind=constant", "schedule.warmup=0.0")
    short, long = (read_tensors(tmp_path / name / "model.safetensors") for name in ("short", "long"))
    assert all(tensor.equal(short[name]) for name, tensor in long.items())


def test_choose_last_keeps_the_last_weights(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script_scores(monkeypatch, [3.0, 2.0, 3.0, 2.0])
    best, last = (tmp_path / name for name in ("best", "last"))
    tune(data, best)
    tune(data, last, "run.choose=last")
    assert (best / "model.safetensors").read_bytes() != (last / "model.safetensors").read_bytes()


def test_rate_rises_and_falls(run: Path) -> None:
    rates = [row["learning_rate"] for row in log(run, "training")]
    assert rates[0] == pytest.approx(1e-3)  # a tenth of eight steps is one
    assert rates[1:] == pytest.approx([1e-3 * (7 - k) / 7 for k in range(1, 8)])


def test_several_evaluations_per_epoch(data: Path, tmp_path: Path) -> None:
    tune(data, tmp_path / "run", "run.evaluations=2")
    assert [row["step"] for row in log(tmp_path / "run", "held_out")] == [2, 4, 6, 8]


def test_frozen_encoder_uses_the_head_rate(run: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    bertsmith.finetune(run, data=data, out=out, epochs=1, set=["encoder.frozen=all"], device="cpu")
    assert read_toml(out / "recipe.toml")["optimizer"]["learning_rate"] == 1e-3
    before, after = (read_tensors(folder / "model.safetensors") for folder in (run, out))
    assert {name.split(".")[0] for name in before if not before[name].equal(after[name])} == {"heads"}


def test_single_answer_is_reported_as_degenerate() -> None:
    task = Classification(labels=("a", "b"))
    table = table_of([{"text": "x", "label": "a"}, {"text": "y", "label": "b"}], "dev")
    examples = task.examples(table)
    assert has_constant_answers(task, examples, [{"answer": "a"}, {"answer": "a"}])
    assert not has_constant_answers(task, examples, [{"answer": "a"}, {"answer": "b"}])
    assert not has_constant_answers(task, examples[:1], [{"answer": "a"}])


def test_degenerate_run_prints_a_warning(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    metrics = tune(data, tmp_path / "run", "optimizer.learning_rate=1e-9", "run.epochs=1")
    assert metrics["is_degenerate"]
    assert "degenerate" in " ".join(capsys.readouterr().out.split())


def test_progress_line_shows_the_metric() -> None:
    display = Display(10, 0, visible=False)
    display.show({"kind": "held_out", "loss": 0.5, "metric": "entity_f1", "score": 90.12})
    training = {"kind": "training", "loss": 0.25, "tokens_per_second": 1200.0}
    display.show(training)
    assert display.progress.tasks[0].fields["status"] == "loss 0.250 · dev entity f1 90.1 · 1.2k tokens/s"
    display.show({"kind": "held_out", "loss": 0.5})
    assert display.progress.tasks[0].fields["status"] == "loss 0.250 · held out 0.500 · 1.2k tokens/s"


def test_invalid_resume_and_output_raise(data: Path, run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--resume needs --out"):
        bertsmith.finetune(resume=True)
    with pytest.raises(InputError, match=r"is finished \(8 steps\); there is nothing to resume"):
        bertsmith.finetune(out=run, resume=True, device="cpu")
    with pytest.raises(InputError, match="--out is not given"):
        bertsmith.finetune("bert-tiny", data=data, set=SMALL, device="cpu")
    with pytest.raises(InputError, match="is not empty"):
        tune(data, run)
    with pytest.raises(InputError, match="lie inside each other"):
        bertsmith.finetune(run, data=data, out=run, force=True, device="cpu")
    assert (run / "model.safetensors").is_file()


def test_pooler_is_replaced_for_other_features(data: Path, tmp_path: Path) -> None:
    """With concatenated layers or a BiLSTM the head pools by the mean, unless another pooling is given."""
    changes = ["head.recurrent={layers=1,width=8}", "run.epochs=1"]
    assert tune(data, tmp_path / "run", *changes).model.config.heads[-1].pooling == "mean"
    chosen = tune(data, tmp_path / "first", *changes, "head.pooling=first")
    assert chosen.model.config.heads[-1].pooling == "first"
    with pytest.raises(InputError, match=r"head.pooling is 'pooler', but hidden states of several layers"):
        tune(data, tmp_path / "pooler", *changes, "head.pooling=pooler")


def test_keep_zero_writes_no_checkpoint(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "save", lambda self: pytest.fail("a checkpoint"))
    result = tune(data, tmp_path / "run", "run.keep=0", "run.choose=last", "run.evaluations=0")
    assert [row["step"] for row in log(tmp_path / "run", "held_out")] == [result["steps"]] == [8]
    with pytest.raises(InputError, match=r"keep is 0 and choose 'best'"):
        tune(data, tmp_path / "other", "run.keep=0")
