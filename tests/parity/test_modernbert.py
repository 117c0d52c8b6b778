"""ModernBERT and its task classes against `transformers`, in float64: outputs, losses, gradients, import and export."""

import json
from pathlib import Path

import pytest
import torch
from theirs import (
    VOCABULARY,
    assert_gradients_equal,
    batch,
    compare_masked_losses,
    make,
    ours,
    there_and_back,
)
from torch import Tensor
from transformers import (
    ModernBertForMaskedLM,
    ModernBertForMultipleChoice,
    ModernBertForQuestionAnswering,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertModel,
    PreTrainedModel,
)

import bertsmith
from bertsmith import InputError, SequenceLayout
from bertsmith.answers.sequences import IGNORED
from bertsmith.checkpoint.hf.writing import native_export, plan_hf
from bertsmith.data.examples import TaskBatch
from bertsmith.layers.subnet import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import extract
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import ClassifierConfig, HiddenLayerConfig
from bertsmith.models.model import Model
from bertsmith.objectives.supervised import Choices, Classes, Labels, Spans, Supervised, Tags, Values
from bertsmith.tasks.default_heads import classifier_head, spans_head, tagger_head
from bertsmith.training.finetuning import HeadChoice

SETTINGS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
    "local_attention": 6,
    "initializer_range": 0.3,
    **{f"{role}_token_id": 0 for role in ("pad", "bos", "eos", "cls", "sep")},
}
OTHER = {
    "hidden_activation": "silu",
    "norm_eps": 1e-3,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 50.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
    },
}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make their rotary embedding and loss, which are always float32, follow the dtype of the model."""
    rounded = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else rounded(self))


@pytest.mark.parametrize(("lengths", "length"), [([5, 5], 5), ([19, 1, 12], 19), ([3, 7, 7, 2], 8)])
@pytest.mark.parametrize("changes", [{}, OTHER], ids=["as released", "other"])
def test_hidden_states_equal_theirs(changes: dict, lengths: list[int], length: int, tmp_path: Path) -> None:
    theirs = make(ModernBertModel, 0, SETTINGS | changes)
    model, inputs = ours(theirs, tmp_path), batch(lengths, length)
    del inputs["token_type_ids"]
    real = inputs["attention_mask"].bool()
    expected = theirs(**inputs, output_hidden_states=True)
    torch.testing.assert_close(model(**inputs)[real], expected.last_hidden_state[real], rtol=0, atol=1e-10)
    layers = model.encoder.run(
        EncoderInputs(inputs["input_ids"], SequenceLayout.padded(real)), Want(all_hidden_states=True)
    ).hidden_states
    for mine, reference in zip(layers[:-1], expected.hidden_states, strict=False):
        torch.testing.assert_close(mine[real], reference[real], rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, OTHER], ids=["as released", "other"])
def test_losses_and_gradients_equal_theirs(changes: dict, tmp_path: Path) -> None:
    theirs = make(ModernBertForMaskedLM, 2, SETTINGS | changes)
    compare_masked_losses(ours(theirs, tmp_path), theirs, batch([19, 1, 12], 19))


@pytest.mark.parametrize("kind", [ModernBertModel, ModernBertForMaskedLM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("changes", [{}, OTHER], ids=["as released", "other"])
def test_weights_survive_import_and_export(kind: type, changes: dict, dtype: torch.dtype, tmp_path: Path) -> None:
    there_and_back(make(kind, 5, SETTINGS | changes), dtype, tmp_path)


def test_exported_preset_is_their_model(tmp_path: Path) -> None:
    size = {"width": 24, "layers": 4, "heads": 2, "neurons": 30, "vocabulary": VOCABULARY, "window": 3}
    model = bertsmith.build(bertsmith.preset("modern-small", **size), seed=0).double().eval()
    bertsmith.export(model, tmp_path / "hf")
    theirs = ModernBertForMaskedLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    ids = torch.randint(0, VOCABULARY, (2, 12))
    scores = model.head("masked_tokens")(model(ids), model.token_table)
    torch.testing.assert_close(scores, theirs(ids).logits, rtol=0, atol=1e-10)


def test_old_config_keys_are_read(tmp_path: Path) -> None:
    theirs = make(ModernBertModel, 0, SETTINGS)
    expected = ours(theirs, tmp_path).config
    data = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_types", "rope_parameters"):
        del data[name]
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(data | old))
    assert bertsmith.load(tmp_path).config == expected
    (tmp_path / "config.json").write_text(json.dumps(data | {"global_attn_every_n_layers": 2}))
    assert bertsmith.load(tmp_path).config.encoder.layers[2].mixer.window is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_bias": True}, "norm_bias is True; allowed: False"),
        ({"mlp_dropout": 0.1}, r"mlp_dropout is 0\.1; allowed: 0\.0"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*; allowed: 4 times 'full_attention' or"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type is 'yarn'; allowed: 'default'"),
    ],
)
def test_unsupported_config_raises(change: dict, message: str, tmp_path: Path) -> None:
    make(ModernBertModel, 0, SETTINGS).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | change))
    with pytest.raises(InputError, match=message):
        bertsmith.load(tmp_path)


LABELS = ("no", "yes", "perhaps")
GLOBAL = {"layer_types": ["full_attention"] * 4}
HEADS = {
    "as released": {},
    "mean": {"classifier_pooling": "mean", **GLOBAL},
    "other": {**OTHER, "classifier_bias": True, "classifier_activation": "relu", "classifier_pooling": "mean"},
}
"""Variants of the prediction head."""
NAMED = {"id2label": dict(enumerate(LABELS))}
TASKS: dict[str, tuple[type[PreTrainedModel], dict, Supervised]] = {
    "classification": (ModernBertForSequenceClassification, NAMED, Classes()),
    "multi_label": (
        ModernBertForSequenceClassification,
        NAMED | {"problem_type": "multi_label_classification"},
        Labels(),
    ),
    "regression": (ModernBertForSequenceClassification, {"num_labels": 1, "problem_type": "regression"}, Values()),
    "tagging": (ModernBertForTokenClassification, NAMED, Tags()),
    "spans": (ModernBertForQuestionAnswering, {}, Spans()),
    "choice": (ModernBertForMultipleChoice, {}, Choices()),
}


def task_settings(task: str, variant: str) -> dict:
    return SETTINGS | TASKS[task][1] | HEADS[variant]


def task_inputs(task: str) -> dict[str, Tensor]:
    """Return four sequences; of one length for spans, because their loss includes padding."""
    inputs = batch([9] * 4 if task == "spans" else [9, 1, 4, 7], 9)
    del inputs["token_type_ids"]
    return inputs


def their_outputs(theirs: PreTrainedModel, task: str, inputs: dict[str, Tensor], **targets: Tensor) -> tuple:
    """Return their loss and their outputs in our shape."""
    if task == "choice":  # two items with two choices each
        found = theirs(**{name: tensor.view(2, 2, -1) for name, tensor in inputs.items()}, **targets)
        return found.loss, found.logits.flatten()[:, None]
    found = theirs(**inputs, **targets)
    return found.loss, torch.stack([found.start_logits, found.end_logits], -1) if task == "spans" else found.logits


def task_targets(task: str, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return random targets for our objective, and as their arguments."""
    is_token, labels = inputs["attention_mask"].bool(), torch.tensor([2, 0, 1, 2])
    if task == "multi_label":
        many = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0]], dtype=torch.float64)
        return {"labels": many}, {"labels": many}
    if task == "regression":
        values = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64)
        return {"value": values}, {"labels": values}
    if task == "tagging":
        tags = torch.randint(0, 3, is_token.shape).where(is_token & (torch.rand(is_token.shape) < 0.7), IGNORED)
        tags[0, 0] = 1
        return {"tags": tags}, {"labels": tags}
    if task == "spans":
        ends = {"start": torch.tensor([0, 3, 1, 8]), "end": torch.tensor([2, 3, 8, 8])}
        return ends, {f"{name}_positions": index for name, index in ends.items()}
    if task == "choice":
        right = torch.tensor([1, 0])
        return {"label": right, "is_choice": torch.ones(2, 2, dtype=torch.bool)}, {"labels": right}
    return {"label": labels}, {"labels": labels}


