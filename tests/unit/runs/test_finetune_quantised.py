"""Fine-tuning with rounding as a command: what it leaves loads with the same score, and can go on."""

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
def rounding(plain: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "rounding"
    words = ["finetune", str(plain), "--data", str(data), "--out", str(out), "--device", "cpu", "--epochs", "2"]
    changes = ["sequences.length=16", "batch.examples=16", "optimizer.learning_rate=1e-3"]
    changes += ["quantisation.weight_bits=4", "quantisation.calibration=2"]
    main([*words, *(word for change in changes for word in ("--set", change))])
    return out


def test_the_folder_gives_the_recorded_score(rounding: Path, data: Path, tmp_path: Path) -> None:
    recorded = json.loads((rounding / "result.json").read_text())
    model = bertsmith.load(rounding)
    assert model.config.quantisation is not None
    assert model.config.quantisation.weight_bits == 4
    found = bertsmith.evaluate(rounding, data=data, out=tmp_path / "dev", device="cpu")
    assert found["score"] == recorded["score"]
    answers = [json.loads(line) for line in (rounding / "dev.predictions.jsonl").read_text().splitlines()]
    assert len({json.dumps(answer["scores"]) for answer in answers}) > 1
    again = bertsmith.Predictor.load(rounding)
    rows = [json.loads(line) for line in (data / "dev.jsonl").read_text().splitlines()]
    assert [details["scores"] for details in again.details([row["text"] for row in rows])] == [
        answer["scores"] for answer in answers
    ]


def test_every_part_has_measured_its_ranges(rounding: Path) -> None:
    ranges = {name: part for name, part in bertsmith.load(rounding).named_modules() if isinstance(part, Ranges)}
    assert len(ranges) == 7  # query-key-value twice, output, two of the feed-forward, pooler, score
    assert all(bool((part.limits[0, :, -1] > 0).all()) for part in ranges.values())


def test_a_run_that_goes_on_keeps_the_ranges(rounding: Path, data: Path, tmp_path: Path) -> None:
    before = bertsmith.load(rounding)
    tune(data, tmp_path / "on", "run.epochs=0.1", "model.overrides={}", model=str(rounding))
    after = bertsmith.load(tmp_path / "on")
    assert after.config.quantisation == before.config.quantisation
    for one, other in zip(before.modules(), after.modules(), strict=True):
        if isinstance(one, Ranges) and isinstance(other, Ranges):
            assert (one.limits - other.limits).abs().max() < 1e-2 * one.limits.max()


def test_the_rounded_model_is_another_one(rounding: Path) -> None:
    model, texts = bertsmith.load(rounding), ["the lovely river"]
    assert not bool((model.encode(texts) == dequantised(model).encode(texts)).all())


def test_what_belongs_to_the_network_and_what_cannot_be(plain: Path, data: Path, tmp_path: Path) -> None:
    assert QuantisedLearning(weight_bits=3, calibration=2).network.weight_bits == 3
    with pytest.raises(InputError, match=r"quantisation\.weight_bits is 9"):
        tune(data, tmp_path / "no", "quantisation.weight_bits=9")
    with pytest.raises(InputError, match=r"quantisation.layer_bits lists 3 layers; allowed: all 1"):
        tune(data, tmp_path / "no", "quantisation.layer_bits=[4,4,4]")
