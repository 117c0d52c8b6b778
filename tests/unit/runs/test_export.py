"""`bertsmith export --width --depth` writes the sub-network that was trained."""

from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.errors import InputError
from bertsmith.runs.exchange import export_model
from bertsmith.shrinking.elastic_metadata import ElasticMetadata, write_elastic_metadata


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = bertsmith.preset("bert-tiny", vocabulary=40, width=16, heads=2, layers=4, max_length=16)
    bertsmith.save(bertsmith.build(config, seed=0), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("rule", [None, "keep_last", "drop_last"])
def test_depth_keeps_the_trained_layers(folder: Path, tmp_path: Path, rule: str | None) -> None:
    if rule is not None:
        write_elastic_metadata(record_with(rule), folder)
    export_model(folder, out=tmp_path / "half", depth=0.5)
    model, half = bertsmith.load(folder), bertsmith.load(tmp_path / "half")
    first = 0 if rule == "drop_last" else 1
    for index in (0, 1):
        written = half.state_dict()[f"encoder.blocks.{index}.mixer.output.weight"]
        assert torch.equal(written, model.state_dict()[f"encoder.blocks.{first + 2 * index}.mixer.output.weight"])


@pytest.mark.parametrize("shares", [{"width": 0.0}, {"depth": 1.5}])
def test_invalid_share_raises(folder: Path, tmp_path: Path, shares: dict[str, float]) -> None:
    ((name, value),) = shares.items()
    with pytest.raises(InputError, match=f"the sub-network: {name} is {value}: input should be"):
        export_model(folder, out=tmp_path / "small", **shares)
    assert not (tmp_path / "small").exists()


def record_with(rule: str) -> ElasticMetadata:
    metrics = {"metric": "accuracy", "teacher_score": 50.0, "length": 8, "depth_rule": rule}
    return ElasticMetadata.parse({**metrics, "grid": [], "head_scores": [], "head_order": [], "neuron_order": []})