def task_batch(inputs: dict[str, Tensor], targets: dict[str, Tensor], layout: str) -> TaskBatch:
    """Return the sequences as our batch, padded or packed."""
    tokens, is_token = inputs["input_ids"], inputs["attention_mask"].bool()
    lengths, count = is_token.sum(1), len(targets.get("is_choice", tokens))
    if layout == "padded":
        return TaskBatch(
            tokens, SequenceLayout.padded(is_token), None, torch.arange(count), targets, int(lengths.sum())
        )
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    packed = {name: value[is_token] if value.shape == is_token.shape else value for name, value in targets.items()}
    rows = SequenceLayout.packed(starts, int(lengths.max()))
    return TaskBatch(tokens[is_token], rows, None, torch.arange(count), packed, int(lengths.sum()))


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("variant", HEADS)
@pytest.mark.parametrize("task", TASKS)
def test_task_class_equals_theirs(task: str, variant: str, layout: str, tmp_path: Path) -> None:
    """Outputs, loss and every gradient."""
    kind, _, objective = TASKS[task]
    theirs = make(kind, 5, task_settings(task, variant))
    model, inputs = ours(theirs, tmp_path), task_inputs(task)
    targets, theirs_targets = task_targets(task, inputs)
    loss, expected = their_outputs(theirs, task, inputs, **theirs_targets)
    given = task_batch(inputs, targets, layout)
    outputs = model.outputs(given.tokens, given.layout)
    if model.is_for_tokens:
        real = inputs["attention_mask"].bool()
        expected, outputs = expected[real], outputs[real] if layout == "padded" else outputs
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-10)
    found = objective(model, given)["task"].loss / objective.count(given)
    torch.testing.assert_close(found, loss, rtol=0, atol=1e-10)
    loss.backward()
    found.backward()
    assert_gradients_equal(model, theirs, head=native_export(model).head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", HEADS)
@pytest.mark.parametrize("task", TASKS)
def test_task_class_survives_import_and_export(task: str, variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    settings = task_settings(task, variant) | {"classifier_dropout": 0.25}
    theirs = make(TASKS[task][0], 6, settings)
    back = there_and_back(theirs, dtype, tmp_path)
    for name in ("classifier_dropout", "classifier_bias", "classifier_activation", "layer_types"):
        assert getattr(back.config, name) == getattr(theirs.config, name)
    head = bertsmith.load(tmp_path / "back").config.heads[-1]
    assert head.dropout == 0.25
    if head.kind == "classifier":
        assert back.config.classifier_pooling == theirs.config.classifier_pooling
    if head.kind != "spans" and "id2label" in settings:
        assert back.config.id2label == settings["id2label"]


DEFAULT_HEADS = {
    "classification": lambda config: classifier_head(config, LABELS),
    "regression": lambda config: classifier_head(config, ("score",)),
    "choice": lambda config: classifier_head(config, ("choice",)),
    "tagging": lambda config: tagger_head(config, LABELS),
    "spans": spans_head,
}


def tiny_modern() -> Model:
    given = {"width": 24, "layers": 4, "heads": 2, "neurons": 30, "vocabulary": VOCABULARY, "window": 3}
    return bertsmith.build(bertsmith.preset("modern-small", **given), seed=0).double().eval()


@pytest.mark.parametrize("task", DEFAULT_HEADS)
def test_default_head_is_their_class(task: str, tmp_path: Path) -> None:
    base = tiny_modern()
    model = with_task_head(base, DEFAULT_HEADS[task](base.config), seed=0).double().eval()
    plan = plan_hf(model, task={"task": {"kind": task}})
    assert plan.form == "native", plan.remark
    plan.write(tmp_path)
    theirs = TASKS[task][0].from_pretrained(tmp_path, dtype=torch.float64)
    if model.config.heads[0].kind == "classifier":
        assert theirs.config.classifier_pooling == "mean"
    inputs = task_inputs(task)
    real = inputs["attention_mask"].bool() if model.is_for_tokens else ...
    outputs = model.outputs(inputs["input_ids"], SequenceLayout.rows(inputs["input_ids"], inputs["attention_mask"]))
    torch.testing.assert_close(outputs[real], their_outputs(theirs, task, inputs)[1][real], rtol=0, atol=1e-10)


def test_dropout_applies_where_theirs_does(tmp_path: Path) -> None:
    """In train mode only the input of the scores is dropped, once."""
    theirs = make(ModernBertForSequenceClassification, 7, SETTINGS | NAMED | {"classifier_dropout": 0.5})
    model, inputs = ours(theirs, tmp_path).train(), task_inputs("classification")
    seen: list[Tensor] = []
    model.heads["classifier"].hidden.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model.heads["classifier"].score.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model.outputs(inputs["input_ids"], SequenceLayout.rows(inputs["input_ids"], inputs["attention_mask"]))
    before, scored = seen
    assert (before != 0).all()
    share = (scored == 0).double().mean()
    assert 0.2 < share < 0.8  # 96 draws at rate 0.5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": "none"}, r"heads\.classifier\.hidden is None and would be read back as given"),
        ({"hidden": "gelu"}, r"heads\.classifier\.hidden is 'gelu' and would be read back as given"),
        ({"pooling": "max"}, r"heads\.classifier\.pooling is 'max' and would be read back as 'first'"),
        ({"features": {"layers": 2}}, r"heads\.classifier\.features\.layers is 2 and would be read back as 1"),
    ],
)
def test_other_heads_are_not_their_class(change: dict, reason: str) -> None:
    base = tiny_modern()
    head: HeadConfig = HeadChoice.parse(change).applied(classifier_head(base.config, LABELS))
    model = with_task_head(base, head, seed=0)
    with pytest.raises(InputError, match=reason):
        plan_hf(model, native="always")
    assert plan_hf(model).form == "bertsmith"


