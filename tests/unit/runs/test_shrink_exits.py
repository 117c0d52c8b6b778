"""`bertsmith shrink --method exits`: every kind of task, written files, resuming, invalid input."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import bertsmith
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.exit_runner import ExitRunner
from bertsmith.errors import InputError
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.exiting import exits_config
from bertsmith.models.heads.exits import ExitRule
from bertsmith.models.model import Model
from bertsmith.tasks.predictor import Predictor, TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.rows import table_of
from bertsmith.training.trainer import Trainer

SMALL = ["batch.examples=8", "run.log_every=1", "optimizer.learning_rate=1e-2"]
WORDS = ["good", "fine", "lovely", "bad", "awful", "broken"]
TEXTS = [f"{first} {second} {'words ' * (index % 4)}" for index, first in enumerate(WORDS) for second in WORDS]
ROWS: dict[str, list[dict[str, Any]]] = {
    "classification": [{"text": text, "label": "abc"[i % 3]} for i, text in enumerate(TEXTS)],
    "multi_label": [{"text": text, "label": ["x", "y"][i % 2 : 1 + i % 3]} for i, text in enumerate(TEXTS)],
    "regression": [{"text": text, "label": 0.5 * (i % 4)} for i, text in enumerate(TEXTS)],
    "choice": [
        {"context": text, "question": "which?", "choices": WORDS[: 2 + i % 3], "label": i % 2}
        for i, text in enumerate(TEXTS)
    ],
    "tagging": [{"tokens": text.split()[:2], "ner": ["B-X", "O"]} for text in TEXTS],
}


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, own in (("train", rows[:24]), ("dev", rows[24:])):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own), encoding="utf-8")
    return folder


def fine_tuned(folder: Path, kind: str, layers: int = 3) -> Path:
    """Write a model in the format of a fine-tuned one, with weights so large that its layers differ."""
    tokenizer = learn_tokenizer(TEXTS, "wordpiece", 80, progress=False)
    sizes = {"width": 16, "heads": 2, "layers": layers, "max_length": 32, "init_std": 0.3}
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, **sizes), seed=0)
    model.tokenizer = tokenizer
    columns = {"choice": {"question": "question"}, "tagging": {"words": "tokens", "tags": "ner"}}
    record = TaskRecord.parse({"task": {"kind": kind, **columns.get(kind, {})}, "sequences": {"length": 16}})
    record = record.changed(task=record.task.resolve(table_of(ROWS[kind], "rows")))
    model = with_task_head(model, record.task.head(model.config), seed=0)
    bertsmith.save(model, folder)
    write_task_record(record, folder)
    return folder


def shrink(tmp_path: Path, *changes: str, kind: str = "classification", out: str = "out", **more: Any) -> Any:
    data = write_rows(tmp_path / "data", ROWS[kind])
    model = tmp_path / "model"
    if not model.exists():
        fine_tuned(model, kind)
    settings = [*SMALL, *changes]
    return bertsmith.shrink(
        model, data=str(data), out=tmp_path / out, method="exits", set=settings, device="cpu", **more
    )


def _outputs(model: Model) -> torch.Tensor:
    tokens = torch.tensor([[2, 7, 9, 11, 8, 3], [2, 12, 8, 3, 0, 0]])
    with torch.no_grad():
        return model.outputs(tokens, SequenceLayout.padded(torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool()))


@pytest.mark.parametrize("kind", ["classification", "multi_label", "regression", "choice"])
def test_exits_of_every_kind_of_task(kind: str, tmp_path: Path) -> None:
    metrics = shrink(tmp_path, "run.epochs=3", "leave.within=5.0", kind=kind, tolerance=200.0)
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == metrics.to_json()
    # the encoder is frozen: the outputs of the last head are bitwise equal
    assert torch.equal(_outputs(bertsmith.load(tmp_path / "out")), _outputs(bertsmith.load(tmp_path / "model")))
    losses = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in losses if row["kind"] == "training"]
    assert sum(losses[-3:]) < sum(losses[:3])
    # this tolerance selects the rule with the largest saving, and evaluate reproduces its score
    best = max(metrics["table"], key=lambda row: row["saving"])
    assert metrics["rule"]["threshold"] == best["threshold"]
    assert metrics["mean_layers"] == pytest.approx(best["mean_layers"])
    assert metrics["mean_layers"] < 3
    assert metrics["score"] == pytest.approx(best["score"])
    found = bertsmith.evaluate(tmp_path / "out", data=str(tmp_path / "data"), out=tmp_path / "evaluated", device="cpu")
    assert (found["score"], found["mean_layers"]) == (metrics["score"], metrics["mean_layers"])


def test_unreachable_tolerance_uses_all_layers(tmp_path: Path) -> None:
    metrics = shrink(tmp_path, "run.epochs=1", "leave.thresholds=[1.0]")
    assert metrics["rule"] is None
    assert metrics["mean_layers"] == 3
    assert metrics["score"] == metrics["full_score"]
    assert isinstance(Predictor.load(tmp_path / "out").model, Model)


def test_single_text_gets_the_same_answer_as_in_a_batch(tmp_path: Path) -> None:
    shrink(tmp_path, "run.epochs=1", tolerance=100.0)
    model = bertsmith.load(tmp_path / "out")
    record = Predictor.load(tmp_path / "out").record
    runner = ExitRunner(model, ExitRule(measure="probability", threshold=0.6))
    predictor = Predictor(runner, record)
    together = predictor.details(TEXTS)
    used = sorted(runner.layers_used.elements())
    assert len(set(used)) > 1
    alone, layers = [], []
    for text in TEXTS:
        alone += predictor.details([text])
        layers += runner.layers_used.elements()
    assert sorted(layers) == used
    for own, other in zip(alone, together, strict=True):
        assert own["answer"] == other["answer"]
        assert own["score"] == pytest.approx(other["score"], abs=1e-5)


def test_encoder_and_exits_are_trained_together(tmp_path: Path) -> None:
    settings = ["encoder=joint", "learn_from=labels", "weighting=by_depth", "exits.layers=[2]", "exits.hidden=none"]
    shrink(tmp_path, "run.epochs=1", *settings)
    model = bertsmith.load(tmp_path / "out")
    assert not torch.equal(_outputs(model), _outputs(bertsmith.load(tmp_path / "model")))
    assert exits_config(model).layers == (2,)
    assert exits_config(model).hidden is None


def test_exits_can_be_trained_again(tmp_path: Path) -> None:
    shrink(tmp_path, "run.epochs=1")
    again = bertsmith.shrink(
        tmp_path / "out",
        data=str(tmp_path / "data"),
        out=tmp_path / "again",
        method="exits",
        set=[*SMALL, "run.epochs=1", "exits.layers=[1]"],
        device="cpu",
    )
    assert list(again["exit_scores"]) == ["1"]


def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(tmp_path, "run.epochs=2", out="straight")
    real = Trainer._step

    def until(self: Trainer, *arguments: object) -> None:
        if self.progress.step == 4:
            raise KeyboardInterrupt
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", until)
        with pytest.raises(KeyboardInterrupt):
            shrink(tmp_path, "run.epochs=2", out="resumed")
    bertsmith.shrink(out=tmp_path / "resumed", resume=True, device="cpu")
    for name in ("model.safetensors", "config.json", "task.json"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()
    with pytest.raises(InputError, match="there is nothing to resume"):
        bertsmith.shrink(out=tmp_path / "resumed", resume=True, device="cpu")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("tagging", [], "the task is of kind 'tagging'"),
        ("regression", ["leave.measure=entropy"], "leave.measure is 'entropy'; allowed for regression: 'patience'"),
        ("classification", ["exits.layers=[3]"], "allowed: 1 to 2, below the last layer"),
        ("classification", ["leave.thresholds=[2.0]"], "threshold is 2 with probability; allowed: 0 to 1"),
        ("classification", ["exits.layer=[1]"], "exits.layer is not a known setting"),
    ],
)
def test_invalid_settings_raise(kind: str, changes: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        shrink(tmp_path, *changes, kind=kind)
    assert not (tmp_path / "out").exists()


def test_model_with_one_layer_raises(tmp_path: Path) -> None:
    fine_tuned(tmp_path / "model", "classification", layers=1)
    with pytest.raises(InputError, match="the model has one layer"):
        shrink(tmp_path)


def test_explain_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = shrink(tmp_path, explain=True)
    assert facts["exits after layers"] == "1, 2"
    assert "tolerance" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
