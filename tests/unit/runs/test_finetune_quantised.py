"""Quantisation-aware fine-tuning as a command: the model loads with the same score and can be trained further."""

import json
from pathlib import Path

import pytest
from helpers_finetune import tune, write_task

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.layers.quantised import Ranges
from bertsmith.models.quantise import dequantised
from bertsmith.training.quantising import QuantisedLearning


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "plain"
    tune(data, out, "run.epochs=6", "optimizer.learning_rate=2e-2")
    return out


@pytest.fixture(scope="module")
def quantised(plain: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "quantised"
    arguments = ["finetune", str(plain), "--data", str(data), "--out", str(out), "--device", "cpu", "--epochs", "2"]
    changes = ["sequences.length=16", "batch.examples=16", "optimizer.learning_rate=1e-3"]
    changes += ["quantisation.weight_bits=4", "quantisation.calibration=2"]
    main([*arguments, *(word for change in changes for word in ("--set", change))])
    return out


def test_loaded_model_has_the_recorded_score(quantised: Path, data: Path, tmp_path: Path) -> None:
    recorded = json.loads((quantised / "result.json").read_text())
    model = bertsmith.load(quantised)
    assert model.config.quantisation is not None
    assert model.config.quantisation.weight_bits == 4
    found = bertsmith.evaluate(quantised, data=data, out=tmp_path / "dev", device="cpu")
    assert found["score"] == recorded["score"]
    answers = [json.loads(line) for line in (quantised / "dev.predictions.jsonl").read_text().splitlines()]
    assert len({json.dumps(answer["scores"]) for answer in answers}) > 1
    again = bertsmith.Predictor.load(quantised)
    rows = [json.loads(line) for line in (data / "dev.jsonl").read_text().splitlines()]
    assert [details["scores"] for details in again.details([row["text"] for row in rows])] == [
        answer["scores"] for answer in answers
    ]


def test_all_ranges_are_calibrated(quantised: Path) -> None:
    ranges = {name: part for name, part in bertsmith.load(quantised).named_modules() if isinstance(part, Ranges)}
    assert len(ranges) == 7  # query-key-value twice, output, two of the feed-forward, pooler, score
    assert all(bool((part.limits[0, :, -1] > 0).all()) for part in ranges.values())


def test_further_fine_tuning_keeps_the_ranges(quantised: Path, data: Path, tmp_path: Path) -> None:
    before = bertsmith.load(quantised)
    tune(data, tmp_path / "on", "run.epochs=0.1", "model.overrides={}", model=str(quantised))
    after = bertsmith.load(tmp_path / "on")
    assert after.config.quantisation == before.config.quantisation
    for one, other in zip(before.modules(), after.modules(), strict=True):
        if isinstance(one, Ranges) and isinstance(other, Ranges):
            assert (one.limits - other.limits).abs().max() < 1e-2 * one.limits.max()


def test_quantisation_changes_the_outputs(quantised: Path) -> None:
    model, texts = bertsmith.load(quantised), ["the lovely river"]
    assert not bool((model.encode(texts) == dequantised(model).encode(texts)).all())


def test_invalid_quantisation_raises(plain: Path, data: Path, tmp_path: Path) -> None:
    assert QuantisedLearning(weight_bits=3, calibration=2).network.weight_bits == 3
    with pytest.raises(InputError, match=r"quantisation\.weight_bits is 9"):
        tune(data, tmp_path / "no", "quantisation.weight_bits=9")
    with pytest.raises(InputError, match=r"quantisation.layer_bits lists 3 layers; allowed: all 1"):
        tune(data, tmp_path / "no", "quantisation.layer_bits=[4,4,4]")
