"""Fine-tuned Hugging Face folders are task models: task, labels and columns are found without task.json."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    ModernBertForMultipleChoice,
    ModernBertForQuestionAnswering,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    PreTrainedConfig,
)

import bertsmith
from bertsmith.errors import InputError
from bertsmith.runs.exchange import import_model
from bertsmith.serving.model import ServedModel
from bertsmith.shrinking.fit.search import prepare
from bertsmith.shrinking.fit.settings import FitSettings
from bertsmith.tasks.hf_task import hf_task_record
from bertsmith.text.tokenizer import Tokenizer

ROWS = [("the smith forges an iron gate", "pos"), ("rain falls on the river", "neg")] * 10
SIZE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def write_folder(kind: type, folder: Path, tokenizer: Path, **settings: Any) -> Path:
    """Write a folder of transformers with random weights."""
    torch.manual_seed(0)
    size = Tokenizer.load(tokenizer).size
    config: type[PreTrainedConfig] = kind.config_class
    no_ids = {f"{role}_token_id": 0 for role in ("pad", "bos", "eos", "cls", "sep")}  # theirs are of 50,000 tokens
    settings = settings if config is BertConfig else no_ids | settings
    kind(config(vocab_size=size, max_position_embeddings=40, **SIZE, **settings)).save_pretrained(folder)
    Tokenizer.load(tokenizer).save(folder)
    return folder


MODERN = {"classifier_pooling": "mean", "classifier_bias": True, "local_attention": 6}


@pytest.fixture(params=["bert", "modernbert"])
def classifier(request: pytest.FixtureRequest, corpus_folder: Path, tmp_path: Path) -> Path:
    classes = {"bert": (BertForSequenceClassification, {}), "modernbert": (ModernBertForSequenceClassification, MODERN)}
    kind, settings = classes[request.param]
    return write_folder(kind, tmp_path / "hf", corpus_folder, id2label={0: "NEG", 1: "POS"}, **settings)


@pytest.mark.parametrize(
    ("kind", "settings", "task"),
    [
        (BertForSequenceClassification, {}, {"kind": "classification", "labels": ["LABEL_0", "LABEL_1"]}),
        (BertForSequenceClassification, {"num_labels": 1}, {"kind": "regression"}),
        (
            BertForSequenceClassification,
            {"id2label": {0: "a", 1: "b"}, "problem_type": "multi_label_classification"},
            {"kind": "multi_label", "labels": ["a", "b"]},
        ),
        (BertForTokenClassification, {"id2label": {0: "O", 1: "B-X"}}, {"kind": "tagging", "labels": ["O", "B-X"]}),
        (BertForQuestionAnswering, {}, {"kind": "spans"}),
        (BertForMultipleChoice, {}, {"kind": "choice"}),
        (
            ModernBertForSequenceClassification,
            {"classifier_pooling": "mean", "classifier_bias": True},
            {"kind": "classification", "labels": ["LABEL_0", "LABEL_1"]},
        ),
        (ModernBertForSequenceClassification, {"num_labels": 1}, {"kind": "regression"}),
        (
            ModernBertForTokenClassification,
            {"id2label": {0: "O", 1: "B-X"}},
            {"kind": "tagging", "labels": ["O", "B-X"]},
        ),
        (ModernBertForQuestionAnswering, {}, {"kind": "spans"}),
        (ModernBertForMultipleChoice, {}, {"kind": "choice"}),
    ],
)
def test_task_follows_from_class_and_labels(
    kind: type, settings: dict, task: dict, corpus_folder: Path, tmp_path: Path
) -> None:
    folder = write_folder(kind, tmp_path / "hf", corpus_folder, **settings)
    assert hf_task_record(folder) == {"task": task, "sequences": {"length": 40}}
    predictor = bertsmith.Predictor.load(folder)
    assert predictor.task.kind == task["kind"]
    assert predictor.model.torch_model is not None
    predictor.model.torch_model.task_head  # noqa: B018 (raises if the model has no task head)


@pytest.mark.parametrize("name", ["architectures", "problem_type", "id2label", "num_labels", "max_position_embeddings"])
@pytest.mark.parametrize("value", [2, -1, 1 << 63, 1e308, "x", [], [[]], [2], {}, {"0": 1}, True])
def test_any_value_in_config_gives_a_task_or_an_error(name: str, value: object, tmp_path: Path) -> None:
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "a", "1": "b"},
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32, name: value}))
    with suppress(InputError):
        record = hf_task_record(tmp_path)
        assert record is None or record["task"]["kind"] in ("classification", "regression")


def test_encoders_have_no_task(corpus_folder: Path, tmp_path: Path) -> None:
    folder = write_folder(BertModel, tmp_path / "hf", corpus_folder)
    assert hf_task_record(folder) is None
    with pytest.raises(InputError, match="was not fine-tuned; use bertsmith finetune"):
        bertsmith.predict(folder, text="a text")


@pytest.mark.parametrize("labels", [("pos", "neg"), ("1", "0"), ("POS", "NEG")])
def test_labels_and_columns_of_the_data(classifier: Path, labels: tuple[str, str], tmp_path: Path) -> None:
    data, names = tmp_path / "data.csv", dict(zip(("pos", "neg"), labels, strict=True))
    data.write_text("review,label\n" + "".join(f"{text},{names[label]}\n" for text, label in ROWS))
    result = bertsmith.evaluate(classifier, data=str(data), column=["text=review"])
    predicted = bertsmith.predict(classifier, data=str(data), column=["text=review"]).predictions
    correct = sum(answer == names[label] for answer, (_, label) in zip(predicted, ROWS, strict=True))
    assert result.score == pytest.approx(100 * correct / len(ROWS))
    assert bertsmith.predict(classifier, text=ROWS[0][0]).predictions[0] in ("NEG", "POS")


def test_other_labels_raise(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("text,label\na gate,good\na river,bad\n")
    with pytest.raises(InputError, match="has the labels bad, good, but the model's labels are NEG, POS; rename the"):
        bertsmith.evaluate(classifier, data=str(tmp_path / "data.csv"))


def test_serve_import_and_export_keep_the_task(classifier: Path, tmp_path: Path) -> None:
    served = ServedModel.open(classifier, threads=1)
    assert served.task is not None
    assert served.task.kind == "classification"
    import_model(classifier, out=tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "task.json").read_text())["task"]["labels"] == ["NEG", "POS"]
    texts = [text for text, _ in ROWS]
    expected = bertsmith.Predictor.load(classifier).details(texts)
    assert bertsmith.Predictor.load(tmp_path / "ours").details(texts) == expected


def test_fit_and_shrink(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("text,label\n" + "".join(f"{a},{b}\n" for a, b in ROWS))
    plain = {"model": str(classifier), "data": str(tmp_path / "data"), "budget": {"latency_ms": 5}}
    assert prepare(FitSettings.parse(plain)).record.task.labels == ("neg", "pos")
    elastic = bertsmith.shrink(
        classifier, data=str(tmp_path / "data"), widths=[1.0, 0.5], depths=[1.0], epochs=1, out=tmp_path / "elastic"
    )
    assert bertsmith.Predictor.load(tmp_path / "elastic").task.labels == ("neg", "pos")
    assert len(elastic.grid) == 2
