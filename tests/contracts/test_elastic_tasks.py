"""Elastic training as a command, for every task kind."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from choosing import slow_unless
from task_cases import TASK_CASES, TaskCase

import bertsmith
from bertsmith import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.shrinking.elastic_metadata import read_elastic_metadata
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.predictor import Predictor, TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.rows import table_of
from bertsmith.toml import override
from bertsmith.training.finetuning import FinetuneSettings

SMALL = ["run.epochs=1", "batch.examples=4", "importance.examples=4", "importance.batch=2"]


def write_folders(case: TaskCase, folder: Path) -> tuple[Path, Path]:
    """Write a fine-tuned model of the task, and the data of the task."""
    table = table_of(case.rows, "rows")
    kind = None if case.is_recognised else case.kind
    plain = {"model": "bert-tiny", **override({}, list(case.settings))}
    settings = FinetuneSettings.parse({**plain, "task": recognise(table, kind, [], case.task)})
    kept = TaskRecord(task=settings.task.resolve(table), sequences=settings.sequences)
    tokenizer = learn_tokenizer(kept.task.texts(kept.task.examples(table)), "bytes", 300, progress=False)
    config = bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, layers=2, width=16, heads=4, init_std=0.2)
    model = bertsmith.build(config, seed=0)
    model.tokenizer = tokenizer
    bertsmith.save(with_task_head(model, kept.task.head(model.config), seed=0), folder / "model")
    write_task_record(kept, folder / "model")
    (folder / "data").mkdir()
    for part in ("train", "dev"):
        lines = [json.dumps(row) + "\n" for row in case.rows]
        (folder / "data" / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "model", folder / "data"


QUICK = ("classification", "tagging in windows", "spans", "choice")


@pytest.mark.parametrize("name", slow_unless(QUICK, TASK_CASES))
def test_elastic_training_works_for_every_task(name: str, tmp_path: Path) -> None:
    """All stages finish, and the recorded score of a sub-network equals the score of the extracted model."""
    model, data = write_folders(TASK_CASES[name], tmp_path)
    out = tmp_path / "elastic"
    result = bertsmith.shrink(
        model, data=str(data), out=out, widths=[1.0, 0.5], depths=[1.0, 0.5], set=SMALL, device="cpu"
    )
    record = read_elastic_metadata(out)
    assert [(member.width, member.depth) for member in record.grid] == [(0.5, 0.5), (1, 0.5), (0.5, 1), (1, 1)]
    assert result["score"] == fmean(member.score for member in record.grid)
    assert result.to_json() == json.loads((out / "result.json").read_text())
    table = table_of(TASK_CASES[name].rows, "rows")
    for member, subnet in zip(record.grid, record.subnets, strict=True):
        assert subnet == Subnet(width=member.width, depth=member.depth)
        small = tmp_path / f"{member.width} {member.depth}"
        bertsmith.save(bertsmith.load(out, subnet=subnet), small)
        predictor = Predictor.load(out)
        write_task_record(predictor.record, small)
        evaluation, _ = Predictor.load(small).evaluate(table)
        assert evaluation.metric == record.metric
        assert evaluation.score == member.score
    evaluation, _ = Predictor.load(model).evaluate(table)
    assert evaluation.score == record.teacher_score