def test_sub_network_is_native_with_the_first_layer_only() -> None:
    model = tiny_modern()
    assert plan_hf(extract(model, Subnet(layers=(0, 2)))).form == "native"
    plan = plan_hf(extract(model, Subnet(layers=(1, 3))))
    assert plan.form == "bertsmith"
    assert "its first layer has a norm before the attention" in plan.remark


def test_input_dropout_of_a_head_without_dropout_has_no_effect() -> None:
    base = tiny_modern()
    norm = base.config.encoder.layers[0].norm.changed(placement="post")
    hidden = HiddenLayerConfig(activation="gelu", has_bias=False, norm=norm, drops_input=True)
    head = ClassifierConfig(labels=LABELS, pooling="mean", hidden=hidden, dropout=0.0)
    assert plan_hf(with_task_head(base, head, seed=0)).form == "native"
    dropped = with_task_head(tiny_modern(), head.changed(dropout=0.1), seed=0)
    assert "drops_input is True" in plan_hf(dropped).remark


def test_encoder_of_a_task_class_is_read_without_its_head(tmp_path: Path) -> None:
    theirs = make(ModernBertForTokenClassification, 8, SETTINGS | NAMED)
    theirs.save_pretrained(tmp_path)
    model = bertsmith.load(tmp_path, ignore=("head", "classifier"))
    assert model.config.heads == ()
    inputs = task_inputs("tagging")
    real = inputs["attention_mask"].bool()
    expected = theirs.model(**inputs).last_hidden_state
    torch.testing.assert_close(model(**inputs)[real], expected[real], rtol=0, atol=1e-10)


def test_unknown_pooling_raises(tmp_path: Path) -> None:
    make(ModernBertForSequenceClassification, 9, SETTINGS).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"classifier_pooling": "cls"', '"classifier_pooling": "max"'))
    with pytest.raises(InputError, match=r"classifier_pooling is 'max'; allowed: cls, mean"):
        bertsmith.load(tmp_path)
