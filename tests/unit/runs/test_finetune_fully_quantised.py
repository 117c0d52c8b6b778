"""Training that rounds all tensors, as a command: recorded score, resumed runs, refused layouts and exports."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_finetune import SMALL, tune, write_task

import bertsmith
from bertsmith.checkpoint.files import read_tensors
from bertsmith.errors import InputError
from bertsmith.layers.quantised import Ranges
from bertsmith.runs.exchange import export_model
from bertsmith.training.trainer import Trainer

ALL = ['quantisation={places="all",form="affine",clamps_gradient=true,weight_ranges="row",decay=0.9,calibration=2}']
PAIRS = ["sequences.length=64", "sequences.micro_tokens=256", "batch.tokens=512", "run.steps=2", "run.log_every=1"]
PAIRS += ["model.overrides={width=32,layers=1,heads=2,neurons=64,max_length=64}", "tokenizer.vocabulary=300"]
PAIRS += ["task.generation={method='greedy',extra_length=2}"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    tune(data, out, *ALL)
    return out


def test_loaded_model_has_the_recorded_score(run: Path, data: Path, tmp_path: Path) -> None:
    found = bertsmith.evaluate(run, data=data, out=tmp_path / "dev", device="cpu")
    assert found["score"] == json.loads((run / "result.json").read_text())["score"]
    ranges = [part for part in bertsmith.load(run).modules() if isinstance(part, Ranges)]
    assert ranges
    assert all(part.lows is not None and bool((part.limits > part.lows).any()) for part in ranges)


def test_resumed_run_equals_uninterrupted_run(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trainer._step

    def until(self: Trainer, *arguments: Any) -> None:
        if self.progress.step == 5:
            raise KeyboardInterrupt
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", until)
        with pytest.raises(KeyboardInterrupt):
            tune(data, tmp_path / "cut", *ALL)
    bertsmith.finetune(out=tmp_path / "cut", resume=True, device="cpu")
    straight, resumed = (read_tensors(folder / "model.safetensors") for folder in (run, tmp_path / "cut"))
    assert straight.keys() == resumed.keys()
    for name, tensor in straight.items():
        assert tensor.equal(resumed[name]), name


def test_translation_model_is_trained_and_decoded(pairs_folder: Path, tmp_path: Path) -> None:
    trained = bertsmith.finetune(
        "transformer-tiny", data=pairs_folder, out=tmp_path / "run", set=[*PAIRS, *ALL], device="cpu"
    )
    found = bertsmith.evaluate(tmp_path / "run", data=pairs_folder, out=tmp_path / "dev", device="cpu")
    assert (found["score"], found["loss"]) == (trained["score"], pytest.approx(trained["loss"], rel=1e-5))


def test_padded_batches_and_exports_are_refused(run: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the batch is padded, and padding would widen the ranges"):
        tune(data, tmp_path / "no", *ALL, "sequences.layout=padded")
    with pytest.raises(InputError, match=r"rounds all tensors \(quantisation\.places = 'all'\), which ONNX export"):
        bertsmith.export(bertsmith.load(run), tmp_path / "onnx", to="onnx")
    with pytest.raises(InputError, match="whose codes are symmetric"):
        export_model(run, to="torch", precision="int8", out=tmp_path / "int8")
    with pytest.raises(InputError, match=r"places is 'all' and form is 'symmetric'"):
        tune(data, tmp_path / "no", "quantisation.places=all")


def test_network_without_support_raises(data: Path, tmp_path: Path) -> None:
    small = [change for change in SMALL if not change.startswith("model")]
    overrides = "model.overrides={width=16,layers=1,heads=2,max_length=32,features=8}"
    with pytest.raises(InputError, match=r"encoder\.layers\.0 has a mixer of kind 'favor'"):
        bertsmith.finetune(
            "performer-small", data=data, out=tmp_path / "no", set=[*small, overrides, *ALL], device="cpu"
        )
