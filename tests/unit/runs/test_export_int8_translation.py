"""8-bit translation as commands: learning with rounding, export --to torch, evaluate and predict of the artefact."""

import json
from pathlib import Path

import pytest

import bertsmith
import bertsmith.runs.exchange
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.layers.quantised import Ranges

SMALL = ["model.overrides={width=32,layers=1,heads=2,neurons=64,max_length=64}", "tokenizer.vocabulary=300"]
SMALL += ["sequences.length=64", "sequences.micro_tokens=256", "batch.tokens=512", "run.log_every=1"]
SMALL += ["task.generation={method='greedy',extra_length=2}", "run.steps=3"]


@pytest.fixture(scope="module")
def model(pairs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int8") / "model"
    bertsmith.finetune("transformer-tiny", data=pairs_folder, out=out, set=SMALL, device="cpu")
    return out


@pytest.mark.parametrize(
    "flags",
    [
        ["--precision", "int8"],
        pytest.param(["--precision", "int8_weights"], marks=pytest.mark.slow),
        pytest.param(["--precision", "int8_static"], marks=pytest.mark.slow),
        pytest.param(["--precision", "int8_static", "--calibration", "kl"], marks=pytest.mark.slow),
    ],
)
def test_exported_translation_model(flags: list[str], model: Path, pairs_folder: Path, tmp_path: Path) -> None:
    data = ["--data", str(pairs_folder)] if "int8_static" in flags else []
    main(["export", str(model), "--to", "torch", *flags, *data, "--out", str(tmp_path / "int8")])
    result = json.loads((tmp_path / "int8" / "result.json").read_text())
    assert result["precision"] == flags[1]
    assert result["bytes"] < 0.5 * (model / "model.safetensors").stat().st_size
    assert isinstance(result["float_inputs"], list)
    evaluated = bertsmith.evaluate(tmp_path / "int8", data=pairs_folder, out=tmp_path / "dev", device="cpu")
    whole = bertsmith.evaluate(model, data=pairs_folder, out=tmp_path / "whole", device="cpu")
    assert evaluated["loss"] == pytest.approx(whole["loss"], rel=0.05)
    said = bertsmith.predict(tmp_path / "int8", text=["the smith"], out=tmp_path / "said", device="cpu")
    assert len(said["predictions"]) == 1


def test_learning_with_rounding(model: Path, pairs_folder: Path, tmp_path: Path) -> None:
    changes = [*SMALL[2:], "quantisation.weight_bits=8", "quantisation.calibration=2", "run.steps=2"]
    result = bertsmith.finetune(model, data=pairs_folder, out=tmp_path / "rounding", set=changes, device="cpu")
    trained = bertsmith.load(tmp_path / "rounding")
    assert trained.config.quantisation is not None
    ranges = [module for module in trained.modules() if isinstance(module, Ranges)]
    assert ranges
    assert all(bool(module.limits.any()) for module in ranges)
    found = bertsmith.evaluate(tmp_path / "rounding", data=pairs_folder, out=tmp_path / "dev", device="cpu")
    assert (found["score"], found["loss"]) == (result["score"], pytest.approx(result["loss"], rel=1e-5))
    # its own ranges: nothing is calibrated
    words = ["export", str(tmp_path / "rounding"), "--to", "torch", "--precision", "int8_static"]
    main([*words, "--out", str(tmp_path / "codes")])
    codes = bertsmith.evaluate(tmp_path / "codes", data=pairs_folder, out=tmp_path / "codes-dev", device="cpu")
    assert codes["loss"] == pytest.approx(found["loss"], rel=2e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "torch"}, "int8_weights"),
        ({"to": "torch", "precision": "int8_static"}, "needs --data"),
        ({"to": "torch", "precision": "int8", "calibration": "kl"}, "allowed with int8_static"),
        ({"to": "hf", "calibration": "kl"}, "allowed with --to torch"),
        ({"to": "torch", "precision": "int8", "head": "masked_tokens"}, "writes all heads"),
        ({"to": "onnx", "precision": "int8"}, "decoder"),
    ],
)
def test_refusals(options: dict[str, str], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        bertsmith.runs.exchange.export_model(model, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
