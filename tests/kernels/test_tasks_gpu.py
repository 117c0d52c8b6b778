"""Every task on a GPU: outputs equal those of a CPU, packed and padded, and two deterministic runs are bit-equal."""

from pathlib import Path

import numpy as np
import pytest
import torch
from task_cases import TASK_CASES
from test_tasks import SETTINGS

from bertsmith.data.examples import ExampleConfig
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.outputs import item_outputs
from bertsmith.tasks.predictor import Predictor, TaskRecord
from bertsmith.text.rows import table_of
from bertsmith.toml import override
from bertsmith.training.finetuning import FinetuneSettings, Finetuning, make_finetuning, read_data

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("name", TASK_CASES)]


def finetuning(name: str, out: Path, device: str, *settings: str) -> Finetuning:
    case = TASK_CASES[name]
    table = table_of(case.rows, "rows")
    kind = None if case.is_recognised else case.kind
    plain = override({}, [*SETTINGS, *case.settings, *settings])
    data = read_data(
        FinetuneSettings.parse({**plain, "task": recognise(table, kind, [], case.task)}),
        table,
        table,
    )
    return make_finetuning(data, out, device=device, show=False)


def test_outputs_equal_those_of_a_cpu(name: str, tmp_path: Path) -> None:
    case, run = TASK_CASES[name], finetuning(name, tmp_path, "cpu")
    model, settings = run.trainer.model.eval(), run.data.settings
    predictor = Predictor(model, TaskRecord(task=settings.task, sequences=settings.sequences))
    features = settings.task.features(run.data.dev, predictor.encoding)
    expected = item_outputs(model, features, ExampleConfig())
    model = model.cuda()
    for layout in ("packed", "padded"):
        actual = item_outputs(model, features, ExampleConfig(layout=layout))
        assert len(actual) == len(expected) >= len(case.rows)
        for ours, theirs in zip(actual, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_deterministic_runs_are_bit_equal(name: str, tmp_path: Path) -> None:
    weights = []
    for out in (tmp_path / "first", tmp_path / "second"):
        out.mkdir()
        run = finetuning(name, out, "cuda", "run.deterministic=true", "run.precision=bfloat16")
        run.trainer.run()
        run.trainer.close(is_last=False)
        weights.append({key: weight.clone() for key, weight in run.trainer.model.state_dict().items()})
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
