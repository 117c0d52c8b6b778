"""The runtime without PyTorch gives the Predictor's answers for every task kind, whole models and sub-networks."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from choosing import slow_unless
from task_cases import TASK_CASES

import bertsmith
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.runtime import OnnxModel, load
from bertsmith.runtime.tasks import EXPORTED_TASKS
from bertsmith.tasks import TASKS
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.predictor import Predictor, TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.rows import table_of

QUICK = ("classification of pairs", "tagging in windows", "spans")
LENGTH = 16
NEEDED = ("numpy", "onnxruntime", "tokenizers")


@dataclass(frozen=True)
class Both:
    """The predictor of a model at half width, the runtime of its exported folder, and input rows."""

    predictor: Predictor
    model: OnnxModel
    folder: Path
    rows: list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=slow_unless(QUICK, TASK_CASES),
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    case, folder = TASK_CASES[request.param], tmp_path_factory.mktemp("runtime")
    table = table_of(case.rows, "rows")
    plain = recognise(table, None if case.is_recognised else case.kind, [], case.task)
    if case.kind == "spans":
        plain |= {"stride": 3, "may_be_unanswered": True}
    task = TaskRecord.parse({"task": plain}).task.resolve(table)
    texts = list(task.texts(task.examples(table)))
    tokenizer = learn_tokenizer(texts * 4, "wordpiece", 120, progress=False)
    sizes = {"vocabulary": tokenizer.size, "width": 32, "heads": 4, "layers": 1, "max_length": 32, "init_std": 0.3}
    model = bertsmith.build(bertsmith.preset("bert-tiny", **sizes), seed=0)
    model.tokenizer = tokenizer
    model = bertsmith.extract(with_task_head(model, task.head(model.config), seed=0).eval(), Subnet(width=0.5))
    kept = TaskRecord.parse({"task": task.plain(), "sequences": {"length": LENGTH}})
    bertsmith.save(model, folder / "model")
    write_task_record(kept, folder / "model")
    bertsmith.export(model, folder / "onnx", to="onnx", task=folder / "model")
    rows = [{name: row[name] for name in row if name not in case.targets} for row in case.rows]
    if case.kind == "spans":
        rows = [{**row, "context": f"{row['context']} " * 4} for row in rows]
    return Both(Predictor(model, kept), load(folder / "onnx", threads=1, batch_tokens=40), folder / "onnx", rows)


def is_close(mine: Any, theirs: Any) -> bool:
    """Return whether two answers are equal, numbers to 1e-4."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return list(mine) == list(theirs) and all(is_close(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(is_close, mine, theirs))
    if isinstance(mine, float) and isinstance(theirs, float):
        return abs(mine - theirs) <= 1e-4 * max(1.0, abs(theirs))
    return type(mine) is type(theirs) and mine == theirs


def test_runtime_answers_equal_the_predictor(both: Both) -> None:
    predictor, model, rows = both.predictor, both.model, both.rows
    expected, found = predictor.details(rows), model.details(rows)
    assert is_close(found, expected), (found, expected)
    assert is_close(model.predict(rows), predictor.predict(rows))
    # one at a time and in reverse order, too
    assert is_close([model.details([row])[0]["answer"] for row in rows[:1]], predictor.predict(rows[:1]))
    assert is_close(model.predict(rows[::-1]), predictor.predict(rows[::-1]))
    assert model.predict([]) == predictor.predict([]) == []
    if predictor.task.kind == "spans":
        examples = predictor.task.examples(table_of(rows, "rows"), has_targets=False)
        assert len(predictor.task.features(examples, predictor.encoding)) > len(rows)  # passages have several windows


def test_inputs_without_column_names(both: Both) -> None:
    predictor, model, rows = both.predictor, both.model, both.rows
    columns = predictor.task.input_columns
    given = [row[columns[0]] if len(columns) == 1 else tuple(row[column] for column in columns) for row in rows]
    assert is_close(model.details(given), predictor.details(given))
    if predictor.task.kind in ("tagging", "embedding"):
        texts = ["Bert Smith forges a gate, in New Rome", ""]  # running text; a text alone
        assert is_close(model.details(texts), predictor.details(texts))


def test_runtime_errors_equal_the_predictor(both: Both) -> None:
    predictor, model, rows = both.predictor, both.model, both.rows
    bad: list[Any] = ["a text", [{}], [3.5], [{**rows[0], predictor.task.input_columns[-1]: None}]]
    for inputs in bad:
        with pytest.raises(InputError) as theirs:
            predictor.details(inputs)
        with pytest.raises(InputError) as mine:
            model.details(inputs)
        assert str(mine.value) == str(theirs.value)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder of packages that contains only the required ones."""
    folder, home = tmp_path_factory.mktemp("packages"), Path(np.__file__).parents[1]
    for path in home.iterdir():
        if path.name.removesuffix(".libs") in NEEDED:
            (folder / path.name).symlink_to(path)
    (folder / "bertsmith").symlink_to(Path(bertsmith.__file__).parent)
    return folder


def test_runtime_works_without_pytorch(both: Both, bare: Path) -> None:
    code = """if True:
        import json, sys
        from bertsmith.runtime import load
        model = load(sys.argv[1], threads=1)
        json.dump(model.details(json.loads(sys.argv[2])), sys.stdout)
        here = {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__main__"}
        assert here == {"bertsmith", "numpy", "onnxruntime", "tokenizers"}, here
        ours = {name for name in sys.modules if name.startswith("bertsmith.")}
        allowed = ("errors", "files", "text", "answers", "engines", "runtime")
        assert all(name.split(".")[1] in allowed for name in ours), ours
    """
    command = [sys.executable, "-S", "-c", code, str(both.folder), json.dumps(both.rows)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(bare)})
    assert done.returncode == 0, done.stderr
    assert is_close(json.loads(done.stdout), both.predictor.details(both.rows))


def test_every_task_kind_has_a_runtime_case() -> None:
    encoder_tasks = set(TASKS) - {"translation"}  # ONNX graphs contain encoders only
    assert set(EXPORTED_TASKS) == encoder_tasks
    assert {case.kind for case in TASK_CASES.values()} == encoder_tasks
