"""The run-time without PyTorch answers every kind of task as the Predictor does, whole models and sub-networks."""

from typing import Any

import pytest
from task_cases import TASK_CASES

import bertsmith
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.runtime import OnnxModel, load
from bertsmith.runtime.kinds import KINDS
from bertsmith.tasks import TASKS
from bertsmith.tasks.predictor import KeptTask, Predictor, write_kept
from bertsmith.tasks.recognise import recognise
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tables import table_of
from bertsmith.training.starting import with_task_head

QUICK = {"classification of pairs", "tagging in windows", "choice", "spans", "embedding of scored pairs"}
LENGTH = 16
Both = tuple[Predictor, OnnxModel, list[dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TASK_CASES],
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """The predictor of half a model, the run-time of its exported folder, and rows to ask."""
    case, folder = TASK_CASES[request.param], tmp_path_factory.mktemp("runtime")
    table = table_of(case.rows, "rows")
    plain = recognise(table, None if case.is_recognised else case.kind, [], case.task)
    if case.kind == "spans":
        plain |= {"stride": 3, "may_be_unanswered": True}
    task = KeptTask.parse({"task": plain}).task.settled(table)
    texts = list(task.texts(task.examples(table)))
    tokenizer = learn_tokenizer(texts * 4, "wordpiece", 120, progress=False)
    sizes = {"vocabulary": tokenizer.size, "width": 32, "heads": 4, "layers": 1, "longest": 32, "deviation": 0.3}
    model = bertsmith.build(bertsmith.preset("bert-tiny", **sizes), seed=0)
    model.tokenizer = tokenizer
    model = bertsmith.extract(with_task_head(model, task.head(model.config), seed=0).eval(), Subnet(width=0.5))
    kept = KeptTask.parse({"task": task.plain(), "sequences": {"length": LENGTH}})
    bertsmith.save(model, folder / "model")
    write_kept(kept, folder / "model")
    bertsmith.export(model, folder / "onnx", to="onnx", task=folder / "model")
    rows = [{name: row[name] for name in row if name not in case.targets} for row in case.rows]
    return Predictor(model, kept), load(folder / "onnx", threads=1, batch_tokens=40), rows


def alike(mine: Any, theirs: Any) -> bool:
    """Whether two answers are the same, numbers to 1e-4."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return list(mine) == list(theirs) and all(alike(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    if isinstance(mine, float) and isinstance(theirs, float):
        return abs(mine - theirs) <= 1e-4 * max(1.0, abs(theirs))
    return type(mine) is type(theirs) and mine == theirs


def test_it_answers_as_the_predictor_does(both: Both) -> None:
    predictor, model, rows = both
    expected, found = predictor.details(rows), model.details(rows)
    assert alike(found, expected), (found, expected)
    assert alike(model.predict(rows), predictor.predict(rows))
    # one at a time as well, and the other way round
    assert alike([model.details([row])[0]["answer"] for row in rows[:1]], predictor.predict(rows[:1]))
    assert alike(model.predict(rows[::-1]), predictor.predict(rows[::-1]))
    assert model.predict([]) == predictor.predict([]) == []


def test_inputs_without_names_of_columns(both: Both) -> None:
    predictor, model, rows = both
    columns = predictor.task.input_columns
    given = [row[columns[0]] if len(columns) == 1 else tuple(row[column] for column in columns) for row in rows]
    assert alike(model.details(given), predictor.details(given))
    if predictor.task.kind in ("tagging", "embedding"):
        texts = ["Bert Smith forges a gate, in New Rome", ""]  # running text; a text alone
        assert alike(model.details(texts), predictor.details(texts))


def test_what_cannot_be_answered_is_said_in_the_same_words(both: Both) -> None:
    predictor, model, rows = both
    bad: list[Any] = ["a text", [{}], [3.5], [{**rows[0], predictor.task.input_columns[-1]: None}]]
    for inputs in bad:
        with pytest.raises(InputError) as theirs:
            predictor.details(inputs)
        with pytest.raises(InputError) as mine:
            model.details(inputs)
        assert str(mine.value) == str(theirs.value)


def test_every_kind_of_task_has_one_here() -> None:
    assert set(KINDS) == set(TASKS)
    assert {TASK_CASES[name].kind for name in QUICK} | {"classification", "regression", "multi_label"} == set(TASKS)
