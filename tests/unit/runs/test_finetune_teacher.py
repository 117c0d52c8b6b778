"""Fine-tuning with a teacher: losses, written model, resuming, invalid teachers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_finetune import log, write_task

import bertsmith
from bertsmith.cli import main
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.tasks.classification import Classification, LabelledText
from bertsmith.tasks.degenerate import mismatch_reason
from bertsmith.toml import read_toml
from bertsmith.training import trainer as trainers

COMMON = ["sequences.length=16", "batch.examples=16", "run.log_every=1", "optimizer.learning_rate=3e-3"]
COMMON += ["schedule.warmup=0.1"]
STUDENT = "model.overrides={width=16,layers=2,heads=4,max_length=32,dropout=0.0}"
EVERY_TERM = (
    'distillation.terms=[{kind="outputs"},{kind="labels",weight=0.1},{kind="hidden_states"},{kind="cosine"},'
    '{kind="attention",weight=0.1},{kind="relations"},{kind="patience"}]'
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("reviews"))


@pytest.fixture(scope="module")
def teacher(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("teacher") / "run"
    network = "model.overrides={width=32,layers=4,heads=4,max_length=32,dropout=0.0}"
    settings = [*COMMON, network, "tokenizer.vocabulary=300", "run.epochs=8"]
    assert bertsmith.finetune("bert-tiny", data=data, out=out, set=settings, device="cpu")["score"] > 80
    return out


def learn(data: Path, out: Path, *changes: str, model: Any = "bert-tiny", **more: Any) -> Any:
    return bertsmith.finetune(model, data=data, out=out, set=[*COMMON, *changes], device="cpu", **more)


def divergence(teacher: Path, student: Path, data: Path) -> float:
    """Return the mean KL divergence of a student's predictions on dev from its teacher's."""
    models = [bertsmith.load(folder) for folder in (teacher, student)]
    texts = [json.loads(line)["text"] for line in (data / "dev.jsonl").read_text().splitlines()]
    logs = []
    for model in models:
        batch = model.require_tokenizer().encode(texts, max_length=16)
        tokens, mask = (torch.from_numpy(batch[name]) for name in ("input_ids", "attention_mask"))
        with torch.no_grad():
            logs.append(model.outputs(tokens, SequenceLayout.rows(tokens, mask)).double().log_softmax(-1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


def test_student_is_closer_to_its_teacher_than_without_distillation(data: Path, teacher: Path, tmp_path: Path) -> None:
    cut = ("model.subnet.layers=[0,1]", "run.epochs=4", "optimizer.learning_rate=1e-3", "run.choose=last")
    soft = 'distillation.terms=[{kind="outputs"},{kind="hidden_states"}]'
    metrics = learn(data, tmp_path / "with", *cut, soft, model=None, teacher=teacher)
    learn(data, tmp_path / "without", *cut, model=teacher)
    assert metrics["teacher_score"] > 80
    near, far = (divergence(teacher, tmp_path / name, data) for name in ("with", "without"))
    assert near < 0.5 * far


def test_every_term_is_logged_and_width_head_is_removed(data: Path, teacher: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    metrics = learn(data, out, STUDENT, EVERY_TERM, "run.epochs=1", teacher=teacher)
    row = log(out, "training")[-1]
    for kind in ("outputs", "labels", "hidden_states", "cosine", "attention", "relations", "patience"):
        assert row[f"{kind}_loss"] > 0
    model = bertsmith.load(out)
    assert [head.kind for head in model.config.heads] == ["pooler", "classifier"]
    assert not any("teacher_width" in name for name in model.state_dict())
    assert metrics["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert bertsmith.evaluate(out, data=data, out=tmp_path / "evaluated")["score"] == metrics["score"]
    recorded = read_toml(out / "recipe.toml")
    assert recorded["distillation"]["teacher"] == str(teacher)
    again = bertsmith.finetune(recipe=out / "recipe.toml", out=tmp_path / "again", device="cpu")
    assert again["training_loss"] == metrics["training_loss"]


def test_student_is_initialised_from_teacher_layers(data: Path, teacher: Path, tmp_path: Path) -> None:
    rate = "optimizer.learning_rate=1e-12"  # leaves the weights unchanged
    whole = bertsmith.load(teacher)
    for name, change, indices in (("first", "layers=[0,1]", (0, 1)), ("second", "depth=0.5", (1, 3))):
        out = tmp_path / name
        learn(data, out, f"model.subnet.{change}", rate, "run.epochs=0.25", model=None, teacher=teacher)
        student = bertsmith.load(out)
        assert len(student.encoder.blocks) == 2
        for block, index in zip(student.encoder.blocks, indices, strict=True):
            other = whole.encoder.blocks[index].mixer.project.weight
            torch.testing.assert_close(block.mixer.project.weight, other, rtol=0, atol=1e-6)
        score = whole.heads["classifier"].score.weight
        torch.testing.assert_close(student.heads["classifier"].score.weight, score, rtol=0, atol=1e-6)


def test_resumed_run_equals_uninterrupted_run(
    data: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = (STUDENT, EVERY_TERM, "run.epochs=2", "run.evaluations=2")
    learn(data, tmp_path / "whole", *changes, teacher=teacher)
    step = trainers.Trainer._step

    def stopping(self: trainers.Trainer, *args: Any) -> None:
        if self.progress.step == 5:
            raise KeyboardInterrupt
        step(self, *args)

    monkeypatch.setattr(trainers.Trainer, "_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        learn(data, tmp_path / "cut", *changes, teacher=teacher)
    monkeypatch.undo()
    checkpoint = sorted((tmp_path / "cut" / "checkpoints").glob("step-*"))[-1]
    assert "teacher_width" in (checkpoint / "config.json").read_text()
    bertsmith.finetune(out=tmp_path / "cut", resume=True, device="cpu")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert first == second


def test_quantised_student_learns_from_float_teacher(data: Path, teacher: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    metrics = learn(data, out, STUDENT, EVERY_TERM, "quantisation.weight_bits=8", "run.epochs=1", teacher=teacher)
    assert bertsmith.load(out).config.quantisation is not None
    assert bertsmith.evaluate(out, data=data, out=tmp_path / "evaluated")["score"] == metrics["score"]
    assert metrics["teacher_score"] > 80


def test_explain_includes_the_teacher(data: Path, teacher: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["finetune", "bert-tiny", "--teacher", str(teacher), "--data", str(data), "--explain", "--set", STUDENT]
    main([*arguments, "--set", "sequences.length=16"])
    printed = capsys.readouterr().out
    assert f'teacher = "{teacher}"' in printed
    assert "training FLOPs in all" in printed


def test_teacher_with_other_labels_or_task_raises(data: Path, teacher: Path, tmp_path: Path) -> None:
    labels = list(reversed(bertsmith.load(teacher).config.heads[-1].labels))
    with pytest.raises(InputError, match=r"has the labels .* and the task .*; allowed: the same in the same order"):
        learn(data, tmp_path / "a", STUDENT, f"task.labels={labels}", teacher=teacher)
    rows = [{"text": f"the day {number}", "label": float(number)} for number in range(20)]
    with pytest.raises(InputError, match=r"was fine-tuned for a task of kind 'classification'.*'regression'"):
        bertsmith.finetune("bert-tiny", train=rows, dev=rows, teacher=teacher, set=[*COMMON, STUDENT], device="cpu")
    bare = bertsmith.load(teacher)
    bare.heads, bare.config = torch.nn.ModuleDict(), bare.config.changed(heads=())
    bertsmith.save(bare, tmp_path / "bare")
    with pytest.raises(InputError, match="not fine-tuned for a task"):
        learn(data, tmp_path / "b", STUDENT, teacher=tmp_path / "bare")
    assert not (tmp_path / "a").exists()


def test_teacher_with_another_tokenizer_raises(data: Path, teacher: Path, tmp_path: Path) -> None:
    learn(data, tmp_path / "other", STUDENT, "tokenizer.vocabulary=290", "run.epochs=0.25")
    with pytest.raises(InputError, match="the student's tokenizer differs from the teacher's"):
        learn(data, tmp_path / "run", model=tmp_path / "other", teacher=teacher)


def test_teacher_with_permuted_labels_raises(data: Path, teacher: Path, tmp_path: Path) -> None:
    swapped = bertsmith.load(teacher)
    with torch.no_grad():
        for parameter in swapped.heads["classifier"].score.parameters():
            parameter.copy_(parameter.flip(0))
    bertsmith.save(swapped, tmp_path / "swapped")
    with pytest.raises(InputError, match=r"with its labels in the order .*; allowed: a model fine-tuned for this"):
        learn(data, tmp_path / "run", STUDENT, teacher=tmp_path / "swapped")
    with torch.no_grad():
        swapped.heads["classifier"].score.weight.zero_()
    bertsmith.save(swapped, tmp_path / "dull")
    with pytest.raises(InputError, match="gives the same answer to all of dev"):
        learn(data, tmp_path / "run", STUDENT, teacher=tmp_path / "dull")


def test_conflicting_settings_raise(data: Path, teacher: Path, tmp_path: Path) -> None:
    for change, message in (
        ("adversarial.kind=sift", "adversarial.kind is 'sift'; allowed with it: 'none'"),
        ("encoder.frozen=all", "encoder.frozen is 'all'"),
        ("run.compile=whole", "run.compile is 'whole'"),
        ("model.subnet.depth=0.5", "subnet takes a part of the model of a folder"),
        ('distillation.terms=[{kind="logits"}]', "logits"),
        ("distillation.layers=middle", "distillation.layers"),
        ("distillation.layers=[1,9]", r"distillation.layers is \[1, 9\]; allowed: a number from 1 to 4"),
        ("distillation.terms=[]", "distillation.terms"),
    ):
        with pytest.raises(InputError, match=message):
            learn(data, tmp_path / "run", STUDENT, change, teacher=teacher)
    assert not (tmp_path / "run").exists()


def test_regression_student_follows_its_teacher(tmp_path: Path) -> None:
    """With labels opposite to the teacher's, a student without the term "labels" follows the teacher."""
    words = ["fine", "lovely", "bright", "awful", "broken", "sad"]
    things = ["day", "smith", "river", "gate"]
    rows = [{"text": f"the {word} {thing}", "label": float(i < 3)} for i, word in enumerate(words) for thing in things]
    opposite = [{**row, "label": 1 - row["label"]} for row in rows]
    network = "model.overrides={width=16,layers=1,heads=2,max_length=32,dropout=0.0}"
    settings = [*COMMON, network, "optimizer.learning_rate=1e-2", "run.epochs=10", "batch.examples=8"]
    bertsmith.finetune(
        "bert-tiny", train=rows, dev=rows, out=tmp_path / "t", set=settings, device="cpu", task="regression"
    )
    options = {"train": opposite, "dev": rows, "teacher": tmp_path / "t", "device": "cpu", "task": "regression"}
    soft = 'distillation.terms=[{kind="outputs"}]'
    student = bertsmith.finetune("bert-tiny", out=tmp_path / "s", set=[*settings, soft], **options)
    assert student["score"] > 50  # correlates with the teacher's labels, not with those in its data


def test_mismatch_with_the_task_is_explained() -> None:
    task = Classification(text="text", label="label", labels=("a", "b", "c"))
    examples = [LabelledText(text=str(n), pair=None, label=n % 3) for n in range(30)]

    def clause(order: str) -> str | None:
        answers = [{"answer": order[example.label], "score": 1.0} for example in examples]
        return mismatch_reason(task, examples, answers, task.evaluate(examples, answers))

    assert clause("abc") is None
    assert "in the order b, c, a" in str(clause("bca"))
    assert "the same answer" in str(clause("aaa"))
    mixed = [{"answer": "abc"[(n // 3) % 3], "score": 1.0} for n in range(30)]
    assert "not above chance (33.3 %)" in str(
        mismatch_reason(task, examples[:9], mixed[:9], task.evaluate(examples[:9], mixed[:9]))
    )
