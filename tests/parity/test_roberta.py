"""RoBERTa, XLM-RoBERTa, MPNet and DistilBERT against `transformers`, in float64, on tiny random models."""

from pathlib import Path

import pytest
import torch
from theirs import TINY, batch, compare_masked_losses, make, ours, there_and_back
from torch import Tensor
from transformers import (
    DistilBertForMaskedLM,
    DistilBertForMultipleChoice,
    DistilBertForQuestionAnswering,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    DistilBertModel,
    MPNetForMaskedLM,
    MPNetForMultipleChoice,
    MPNetForQuestionAnswering,
    MPNetForSequenceClassification,
    MPNetForTokenClassification,
    MPNetModel,
    PreTrainedModel,
    RobertaForMaskedLM,
    RobertaForMultipleChoice,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
    XLMRobertaForMaskedLM,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

import bertsmith
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.attention import t5_slots

_DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
DISTILBERT = {_DISTILBERT_NAMES.get(name, name): value for name, value in TINY.items()}
ROBERTA = {**TINY, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
ENCODERS = [RobertaModel, RobertaForMaskedLM, XLMRobertaModel, XLMRobertaForMaskedLM]
ENCODERS += [DistilBertModel, DistilBertForMaskedLM, MPNetModel, MPNetForMaskedLM]
SEQUENCE_CLASSES = [
    RobertaForSequenceClassification,
    XLMRobertaForSequenceClassification,
    DistilBertForSequenceClassification,
    MPNetForSequenceClassification,
]
TOKEN_CLASSES = [RobertaForTokenClassification, RobertaForQuestionAnswering]
TOKEN_CLASSES += [DistilBertForTokenClassification, DistilBertForQuestionAnswering]
TOKEN_CLASSES += [MPNetForTokenClassification, MPNetForQuestionAnswering]
CHOICE_CLASSES = [RobertaForMultipleChoice, DistilBertForMultipleChoice, MPNetForMultipleChoice]


def model_of(kind: type[PreTrainedModel], **settings: object) -> PreTrainedModel:
    if "DistilBert" in kind.__name__:
        dropouts = {"seq_classif_dropout": 0.0, "qa_dropout": 0.0}
        return make(kind, 0, {**DISTILBERT, **dropouts, **settings})
    tiny = {**ROBERTA, "relative_attention_num_buckets": 32} if "MPNet" in kind.__name__ else ROBERTA
    theirs = make(kind, 0, {**tiny, **settings})
    with torch.no_grad():  # rows before the first position are never read, and zeros after an export
        theirs.base_model.embeddings.position_embeddings.weight[:2] = 0
    return theirs


def inputs_of(theirs: PreTrainedModel) -> dict[str, Tensor]:
    inputs = batch([9, 1, 4], 9, pad=theirs.config.pad_token_id)
    del inputs["token_type_ids"]
    return inputs


@pytest.mark.parametrize("kind", [RobertaModel, XLMRobertaModel, DistilBertModel, MPNetModel])
def test_hidden_states_equal_theirs(kind: type[PreTrainedModel], tmp_path: Path) -> None:
    theirs = model_of(kind)
    model, inputs = ours(theirs, tmp_path), inputs_of(theirs)
    real = inputs["attention_mask"].bool()
    expected = theirs(**inputs).last_hidden_state
    torch.testing.assert_close(model(**inputs)[real], expected[real], rtol=0, atol=1e-10)
    assert model.max_seq_length == (20 if kind is DistilBertModel else 18)


@pytest.mark.parametrize(("kind", "types"), [(RobertaForMaskedLM, {"type_vocab_size": 2}), (MPNetForMaskedLM, {})])
def test_loss_and_gradients_equal_theirs(kind: type[PreTrainedModel], types: dict[str, int], tmp_path: Path) -> None:
    theirs = model_of(kind, **types)
    compare_masked_losses(ours(theirs, tmp_path), theirs, batch([9, 1, 4], 9, pad=1))


def test_relative_bias_has_their_buckets() -> None:
    offsets = torch.arange(-600, 601)
    slots = t5_slots(16, 128)
    reach = len(slots) // 2
    found = slots[offsets.clamp(-reach, reach) + reach]
    assert torch.equal(found, MPNetEncoder.relative_position_bucket(-offsets))


def test_reordered_heads_are_no_mpnet(tmp_path: Path) -> None:
    model = ours(model_of(MPNetModel), tmp_path / "theirs")
    heads = torch.tensor([2, 0, 3, 1])
    model.encoder.reorder([heads] * 3, [torch.arange(40)] * 3)
    assert "encoder.blocks.0.mixer.bias_heads differs from its value there" in str(
        bertsmith.export(model, tmp_path / "back")
    )


@pytest.mark.parametrize("kind", ENCODERS)
def test_weights_survive_import_and_export(kind: type[PreTrainedModel], tmp_path: Path) -> None:
    there_and_back(model_of(kind), torch.float64, tmp_path)


@pytest.mark.parametrize("kind", SEQUENCE_CLASSES + TOKEN_CLASSES + CHOICE_CLASSES)
def test_task_classes(kind: type[PreTrainedModel], tmp_path: Path) -> None:
    theirs = model_of(kind, **({} if kind in CHOICE_CLASSES else {"num_labels": 2}))
    model, inputs = ours(theirs, tmp_path / "theirs"), inputs_of(theirs)
    rows = {name: value[:, None] for name, value in inputs.items()} if kind in CHOICE_CLASSES else inputs
    output = theirs(**rows)
    expected = torch.stack([output.start_logits, output.end_logits], -1) if "start_logits" in output else output.logits
    layout = SequenceLayout.rows(inputs["input_ids"], inputs["attention_mask"])
    found = model.outputs(inputs["input_ids"], layout)
    real = inputs["attention_mask"].bool() if kind in TOKEN_CLASSES else slice(None)
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-10)
    assert f"written as {kind.__name__}" in str(bertsmith.export(model, tmp_path / "back"))
    back = kind.from_pretrained(tmp_path / "back", dtype=torch.float64)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_padding_before_positions_is_required(tmp_path: Path) -> None:
    model_of(RobertaModel, pad_token_id=1).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text().replace('"pad_token_id": 1', '"pad_token_id": 0')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match="pad_token_id is 0; allowed: 1"):
        bertsmith.load(tmp_path)
