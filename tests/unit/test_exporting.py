"""The model card of an exported folder: metadata for the hub, and its text."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import bertsmith
from bertsmith.exporting import write_card
from bertsmith.models.model import Model

METADATA = {
    "head": None,
    "max_length": 16,
    "opset": 20,
    "precision": "int8",
    "largest_difference": 0.0123,
    "largest_absolute_difference": 0.0456,
    "largest_output": 3.7,
    "compared_on": "English messages",
    "compared_sequences": 12,
    "compared_lengths": [1, 16],
    "weights_have_7_bits": True,
}
RESULT = {"metric": "accuracy", "score": 91.25, "interval": [90.0, 92.5]}


@pytest.fixture(scope="module")
def model() -> Model:
    return bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=50, width=16, heads=2, layers=2, max_length=16))


def card(
    model: Model,
    folder: Path,
    *,
    metadata: dict[str, Any] | None = None,
    task: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> ModelCard:
    """Write the card of a folder with these files and load it."""
    for name, content in {"onnx.json": metadata, "task.json": task and {"task": task}, "config.json": config}.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    write_card(folder, model, "mine", **options)
    return ModelCard.load(folder / "README.md")


@pytest.mark.parametrize(
    ("task", "pipeline", "line"),
    [
        ({"kind": "classification"}, "text-classification", 'model.predict(["a text"])'),
        ({"kind": "multi_label"}, "text-classification", 'model.predict(["a text"])'),
        ({"kind": "regression", "pair": "b"}, "text-classification", 'model.predict([("a text", "another one")])'),
        ({"kind": "tagging"}, "token-classification", 'model.predict(["a text"])'),
        ({"kind": "spans"}, "question-answering", 'model.predict([("who forged it?", "Anna forged the gate.")])'),
        ({"kind": "embedding", "pair": "b"}, "sentence-similarity", 'model.predict(["a text"])'),
        (
            {"kind": "choice", "context": None, "question": "q", "start": None},
            "multiple-choice",
            "model.predict([('a text', ['one choice', 'another'])])",
        ),
    ],
)
def test_metadata_and_code_of_each_task(
    model: Model, tmp_path: Path, task: dict[str, Any], pipeline: str, line: str
) -> None:
    found = card(model, tmp_path, metadata={**METADATA, "head": "classifier"}, task=task)
    assert found.data.to_dict() == {
        "library_name": "onnx",
        "pipeline_tag": pipeline,
        "tags": ["bertsmith", "bert", "onnx"],
    }
    assert f'model = load("mine")\n{line}\n```' in found.text
    assert f"| task | {task['kind']} |" in found.text


@pytest.mark.parametrize(
    ("head", "pipeline", "line"),
    [
        (None, "feature-extraction", 'model.encode(["a text", "another one"])'),
        ("masked_tokens", "fill-mask", 'model.fill_mask("a [MASK] day")'),
        ("tagger", "token-classification", "model.outputs([[1, 2, 3]])  # token ids"),
    ],
)
def test_graph_without_a_task(model: Model, tmp_path: Path, head: str | None, pipeline: str, line: str) -> None:
    found = card(model, tmp_path, metadata={**METADATA, "head": head})
    assert found.data.pipeline_tag == pipeline
    assert line in found.text


def test_differences_and_sizes(model: Model, tmp_path: Path) -> None:
    text = card(model, tmp_path, metadata=METADATA).text
    assert "Precision int8 (weights of 7 bits, for x86 without VNNI), ONNX opset 20." in text
    assert "on 12 sequences of 1 to 16 tokens (English messages)" in text
    assert "the largest difference of an output is 4.6e-02, at most 1.2e-02 of the largest output" in text
    assert "| layers | 2 of width 16 |" in text
    assert f"| parameters | {sum(weight.numel() for weight in model.parameters()):,} |" in text
    assert "| maximum length | 16 tokens |" in text
    assert "score" not in text
    assert "No licence is stated. If you publish this folder, add `license:`" in text


def test_score_of_the_exported_network(model: Model, tmp_path: Path) -> None:
    def score(**options: Any) -> str | None:
        lines = card(model, tmp_path, metadata=METADATA, **options).text.splitlines()
        return next((line for line in lines if line.startswith("| score")), None)

    whole = "| score | accuracy 91.25 on dev (95 % confidence interval 90.0 to 92.5), before the export |"
    assert score(result=RESULT) == whole
    cut = score(result=RESULT, subnet={"width": 0.5, "depth": 1.0})
    assert cut is not None
    assert "for the whole network before it was cut" in cut
    # the score of an elastic model's folder is the mean over its sub-networks
    grid = [{"width": width, "depth": 1.0, "score": 80 + width} for width in (0.5, 1.0)]
    elastic = {**RESULT, "grid": grid}
    assert score(result=elastic) == "| score | accuracy 81.00 on dev, before the export |"
    half = score(result=elastic, subnet={"width": 0.5, "depth": 1.0})
    assert half == "| score | accuracy 80.50 on dev, before the export |"
    assert score(result=elastic, subnet={"width": 0.75, "depth": 1.0}) is None
    assert score(result={"loss": 2.5}) is None


def test_labels_are_escaped(model: Model, tmp_path: Path) -> None:
    labels = ["yes|no", "two\nlines", *(str(index) for index in range(40))]
    text = card(model, tmp_path, metadata=METADATA, task={"kind": "classification", "labels": labels}).text
    (row,) = [line for line in text.splitlines() if line.startswith("| labels")]
    assert row.startswith('| labels | "yes\\|no", "two\\nlines", "0"')
    assert row.endswith("and 22 more in task.json |")


def test_hugging_face_folders(model: Model, tmp_path: Path) -> None:
    native = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    found = card(model, tmp_path, config=native, remark="it fills masks differently")
    assert found.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["bertsmith", "bert", "transformers"],
    }
    assert "which transformers opens without Bertsmith.\n\nIt fills masks differently.\n" in found.text
    assert 'AutoModelForMaskedLM.from_pretrained("mine")' in found.text
    ours = {"architectures": ["BertsmithModel"], "model_type": "bertsmith"}
    found = card(model, tmp_path, config=ours)
    assert found.data.library_name == "bertsmith"
    assert "opens with trust_remote_code=True, or after `import bertsmith.hf`" in found.text
    assert "import bertsmith.hf" in found.text


def test_export_writes_a_card(model: Model, tmp_path: Path) -> None:
    bertsmith.export(model, tmp_path / "hf")
    assert ModelCard.load(tmp_path / "hf" / "README.md").data.library_name == "transformers"
    bertsmith.export(model, tmp_path / "hf", force=True)  # a folder with a card counts as a model folder
