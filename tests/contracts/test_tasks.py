"""Contract of tasks, for every task kind; the samples are in task_cases.py."""

import copy
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_cases import TASK_CASES, TaskCase
from torch import Tensor

import bertsmith
from bertsmith.answers.sequences import Features
from bertsmith.data.examples import ExampleConfig
from bertsmith.errors import InputError
from bertsmith.models.heads.task import ScoringHead
from bertsmith.models.model import Model
from bertsmith.tasks import TASKS
from bertsmith.tasks.base import Task
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.outputs import item_outputs
from bertsmith.tasks.predictor import Predictor, TaskRecord
from bertsmith.text.rows import Table, table_of
from bertsmith.toml import override, to_toml
from bertsmith.training.evaluator import MeanLoss
from bertsmith.training.finetuning import FinetuneSettings, Finetuning, make_finetuning, read_data
from bertsmith.training.head_start import fit_scores
from bertsmith.training.trainer import Trainer

SETTINGS = [
    "model={preset='bert-tiny', overrides={layers=2, width=16, heads=2, dropout=0.1, init_std=0.2}}",
    "tokenizer.vocabulary=300",
    "batch.examples=64",
    "run.epochs=2",
    "run.choose='last'",
    "optimizer.learning_rate=1e-3",
]


@dataclass(frozen=True)
class TrainedCase:
    """A case and a fine-tuning run of two steps."""

    case: TaskCase
    task: Task[Any]
    table: Table
    examples: Sequence[Any]
    started: dict[str, Tensor]
    """Weights before the first step."""
    run: Finetuning
    predictor: Predictor

    @property
    def model(self) -> Model:
        return self.run.trainer.model

    def features(self, examples: Sequence[Any]) -> Features:
        return self.task.features(examples, self.predictor.encoding)

    def answers(self, examples: Sequence[Any]) -> list[dict[str, Any]]:
        features = self.features(examples)
        return self.task.answers(examples, features, item_outputs(self.model, features, ExampleConfig()))

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Return the rows without targets, as for prediction."""
        return [{name: row[name] for name in row if name not in self.case.targets} for row in self.case.rows]


def _settings(case: TaskCase, table: Table) -> FinetuneSettings:
    plain = override({}, [*SETTINGS, *case.settings])
    kind = None if case.is_recognised else case.kind
    return FinetuneSettings.parse({**plain, "task": recognise(table, kind, [], case.task)})


@pytest.fixture(scope="module", params=TASK_CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedCase:
    case = TASK_CASES[request.param]
    table = table_of(case.rows, "rows")
    data = read_data(_settings(case, table), table, table)
    run = make_finetuning(data, tmp_path_factory.mktemp("task"), device="cpu", show=False)
    started = {name: weight.detach().clone() for name, weight in run.trainer.model.named_parameters()}
    run.trainer.run()
    model = run.trainer.model.eval()
    predictor = Predictor(model, TaskRecord(task=data.settings.task, sequences=data.settings.sequences))
    return TrainedCase(case, data.settings.task, table, data.dev, started, run, predictor)


def test_every_task_kind_has_a_sample() -> None:
    assert {case.kind for case in TASK_CASES.values()} == set(TASKS) - {"translation"}


def test_task_kind_is_recognised_from_rows(trained: TrainedCase) -> None:
    if not trained.case.is_recognised:
        assert recognise(trained.table, trained.case.kind, [], {})["kind"] == trained.case.kind
        return
    columns = TASKS[trained.case.kind].find_columns(trained.case.rows[0])
    assert columns is not None
    assert set(columns.values()) <= set(trained.case.rows[0])
    assert recognise(trained.table, None, [], {})["kind"] == trained.case.kind


def test_task_record_round_trips_through_toml_and_json(trained: TrainedCase) -> None:
    kept = TaskRecord(task=trained.task, sequences=ExampleConfig(length=64))
    assert TaskRecord.parse(tomllib.loads(to_toml(kept.plain()))) == kept
    assert TaskRecord.parse(json.loads(json.dumps(kept.plain()))) == kept
    assert trained.task.kind == trained.case.kind
    assert trained.task.resolve(trained.table) == trained.task


def test_packed_and_padded_outputs_are_equal(trained: TrainedCase) -> None:
    features = trained.features(trained.examples)
    packed, padded = (
        item_outputs(trained.model, features, ExampleConfig(layout=layout))
        for layout in ("packed", "padded")  # type: ignore[arg-type]
    )
    assert len(packed) == len(padded) == len(features)
    for one, other in zip(packed, padded, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_answers_are_plain_data_one_per_example(trained: TrainedCase) -> None:
    answers = trained.answers(trained.examples)
    assert len(answers) == len(trained.examples)
    assert all("answer" in answer for answer in answers)
    assert json.loads(json.dumps(answers, allow_nan=False)) == answers
    for example in trained.examples:
        assert "\n" not in trained.task.describe(example)


def test_correct_answers_get_the_best_score(trained: TrainedCase) -> None:
    right = [
        {**answer, "answer": trained.task.gold(example)}
        for example, answer in zip(trained.examples, trained.answers(trained.examples), strict=True)
    ]
    evaluation = trained.task.evaluate(trained.examples, right)
    if trained.case.is_scored_alone:
        assert evaluation.score == pytest.approx(100.0)
    assert evaluation.measure(np.arange(len(right))) == pytest.approx(evaluation.score)
    assert all(isinstance(value, float) for value in evaluation.metrics.values())
    assert [trained.task.error(*pair) for pair in zip(trained.examples, right, strict=True)] == [0.0] * len(right)
    predicted_labels = trained.task.predicted_labels(trained.examples, right)
    if predicted_labels is not None:
        counts, labels = predicted_labels.counts, len(predicted_labels.labels)
        assert counts.shape == (labels, labels)
        assert counts.sum() == np.trace(counts) > 0
        assert {item.example for item in predicted_labels.items} == set(range(len(right)))


def test_targets_are_not_needed_for_answers(trained: TrainedCase) -> None:
    examples = trained.task.examples(table_of(trained.inputs, "inputs"), has_targets=False)
    answers = trained.answers(examples)
    assert answers == trained.answers(trained.examples)
    assert trained.predictor.predict(trained.inputs) == [answer["answer"] for answer in answers]
    assert trained.predictor.predict([]) == []


def test_two_steps_change_weights_and_stay_finite(trained: TrainedCase) -> None:
    trainer: Trainer = trained.run.trainer
    assert trainer.progress.step == 2
    now = dict(trained.model.named_parameters())
    assert all(bool(torch.isfinite(weight).all()) for weight in now.values())
    moved = {name for name, weight in now.items() if not torch.equal(weight, trained.started[name])}
    head = {f"heads.{name}" for name, _ in trained.model.heads.named_parameters()}
    assert head <= moved if head else moved
    assert any(name.startswith("encoder.") for name in moved)
    rows = [json.loads(line) for line in (trainer.out / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses
    assert np.isfinite(losses).all()


def test_regression_lowers_the_loss_of_scores_and_changes_nothing_else(trained: TrainedCase) -> None:
    model, objective = copy.deepcopy(trained.model), trained.task.objective(trained.examples)
    features = trained.features(trained.examples)
    if not isinstance(model.task_head, ScoringHead):
        with pytest.raises(InputError, match="use 'random'"):
            fit_scores(model, objective, features, ExampleConfig(), seed=0)
        return
    before = MeanLoss(objective.for_model(model))
    item_outputs(model, features, ExampleConfig(), before)
    fit_scores(model, objective, features, ExampleConfig(layout="padded"), seed=0)
    after = MeanLoss(objective.for_model(model))
    item_outputs(model, features, ExampleConfig(), after)
    assert after.value < before.value
    own = dict(trained.model.named_parameters())
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, own[name])}
    assert changed == {name for name in own if ".score." in name}


def test_reloaded_predictor_gives_the_same_answers(trained: TrainedCase, tmp_path: Path) -> None:
    from bertsmith.tasks.predictor import write_task_record

    bertsmith.save(trained.model, tmp_path / "model")
    write_task_record(trained.predictor.record, tmp_path / "model")
    loaded = Predictor.load(tmp_path / "model")
    assert loaded.task == trained.task
    assert loaded.details(trained.inputs) == trained.predictor.details(trained.inputs)
    evaluation, answers = loaded.evaluate(trained.table)
    assert answers == trained.predictor.details(trained.inputs)
    assert evaluation.score == pytest.approx(trained.run.evaluate()[0].score)
