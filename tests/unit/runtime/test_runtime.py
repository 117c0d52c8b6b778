"""The runtime on exported folders without a task: vectors, masks, outputs, and error messages."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.runtime import load
from bertsmith.text.learn import learn_tokenizer

TEXTS = ["the smith forges an iron gate", "no", "", "seven old lanterns near the harbour " * 9]


@pytest.fixture(scope="module")
def model() -> Model:
    tokenizer = learn_tokenizer(TEXTS * 4, "wordpiece", 90, progress=False)
    sizes = {"vocabulary": tokenizer.size, "width": 32, "heads": 4, "layers": 1, "max_length": 32, "init_std": 0.3}
    model = bertsmith.build(bertsmith.preset("bert-tiny", **sizes), seed=0).eval()
    model.tokenizer = tokenizer
    return model


@pytest.fixture(scope="module")
def folders(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by the output head of their graph."""
    home = tmp_path_factory.mktemp("exported")
    for head in ("auto", "masked_tokens"):
        bertsmith.export(model, home / head, to="onnx", head=head)
    return {head: home / head for head in ("auto", "masked_tokens")}


def test_encode_equals_the_model(model: Model, folders: dict[str, Path]) -> None:
    for tokens in (1, 50, 2048):
        vectors = load(folders["auto"], threads=1, batch_tokens=tokens).encode(TEXTS)
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(vectors, model.encode(TEXTS).numpy(), rtol=0, atol=1e-5)
    assert load(folders["auto"]).encode([]).shape == (0, 32)
    assert load(folders["auto"]).encode("one string").shape == (32,)


def test_fill_mask_equals_the_model(model: Model, folders: dict[str, Path]) -> None:
    runtime, text = load(folders["masked_tokens"], threads=1), "the [MASK] forges [MASK] gate"
    for top in (1, 4):
        actual, expected = runtime.fill_mask(text, top_k=top), model.fill_mask(text, top_k=top)
        assert [[token for token, _ in mask] for mask in actual] == [[token for token, _ in mask] for mask in expected]
        probabilities = [[probability for _, probability in mask] for mask in actual]
        np.testing.assert_allclose(probabilities, [[share for _, share in mask] for mask in expected], rtol=1e-4)
    assert runtime.fill_mask([text, text]) == [runtime.fill_mask(text)] * 2
    with pytest.raises(InputError, match=r"the text 'no mask' has no \[MASK\] to fill"):
        runtime.fill_mask("no mask")


def test_outputs_are_independent_of_the_batch(model: Model, folders: dict[str, Path]) -> None:
    runtime = load(folders["auto"], threads=1, batch_tokens=12)
    sequences = [[5, 6, 7], [8], list(range(5, 25)), [9, 9]]
    for actual, sequence in zip(runtime.outputs(sequences), sequences, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([sequence]))[0]
        np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=1e-5)


def test_number_of_threads(folders: dict[str, Path]) -> None:
    options = load(folders["auto"], threads=2).graph.session.get_session_options()
    assert options.intra_op_num_threads == 2


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda model: model.predict(["a text"]), r"this folder has no task\.json, so it has no task to predict"),
        (lambda model: model.encode([3]), r"texts\[0\] is int; it must be a string"),
        (lambda model: model.fill_mask("a [MASK]"), "this graph does not fill masks; export the model with --head mas"),
        (lambda model: model.outputs([[5], []]), "sequence 1 is not a non-empty list of token ids"),
        (lambda model: model.outputs([[0.5]]), "sequence 0 is not a non-empty list of token ids"),
        (lambda model: model.outputs([[5, 10**6]]), "sequence 0 has a token id outside the vocabulary: 0 to"),
        (lambda model: model.outputs([[5]], [[0, 0]]), "sequence 0 has 1 tokens and 2 types"),
        (lambda model: model.outputs([[5]], [[2]]), "sequence 0 has a type outside 0 to 1"),
        (lambda model: model.outputs([[5], [6]], [[0]]), "types has 1 rows for 2 sequences"),
    ],
)
def test_bad_input_raises(folders: dict[str, Path], call: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        call(load(folders["auto"], threads=1))


def unsealed(folder: Path, copy: Path) -> Path:
    """Copy a folder without its checksums, as a file that never had any."""
    shutil.copytree(folder, copy)
    (copy / "seal.json").unlink()
    return copy


def test_unreadable_folders_raise(folders: dict[str, Path], model: Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; give a folder that bertsmith export --to onnx wrote"):
        load(tmp_path / "nowhere")
    bertsmith.save(model, tmp_path / "model")
    with pytest.raises(InputError, match=r"has no onnx\.json; give a folder"):
        load(tmp_path / "model")
    with pytest.raises(InputError, match="threads is 0; allowed: 1 or more, or None"):
        load(folders["auto"], threads=0)
    with pytest.raises(InputError, match="batch_tokens is 0; allowed: 1 or more"):
        load(folders["auto"], batch_tokens=0)
    broken = unsealed(folders["auto"], tmp_path / "broken")
    metadata = json.loads((broken / "onnx.json").read_text())
    (broken / "onnx.json").write_text(json.dumps({name: metadata[name] for name in metadata if name != "max_length"}))
    with pytest.raises(InputError, match=r"onnx\.json' has no max_length; export the model again"):
        load(broken)
    (broken / "onnx.json").write_text("{")
    with pytest.raises(InputError, match=r"onnx\.json' is not valid JSON"):
        load(broken)
    (broken / "onnx.json").write_text(json.dumps(metadata))
    (broken / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(InputError, match="is not an ONNX file that this ONNX Runtime reads"):
        load(broken)
    (broken / "model.onnx").unlink()
    with pytest.raises(InputError, match=r"model\.onnx' does not exist"):
        load(broken)


def test_missing_tokenizer_raises(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["auto"], tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"this ONNX folder has no tokenizer\.json"):
        load(folder).encode(["a text"])


def test_incomplete_task_raises(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = unsealed(folders["auto"], tmp_path / "task")
    for task, sentence in {
        '{"task": {"kind": "classificaton"}}': "task.kind is 'classificaton'; did you mean 'classification'",
        '{"task": 3}': r"task\.json has no task; export",
        '{"task": {}}': r"task\.json has no task\.kind",
    }.items():
        (folder / "task.json").write_text(task)
        with pytest.raises(InputError, match=sentence):
            load(folder)
    (folder / "task.json").write_text(
        '{"task": {"kind": "classification", "text": "text", "pair": null, "labels": ["a", "b"]}, "sequences": 3}'
    )
    with pytest.raises(InputError, match=r"task\.json has no sequences\.length"):
        load(folder).predict(["a text"])
    (folder / "task.json").write_text(
        '{"task": {"kind": "classification", "text": "text", "pair": null}, "sequences": {"length": 16}}'
    )
    with pytest.raises(InputError, match=r"task\.json has no task\.labels"):
        load(folder).predict(["a text"])
