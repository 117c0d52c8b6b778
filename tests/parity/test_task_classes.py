"""Every task class of `transformers` with an adapter: equal logits, and weights that survive import and export."""

import warnings
from pathlib import Path

import pytest
import torch
import transformers
from theirs import TINY, batch, make, ours, there_and_back

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.checkpoint.hf.reading import ADAPTERS
from bertsmith.errors import InputError

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*torch.jit.script")  # raised by third-party code at import
    from transformers import DebertaModel, DebertaV2Model  # noqa: F401

LABELS = {0: "no", 1: "yes", 2: "perhaps"}
CLASSES = sorted(
    head.architecture
    for name, adapter in ADAPTERS.items()
    for head in adapter.task_heads
    if head.rows and name not in ("roberta", "xlm-roberta", "distilbert", "modernbert", "mpnet")  # see their own tests
)
SETTINGS = {
    "Electra": {"embedding_size": 12, "summary_last_dropout": 0.0, "summary_activation": "relu"},
    "Albert": {"embedding_size": 12, "classifier_dropout_prob": 0.0},
    "ConvBert": {"embedding_size": 12, "pad_token_id": 0, "summary_type": "first"},
    "Deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 6},
}
SETTINGS["DebertaV2"] = {
    **SETTINGS["Deberta"],
    "position_buckets": 4,
    "share_att_key": True,
    "max_relative_positions": 9,
}
DROPOUTS = {"hidden_dropout_prob": 0.25, "classifier_dropout_prob": 0.25}
DROPOUTS |= {"summary_last_dropout": 0.25, "summary_first_dropout": 0.25}


def settings_of(name: str) -> dict:
    family, _, task = name.partition("For")
    labels = {"id2label": LABELS} if task in ("SequenceClassification", "TokenClassification") else {}
    return TINY | SETTINGS.get(family, {}) | labels


def their_scores(theirs: transformers.PreTrainedModel, inputs: dict) -> torch.Tensor:
    if type(theirs).__name__.endswith("MultipleChoice"):
        return theirs(**{key: tensor[None] for key, tensor in inputs.items()}).logits[0, :, None]
    outputs = theirs(**inputs)
    return outputs.logits if "logits" in outputs else torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)


@pytest.mark.parametrize("name", CLASSES)
def test_logits_equal_theirs(name: str, tmp_path: Path) -> None:
    theirs = make(getattr(transformers, name), 5, settings_of(name))
    back = there_and_back(theirs, torch.float64, tmp_path)
    if "id2label" in settings_of(name):
        assert back.config.id2label == LABELS
    # their ConvBERT's convolutions read padding
    inputs = batch([8, 8, 8] if "ConvBert" in name else [8, 1, 5], 8)
    model = bertsmith.load(tmp_path / "back")
    outputs = model.outputs(
        inputs["input_ids"], SequenceLayout.rows(*list(inputs.values())[:2]), inputs["token_type_ids"]
    )
    real = inputs["attention_mask"].bool() if outputs.dim() == 3 else ...
    for there in (theirs, back):
        torch.testing.assert_close(outputs[real], their_scores(there, inputs)[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["DebertaForSequenceClassification", *CLASSES[:3], "ElectraForMultipleChoice"])
def test_dropouts_survive_import_and_export(name: str, tmp_path: Path) -> None:
    """Includes DeBERTa's pooler, which belongs to the model if its dropout differs from the head's."""
    theirs = make(getattr(transformers, name), 6, settings_of(name) | DROPOUTS)
    model = ours(theirs, tmp_path / "theirs")
    assert model.task_head is not None
    head = model.config.heads[-1]
    assert head.dropout == (0.0 if head.kind == "spans" else 0.25)
    assert (head.kind == "classifier" and head.pooling == "pooler") == ("pooler" in model.heads)
    bertsmith.export(model, tmp_path / "back", native="always")
    again = type(theirs).from_pretrained(tmp_path / "back")
    rates = [[m.p for m in one.modules() if isinstance(m, torch.nn.Dropout)] for one in (theirs, again)]
    assert rates[0] == rates[1]
    assert 0.25 in rates[0]


def test_invalid_labels_raise(tmp_path: Path) -> None:
    theirs = make(transformers.BertForTokenClassification, 7, TINY | {"id2label": LABELS})
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"2": "perhaps"', '"7": "perhaps"'))
    with pytest.raises(InputError, match=r"^config\.json: id2label is .*; allowed: one name per index, from 0 on$"):
        bertsmith.load(tmp_path)
    path.write_text(path.read_text().replace('"BertForTokenClassification"', ""))
    with pytest.raises(InputError, match=r"the first is 'classifier\.bias'; skip them with ignore="):
        bertsmith.load(tmp_path)
