"""`bertsmith.hf`: our models as classes of `transformers`, with losses, states and files as that library's own have."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import tiny_model
from hf_cases import LABELS, inputs, opened, ours, task_model, theirs
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

import bertsmith
from bertsmith.checkpoint.hf.writing import plan_hf
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.hf import CLASSES, BertsmithConfig, BertsmithForSequenceClassification, BertsmithModel
from bertsmith.layers.context import Memory
from bertsmith.layers.quantised import QuantisationConfig
from bertsmith.layers.subnet import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import build, extract
from bertsmith.models.convert import factorise
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import ExitsConfig, HeadConfig
from bertsmith.models.heads.base import FeaturesConfig, RecurrentConfig
from bertsmith.models.heads.task import ClassifierConfig, TaggerConfig
from bertsmith.models.model import Model

TARGETS = {
    "classification": {"labels": torch.tensor([2, 0, 1])},
    "regression": {"labels": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)},
    "choice": {"labels": torch.tensor([1])},
    "tagging": {
        "labels": torch.tensor([[1, 2, 0, -100, 1, 0, 2, 2, 1], [0] + [-100] * 8, [-100, 1, 1, 0, 2] + [-100] * 4])
    },
    "spans": {"start_positions": torch.tensor([1, 0, 2]), "end_positions": torch.tensor([8, 0, 99])},
}


def written(model: Model, folder: Path, native: str = "never") -> Path:
    folder.mkdir()
    plan_hf(model, native=native).write(folder)
    return folder


@pytest.mark.parametrize("task", TARGETS)
def test_losses_hidden_states_and_attentions_equal_the_native_class(task: str, tmp_path: Path) -> None:
    model, given = task_model("bert-tiny", task), inputs(task)
    plans = [plan_hf(model, native=native) for native in ("always", "never")]
    said = []
    for plan in plans:
        folder = tmp_path / plan.form
        folder.mkdir()
        plan.write(folder)
        there = opened(plan, folder, attn_implementation="eager")
        rows = {name: tensor[None] for name, tensor in given.items()} if task == "choice" else given
        said.append(there(**rows, **TARGETS[task], output_hidden_states=True, output_attentions=True))
        as_tuple = there(**rows, **TARGETS[task], return_dict=False)
        assert isinstance(as_tuple, tuple)
        assert torch.equal(as_tuple[0], said[-1].loss)
    native, own = said
    assert type(native) is type(own)
    torch.testing.assert_close(own.loss.double(), native.loss.double(), rtol=0, atol=1e-5)
    real = given["attention_mask"].bool()
    for mine, reference in zip(own.hidden_states, native.hidden_states, strict=True):
        torch.testing.assert_close(mine[real], reference[real], rtol=0, atol=1e-5)
    for mine, reference in zip(own.attentions, native.attentions, strict=True):
        torch.testing.assert_close(mine[0], reference[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["albert-base", "universal-base", "deberta-v3-xsmall", "performer-small"])
def test_save_pretrained_is_read_by_both_libraries(name: str, tmp_path: Path) -> None:
    """Layers that are one, waves that no file holds, buckets of distances, random features."""
    model, given = task_model(name, "classification"), inputs("classification")
    there = AutoModelForSequenceClassification.from_pretrained(written(model, tmp_path / "once"), dtype=torch.float64)
    there.save_pretrained(tmp_path / "twice")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "twice", dtype=torch.float64).eval()
    assert type(again) is BertsmithForSequenceClassification
    assert again.config.id2label == dict(enumerate(LABELS))
    back = bertsmith.load(tmp_path / "twice")
    assert back.config == model.config
    state = back.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    for one in (again, copy.deepcopy(again)):
        torch.testing.assert_close(theirs(one, "classification", given), ours(model, given), rtol=0, atol=1e-5)


def test_loss_falls_in_training(tmp_path: Path) -> None:
    folder = written(task_model("performer-small", "tagging"), tmp_path / "hf")
    there = AutoModelForTokenClassification.from_pretrained(folder).train()
    loss = there(**inputs("tagging"), **TARGETS["tagging"]).loss
    loss.backward()
    before = there.inner.heads["tagger"].score.weight.clone()
    assert all(parameter.grad is not None for parameter in there.heads.parameters())
    torch.optim.SGD(there.parameters(), lr=0.1).step()
    assert not torch.equal(there.inner.heads["tagger"].score.weight, before)
    assert there(**inputs("tagging"), **TARGETS["tagging"]).loss < loss


def test_transformers_trainer(tmp_path: Path) -> None:
    folder = written(task_model("universal-base", "classification"), tmp_path / "hf")
    there = AutoModelForSequenceClassification.from_pretrained(folder, device_map="cpu", dtype=torch.float32)
    rows = [{"input_ids": torch.arange(1, 8) + i, "labels": torch.tensor(i % 3)} for i in range(8)]
    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=2, save_steps=2, use_cpu=True, report_to=[])
    Trainer(there, arguments, train_dataset=rows).train()
    saved, before = (bertsmith.load(path) for path in (tmp_path / "run" / "checkpoint-2", folder))
    state = saved.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in there.inner.state_dict().items())
    scores = [model.heads["classifier"].score.weight.double() for model in (saved, before)]
    assert not torch.allclose(*scores, rtol=0, atol=1e-6)


ODD: dict[str, tuple[str, Callable[[], Model]]] = {
    "several layers": ("classification", lambda: _headed(ClassifierConfig(labels=LABELS, features=_WEIGHTED))),
    "a BiLSTM": ("tagging", lambda: _headed(TaggerConfig(labels=LABELS, recurrent=RecurrentConfig(layers=1, width=8)))),
    "a table of low rank": ("spans", lambda: factorise(task_model("bert-tiny", "spans"), 4).double()),
    "rounded weights": ("classification", lambda: _rounded(task_model("bert-tiny", "classification"))),
}
_WEIGHTED = FeaturesConfig(layers=2, combine="weighted")


def _headed(head: HeadConfig) -> Model:
    return with_task_head(tiny_model("bert-tiny", layers=2), head, seed=0).double()


def _rounded(model: Model) -> Model:
    return build(model.config.changed(quantisation=QuantisationConfig()), seed=0).double()


@pytest.mark.parametrize("name", ODD)
def test_models_without_a_native_class(name: str, tmp_path: Path) -> None:
    task, made = ODD[name]
    model, given = made().eval(), inputs(task)
    plan = plan_hf(model)
    assert plan.form == "bertsmith"
    there = opened(plan, written(model, tmp_path / "hf", "auto"))
    torch.testing.assert_close(theirs(there, task, given), ours(model, given), rtol=0, atol=1e-5)


def test_other_precisions(tmp_path: Path) -> None:
    folder = written(tiny_model("bert-tiny pre-norm"), tmp_path / "hf")
    states = AutoModel.from_pretrained(folder, dtype=torch.bfloat16)(**inputs("")).last_hidden_state
    assert states.dtype == torch.bfloat16
    assert torch.isfinite(states).all()


@pytest.mark.parametrize("name", ["bert-tiny", "deberta-base", "convbert-small", "modern-small"])
def test_fill_mask_equals_ours(name: str, tmp_path: Path) -> None:
    """Through DeBERTa's mask decoder, which no class of theirs has."""
    model, given = tiny_model(name, layers=2), inputs("")
    if name == "convbert-small":
        there = AutoModelForPreTraining.from_pretrained(written(model, tmp_path / "hf"), dtype=torch.float64)
        expected = model.head("replaced_tokens")(model(**given))
        real = given["attention_mask"].bool()
        labels = given["input_ids"] % 2
        said = there(**given, labels=labels)
        torch.testing.assert_close(said.logits[real], expected[real], rtol=0, atol=1e-5)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(expected[real], labels[real].double())
        torch.testing.assert_close(said.loss, loss, rtol=0, atol=1e-5)
        return
    plan = plan_hf(model)
    assert (plan.form, "mask decoder" in plan.remark) == (
        ("bertsmith", True) if "deberta" in name else ("native", False)
    )
    there = AutoModelForMaskedLM.from_pretrained(written(model, tmp_path / "hf"), dtype=torch.float64)
    layout, positions = SequenceLayout.rows(*given.values()), torch.tensor([2, 9, 20])
    states = model.run(EncoderInputs(given["input_ids"], layout), Want(masked_positions=positions)).masked_states
    expected = model.head("masked_tokens")(states, model.token_table)
    labels = torch.full_like(given["input_ids"], -100)
    labels.view(-1)[positions] = torch.tensor([4, 5, 6])
    said = there(**given, labels=labels)
    torch.testing.assert_close(said.logits.flatten(0, 1)[positions], expected, rtol=0, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(expected, torch.tensor([4, 5, 6]))
    torch.testing.assert_close(said.loss.double(), loss, rtol=0, atol=1e-5)


def test_next_tokens(tmp_path: Path) -> None:
    model = tiny_model("performer-small", layers=1)
    causal = build(model.config.causal(), seed=0).double().eval()
    plan = plan_hf(causal)
    assert plan.architecture == "BertsmithForCausalLM"
    there = AutoModelForCausalLM.from_pretrained(written(causal, tmp_path / "hf"), dtype=torch.float64)
    ids = inputs("")["input_ids"]
    logits = causal.head("masked_tokens")(causal(ids), causal.token_table)
    said = there(input_ids=ids, labels=ids)
    torch.testing.assert_close(said.logits, logits, rtol=0, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(said.loss.double(), loss, rtol=0, atol=1e-5)


def test_seq2seq_generates(tmp_path: Path) -> None:
    model = extract(tiny_model("transformer-tiny"), Subnet(width=0.5))
    plan = plan_hf(model)
    assert plan.architecture == "BertsmithForSeq2SeqLM"
    tokens = {"decoder_start_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    folder = written(model, tmp_path / "hf")
    there = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64, **tokens)
    given = inputs("")
    layout = SequenceLayout.rows(*given.values())
    labels = torch.tensor([[5, 6, 3], [7, 3, -100], [8, 9, 3]])
    target = torch.tensor([[2, 5, 6], [2, 7, 3], [2, 8, 9]])
    states = model.decode(target, SequenceLayout.full(3, 3), Memory(model(**given), layout))
    said = there(**given, labels=labels)
    torch.testing.assert_close(said.logits, model.scores(states), rtol=0, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(model.scores(states).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(said.loss, loss, rtol=0, atol=1e-5)
    rows = model.generate(given["input_ids"], given["attention_mask"], start=2, end=3)
    for row, made in zip(rows, there.generate(**given).tolist(), strict=True):
        assert made[: len(row) + 2] == [2, *row, 3]
        assert not any(made[len(row) + 2 :])


def test_exits_are_exported(tmp_path: Path) -> None:
    model = task_model("bert-tiny", "classification")
    exits = ExitsConfig(layers=(1,), outputs=3, answer="classes")
    with_exits = build(model.config.changed(heads=(*model.config.heads, exits)), seed=1).double().eval()
    plan = plan_hf(with_exits)
    assert "has no head of kind 'exits' beside the task's" in plan.remark
    there = opened(plan, written(with_exits, tmp_path / "hf"))
    given = inputs("classification")
    torch.testing.assert_close(theirs(there, "classification", given), ours(with_exits, given), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("auto", "given"),
    [
        (AutoModelForSequenceClassification, {"num_labels": 5}),
        (AutoModelForTokenClassification, {"id2label": {0: "O", 1: "B"}}),
        (AutoModelForQuestionAnswering, {}),
        (AutoModelForMultipleChoice, {}),
    ],
)
def test_fresh_task_head(auto: type, given: dict, tmp_path: Path) -> None:
    """A pre-trained model gets the head that the class needs, with fresh weights, and keeps its own."""
    model = tiny_model("performer-small", layers=1)
    there = auto.from_pretrained(written(model, tmp_path / "hf"), **given)
    head = there.inner.task_head
    assert all(torch.isfinite(parameter).all() for parameter in there.parameters())
    assert head.score.weight.std() > 0.01
    assert torch.equal(
        there.encoder.embedding.token_table.double(), model.encoder.embedding.token_table.float().double()
    )
    if "num_labels" in given:
        assert head.score.weight.shape[0] == 5
    there.save_pretrained(tmp_path / "saved")
    assert bertsmith.load(tmp_path / "saved").config.heads[-1].kind in ("classifier", "tagger", "spans")


def test_fresh_model_from_config() -> None:
    model = tiny_model("universal-base", layers=1)
    there = AutoModel.from_config(BertsmithConfig.of(model.config, "BertsmithModel"))
    assert type(there) is BertsmithModel
    said = there(**inputs(""), return_dict=True)
    assert torch.isfinite(said.last_hidden_state).all()
    assert said.pooler_output.shape == (3, 24)


def test_every_class_is_registered(tmp_path: Path) -> None:
    folder = written(task_model("bert-tiny", "spans"), tmp_path / "hf")
    assert type(AutoConfig.from_pretrained(folder)) is BertsmithConfig
    assert {own.__name__ for own in CLASSES.values()} >= {
        plan_hf(task_model("bert-tiny", t), native="never").architecture for t in TARGETS
    }


def test_unsupported_inputs_raise(tmp_path: Path) -> None:
    folder = written(tiny_model("performer-small", layers=1), tmp_path / "hf")
    there = AutoModel.from_pretrained(folder)
    ids = inputs("")["input_ids"]
    with pytest.raises(InputError, match=r"^attention_mask has padding before a token in row"):
        there(input_ids=ids, attention_mask=(torch.arange(9) > 2).long().expand(3, 9))
    with pytest.raises(
        InputError, match=r"^inputs_embeds is given, which this model does not read; allowed: input_ids$"
    ):
        there(inputs_embeds=torch.zeros(1, 2, 24))
    with pytest.raises(InputError, match=r"^input_ids is missing"):
        there()
    with pytest.raises(InputError, match=r"^attention_mask has shape \(3, 2\) and input_ids \(3, 9\)"):
        there(input_ids=ids, attention_mask=torch.ones(3, 2))
    with pytest.raises(InputError, match=r"^output_attentions is true and a layer of this model has no map"):
        AutoModel.from_pretrained(written(tiny_model("lightconv-base"), tmp_path / "conv"))(ids, output_attentions=True)
    with pytest.raises(InputError, match=r"^a Bertsmith vocabulary is not resized here"):
        there.resize_token_embeddings(70)
    with pytest.raises(InputError, match=r"needs a head of kind replaced_tokens; this model's heads: masked_tokens"):
        AutoModelForPreTraining.from_pretrained(folder)
    with pytest.raises(InputError, match=r"^this BertsmithConfig has no 'model'"):
        BertsmithModel(BertsmithConfig())
    choices = AutoModelForMultipleChoice.from_pretrained(folder)
    with pytest.raises(InputError, match=r"^input_ids is of shape \(3, 9\); allowed: \(batch, choices, length\)$"):
        choices(input_ids=ids)


def test_missing_weight_raises(tmp_path: Path) -> None:
    folder = written(tiny_model("performer-small", layers=1), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.blocks.0.mixer.output.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"^the files lack the tensor 'weight' of a ElasticLinear"):
        AutoModel.from_pretrained(folder)
