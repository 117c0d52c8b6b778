"""The ONNX Runtime engine: files, outputs, scores and error messages."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.cli import main
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines import onnx_engine
from bertsmith.engines.artefact import ENGINES, open_runner, write_artefact
from bertsmith.engines.base import Artefact
from bertsmith.errors import InputError
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.heads.base import RecurrentConfig
from bertsmith.models.heads.task import TaggerConfig
from bertsmith.models.model import Model
from bertsmith.tasks.predictor import Predictor, TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.rows import Table
from bertsmith.text.tables import read_file

ENGINE = ENGINES["onnxruntime"]
WORDS = ["good", "bad", "fine", "awful", "words", "day"]
PRECISIONS = {"float32": 1e-4, "float16": 2e-2, "int8": 0.3, "int8_static": 0.3}
"""Maximum difference from the model, relative to the largest output."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tagging rows of various lengths."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, count in {"train": 24, "dev": 12}.items():
        rows = [[WORDS[i] for i in random.integers(len(WORDS), size=random.integers(1, 9))] for _ in range(count)]
        lines = [json.dumps({"tokens": row, "tags": ["A" if word < "c" else "O" for word in row]}) for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with a tagging head and a task record, like a fine-tuned one."""
    folder = tmp_path_factory.mktemp("models") / "trained"
    tokenizer = learn_tokenizer([" ".join(WORDS)] * 4, "wordpiece", 80, progress=False)
    sizes = {"vocabulary": tokenizer.size, "width": 32, "heads": 4, "layers": 1, "max_length": 32, "init_std": 0.2}
    model = bertsmith.build(bertsmith.preset("bert-tiny", **sizes), seed=0)
    model.tokenizer = tokenizer
    task_record = TaskRecord.parse(
        {"task": {"kind": "tagging", "labels": ["A", "O"], "tags": "tags"}, "sequences": {"length": 16}}
    )
    model = with_task_head(model, task_record.task.head(model.config), seed=0)
    bertsmith.save(model, folder)
    write_task_record(task_record, folder)
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported folders of the half-width sub-network, by precision."""
    folders = {}
    for precision in PRECISIONS:
        folders[precision] = tmp_path_factory.mktemp("exported") / precision
        flags = ["--precision", precision, *(["--data", str(data)] if precision == "int8_static" else [])]
        main(["export", str(trained), "--to", "onnx", "--width", "0.5", *flags, "--out", str(folders[precision])])
    return folders


@pytest.fixture(scope="module")
def cut(trained: Path) -> Model:
    return bertsmith.load(trained, subnet=bertsmith.Subnet(width=0.5))


@pytest.fixture(scope="module")
def dev(data: Path) -> Table:
    return read_file(data / "dev.jsonl")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_onnx_json_describes_the_graph(precision: str, exported: dict[str, Path]) -> None:
    folder = exported[precision]
    names = {path.name for path in folder.iterdir()} - {".bertsmith"}
    files = {"artefact.json", "config.json", "model.onnx", "onnx.json", "result.json", "task.json", "tokenizer.json"}
    assert names - {"tokenizer_config.json"} == files | {"README.md", "seal.json"}
    assert json.loads((folder / "artefact.json").read_text()) == {"engine": "onnxruntime", "precision": precision}
    metadata, result = (json.loads((folder / name).read_text()) for name in ("onnx.json", "result.json"))
    assert metadata["opset"] == 20
    assert 0 < metadata["largest_difference"] <= PRECISIONS[precision]
    assert result["largest_difference"] == metadata["largest_difference"]
    assert 0 < metadata["largest_absolute_difference"] <= PRECISIONS[precision] * max(1, metadata["largest_output"])
    assert metadata["compared_lengths"] == [1, 32]
    is_sampled = precision == "int8_static"
    assert metadata["compared_on"] == "English messages" + " and rows of the task's data" * is_sampled
    card = (folder / "README.md").read_text()
    assert f"{metadata['largest_absolute_difference']:.1e}, at most {metadata['largest_difference']:.1e} of" in card
    assert f"Precision {precision}" in card
    assert "opset 20" in card
    assert result["bytes"] == (folder / "model.onnx").stat().st_size


def test_int8_files_are_smaller(exported: dict[str, Path]) -> None:
    size = {precision: (folder / "model.onnx").stat().st_size for precision, folder in exported.items()}
    assert size["int8"] < size["float32"]
    assert size["int8_static"] < size["float32"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scores_of_a_moved_folder_are_equal(
    precision: str, exported: dict[str, Path], dev: Table, tmp_path: Path
) -> None:
    evaluation, answers = Predictor.load(exported[precision]).evaluate(dev)
    moved = shutil.copytree(exported[precision], tmp_path / "elsewhere")
    again, answers_again = Predictor.load(moved).evaluate(dev)
    assert evaluation.metrics == again.metrics
    assert answers == answers_again


def test_evaluate_gives_the_score_of_the_model(
    exported: dict[str, Path], cut: Model, trained: Path, data: Path, dev: Table, tmp_path: Path
) -> None:
    expected, _ = Predictor(cut, Predictor.load(trained).record).evaluate(dev)
    metrics = bertsmith.evaluate(exported["float32"], data=str(data), out=tmp_path / "out", device="cpu")
    assert metrics["score"] == expected.score


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_batches(precision: str, exported: dict[str, Path], cut: Model) -> None:
    runner = open_runner(exported[precision], threads=1)
    starts = torch.tensor([0, 3, 4, 11, 11]).int()  # the last sequence is empty
    layout = SequenceLayout.packed(starts, 9)
    tokens, types = torch.randint(5, 20, (11,)), torch.randint(0, 2, (11,))
    with torch.no_grad(), runner.evaluating():
        expected, actual = cut.outputs(tokens, layout, types), runner.outputs(tokens, layout, types)
    assert actual.shape == expected.shape == (11, 2)
    assert (actual - expected).abs().max() <= PRECISIONS[precision] * expected.abs().max()


def test_rows_without_padding_and_types(exported: dict[str, Path], cut: Model) -> None:
    runner, tokens = open_runner(exported["float32"]), torch.randint(5, 20, (2, 5))
    layout = SequenceLayout.full(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(runner.outputs(tokens, layout), cut.outputs(tokens, layout), rtol=0, atol=1e-4)


def test_number_of_threads(exported: dict[str, Path]) -> None:
    for threads in (1, 2):
        runner: Any = ENGINE.open(exported["float32"], "float32", threads=threads)
        assert runner.session.get_session_options().intra_op_num_threads == threads


def test_overlong_sequence_raises(exported: dict[str, Path]) -> None:
    runner = open_runner(exported["float32"])
    with pytest.raises(InputError, match="the sequences have up to 33 tokens; this model takes at most 32"):
        runner.outputs(torch.ones(1, 33, dtype=torch.long), SequenceLayout.full(1, 33))


def test_errors_leave_no_files(cut: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InputError, match="precision is 'bfloat16' with the engine onnxruntime; allowed: float32, float16, int8"
    ):
        write_artefact(cut, tmp_path, Artefact(engine="onnxruntime", precision="bfloat16"))
    with pytest.raises(InputError, match="precision is 'int8_static', which needs samples"):
        write_artefact(cut, tmp_path, Artefact(engine="onnxruntime", precision="int8_static"))
    recurrent = cut.config.changed(heads=(TaggerConfig(labels=("A",), recurrent=RecurrentConfig(width=8)),))
    with pytest.raises(InputError, match="this model's head has a BiLSTM"):
        write_artefact(bertsmith.build(recurrent), tmp_path, Artefact(engine="onnxruntime"))
    translator = bertsmith.build(bertsmith.preset("transformer-tiny", vocabulary=30, width=16, heads=2, layers=1))
    with pytest.raises(InputError, match="this model has a decoder"):
        write_artefact(translator, tmp_path, Artefact(engine="onnxruntime"))
    monkeypatch.setattr(onnx_engine, "find_spec", lambda package: None if package == "onnxscript" else "there")
    with pytest.raises(InputError, match=r"needs onnxscript: pip install 'bertsmith\[onnx\]'"):
        write_artefact(cut, tmp_path, Artefact(engine="onnxruntime"))
    assert list(tmp_path.iterdir()) == []


def test_graph_that_differs_from_its_model_raises(cut: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(onnx_engine.TOLERANCES, "float32", 0.0)
    with pytest.raises(
        InputError, match=r"differs from the model by \d\.\de-\d\d \(largest output: .* allowed: up to 0e\+00"
    ):
        bertsmith.export(cut, tmp_path / "onnx", to="onnx")
    assert list(tmp_path.iterdir()) == []


def test_unreadable_folders_raise(exported: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(exported["float32"], tmp_path / "broken")
    (folder / "seal.json").unlink()
    (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes()[:1000])
    with pytest.raises(InputError, match="is not an ONNX file that this ONNX Runtime reads"):
        open_runner(folder)
    (folder / "model.onnx").unlink()
    with pytest.raises(InputError, match=r"model\.onnx' does not exist"):
        open_runner(folder)
    monkeypatch.setattr(onnx_engine, "find_spec", lambda package: None)
    with pytest.raises(InputError, match=r"needs the engine onnxruntime, which needs onnxruntime: pip install"):
        open_runner(folder)


def test_incompatible_flags_raise(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match="precision is 'int8' with to = 'hf'"):
        bertsmith.export(bertsmith.load(trained), out, precision="int8")
    with pytest.raises(InputError, match="to is 'onx'; did you mean 'onnx'"):
        bertsmith.export(bertsmith.load(trained), out, to="onx")
    from bertsmith.runs.exchange import export_model

    with pytest.raises(InputError, match="--precision int8_static needs --data"):
        export_model(trained, out=out, to="onnx", precision="int8_static")
    with pytest.raises(InputError, match="--data is 'x', but --to hf uses no data"):
        export_model(trained, out=out, data="x")
    with pytest.raises(InputError, match="head is 'masked_tokens' with to = 'hf'"):
        export_model(trained, out=out, head="masked_tokens")
    with pytest.raises(
        InputError, match=r"head is 'masked_tokens', which this model does not have \(its heads: tagger\)"
    ):
        export_model(trained, out=out, to="onnx", head="masked_tokens")
    assert not out.exists()


def test_artefacts_are_not_exported_again(exported: dict[str, Path], trained: Path, tmp_path: Path) -> None:
    from bertsmith.runs.exchange import export_model

    with pytest.raises(
        InputError, match=r"is already an ONNX folder \(int8\), which bertsmith\.runtime\.load and bertsmith pre"
    ):
        export_model(exported["int8"], out=tmp_path / "out", to="onnx")
    codes, model = tmp_path / "codes", bertsmith.load(trained)
    codes.mkdir()
    write_artefact(model, codes, Artefact(engine="torch", precision="int8"))
    with pytest.raises(InputError, match="contains int8 weights for PyTorch, which cannot be exported"):
        export_model(codes, out=tmp_path / "out", to="onnx")
    assert not (tmp_path / "out").exists()
    plain = tmp_path / "plain"
    plain.mkdir()
    write_artefact(model, plain, Artefact(engine="torch", precision="float32"))
    with pytest.raises(InputError, match="head is 'masked_tokens', which this model does not have"):
        export_model(plain, out=tmp_path / "out", to="onnx", head="masked_tokens")


def test_public_export_is_a_function() -> None:
    import bertsmith.engines.artefact

    assert callable(bertsmith.export)
