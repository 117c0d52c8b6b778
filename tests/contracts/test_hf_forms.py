"""Every family and head, whole or cut, has the same outputs in `transformers`, in a native or a bertsmith class."""

from pathlib import Path
from random import Random

import pytest
import torch
from elastic_cases import random_subnet
from hf_cases import ENCODERS, LABELS, TASK_HEADS, inputs, is_native, opened, opened_alone, ours, task_model, theirs
from safetensors.torch import load_file, save_file

import bertsmith
from bertsmith.checkpoint.hf.wrapped import standalone_refusal
from bertsmith.checkpoint.hf.writing import HfExport, first_difference, plan_hf
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import extract
from bertsmith.models.heads.task import ClassifierConfig
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
    if plan.form == "bertsmith" and standalone_refusal(model.config) is None:
        alone = opened_alone(plan, folder)
        torch.testing.assert_close(theirs(alone, task, given), ours(model, given), rtol=0, atol=1e-5)
    if task in ("classification", "tagging"):
        assert there.config.id2label == dict(enumerate(LABELS))
        assert there.config.label2id == {name: number for number, name in enumerate(LABELS)}
    assert there.config.problem_type == PROBLEMS.get(task)
    back = bertsmith.load(folder)
    if "pooler" in set(back.heads) - set(model.heads):  # the classifier's hidden layer there
        torch.testing.assert_close(ours(back, given), ours(model, given), rtol=0, atol=1e-10)
        return plan
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


OTHER_HEADS = {
    ("bert-tiny", None): "DebertaV2ForSequenceClassification",
    ("bert-tiny", "tanh"): "BertForSequenceClassification",
    ("bert-tiny", "gelu"): "ElectraForSequenceClassification",
    ("albert-base", "tanh"): "AlbertForSequenceClassification",
    ("electra-base", None): "DebertaV2ForSequenceClassification",
    ("deberta-base", None): "DebertaForSequenceClassification",
    ("deberta-v3-xsmall", None): "DebertaV2ForSequenceClassification",
}
"""Family and hidden layer of a classifier on the first token, and the class that computes the same."""


@pytest.mark.parametrize(("name", "hidden"), OTHER_HEADS)
def test_classifiers_on_the_first_token_are_native(name: str, hidden: str | None, tmp_path: Path) -> None:
    sizes = {"width": 24, "layers": 2, "heads": 4, "vocabulary": 50, "max_length": 16, "init_std": 0.3, "dropout": 0.0}
    sizes |= {"embedding_width": 24} if name.startswith("electra") else {}
    head = ClassifierConfig(labels=LABELS, hidden=hidden, dropout=0.1)
    model = with_task_head(bertsmith.build(bertsmith.preset(name, **sizes), seed=0), head, seed=0).double().eval()
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.normal_(std=0.3)
    plan = plan_hf(model, task={"task": {"kind": "classification"}})
    assert plan.architecture == OTHER_HEADS[name, hidden]
    assert ("of this shape is the same" in plan.remark) == (plan.settings["model_type"] != model.config.family)
    (tmp_path / "hf").mkdir()
    plan.write(tmp_path / "hf")
    given = inputs("classification")
    expected = ours(model, given)
    there, back = opened(plan, tmp_path / "hf"), bertsmith.load(tmp_path / "hf")
    # transformers' DeBERTa has scales in float32
    torch.testing.assert_close(theirs(there, "classification", given), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours(back, given), expected, rtol=0, atol=1e-10)
    assert there.config.id2label == dict(enumerate(LABELS))


def test_hidden_layer_that_is_not_the_identity_raises(tmp_path: Path) -> None:
    model = with_task_head(task_model("deberta-base", "tagging"), ClassifierConfig(labels=LABELS), seed=0)
    bertsmith.export(model, tmp_path / "hf")
    (tmp_path / "hf/seal.json").unlink(missing_ok=True)
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["pooler.dense.weight"][0, 1] = 0.5
    save_file(tensors, tmp_path / "hf/model.safetensors")
    with pytest.raises(InputError, match=r"needs the identity as 'pooler.dense.weight'"):
        bertsmith.load(tmp_path / "hf")


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
