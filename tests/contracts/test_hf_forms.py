"""Every family and head, whole or cut, has the same outputs in `transformers`, in a native or a bertsmith class."""

from pathlib import Path
from random import Random

import pytest
import torch
from elastic_cases import random_subnet
from hf_cases import ENCODERS, LABELS, TASK_HEADS, inputs, is_native, opened, ours, task_model, theirs

import bertsmith
from bertsmith.checkpoint.hf.writing import HfExport, first_difference, plan_hf
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import extract
from bertsmith.models.model import Model

PROBLEMS = {"classification": "single_label_classification", "regression": "regression"}


def check(model: Model, task: str, folder: Path, native: str = "auto") -> HfExport:
    """Export a model, load it with transformers and with bertsmith, and compare the outputs."""
    plan = plan_hf(model, native=native, task={"task": {"kind": task}})
    folder.mkdir()
    plan.write(folder)
    # in native ConvBERT models padding leaks into convolutions, which the notice mentions
    has_pads = plan.form == "bertsmith" or model.config.family != "convbert"
    assert has_pads or "padding" in plan.remark
    given = inputs(task, has_pads=has_pads)
    there = opened(plan, folder)
    torch.testing.assert_close(theirs(there, task, given), ours(model, given), rtol=0, atol=1e-5)
    if task in ("classification", "tagging"):
        assert there.config.id2label == dict(enumerate(LABELS))
        assert there.config.label2id == {name: number for number, name in enumerate(LABELS)}
    assert there.config.problem_type == PROBLEMS.get(task)
    back = bertsmith.load(folder)
    assert first_difference(model.config, back.config) is None
    state = back.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    return plan


# regression is a classification head with one label, so one family is enough
CASES = [(name, task) for name in ENCODERS for task in TASK_HEADS if task != "regression" or name == "bert-tiny"]


@pytest.mark.parametrize(("name", "task"), CASES)
def test_task_outputs_match_transformers(name: str, task: str, tmp_path: Path) -> None:
    model = task_model(name, task)
    plan = check(model, task, tmp_path / "hf")
    if is_native(model, name, task):
        assert plan.form == "native"
        assert "opens without Bertsmith" in plan.remark
    else:
        assert plan.form == "bertsmith"
        assert plan.architecture.startswith("Bertsmith")
        assert "`import bertsmith.hf`, because " in plan.remark
        assert plan.settings["why_not_native"] in plan.remark


@pytest.mark.parametrize("name", ["bert-tiny", "deberta-v3-xsmall", "albert-base", "modern-small"])
def test_models_with_fewer_layers_and_neurons_stay_native(name: str, tmp_path: Path) -> None:
    model = task_model(name, "classification", layers=3)
    units = model.encoder.units
    half = Subnet(layers=(0, 2), heads=(units[0].heads,) * 2, neurons=(units[0].neurons // 2,) * 2)
    assert check(extract(model, half), "classification", tmp_path / "hf").form == "native"


@pytest.mark.parametrize("name", ["bert-tiny", "albert-base", "performer-small"])
def test_models_with_fewer_heads_need_the_bertsmith_class(name: str, tmp_path: Path) -> None:
    cut = extract(task_model(name, "tagging"), Subnet(width=0.5))
    plan = check(cut, "tagging", tmp_path / "hf")
    assert plan.architecture == "BertsmithForTokenClassification"
    assert "heads do not fill its width" in plan.remark or "family is 'performer'" in plan.remark


@pytest.mark.slow
@pytest.mark.parametrize("task", TASK_HEADS)
@pytest.mark.parametrize("name", ENCODERS)
def test_random_subnets_open_with_the_bertsmith_class(name: str, task: str, tmp_path: Path) -> None:
    model = task_model(name, task, layers=3)
    check(model, task, tmp_path / "whole", native="never")
    draw = Random(f"{name} {task}")
    for index in range(3):
        check(extract(model, random_subnet(model.encoder.units, draw)), task, tmp_path / f"cut-{index}")
