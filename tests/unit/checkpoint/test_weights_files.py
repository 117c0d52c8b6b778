"""Weights written in half precision: half the bytes, widened when they are read, refused where they do not fit."""

from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.checkpoint.files import read_tensors
from bertsmith.errors import InputError
from bertsmith.models.model import Model


@pytest.fixture
def model() -> Model:
    return bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=50, width=16, layers=1, heads=2), seed=0).eval()


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_half_precision_is_written_and_widened(model: Model, tmp_path: Path, precision: str) -> None:
    bertsmith.save(model, tmp_path / "model", precision=precision)
    dtype = getattr(torch, precision)
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "model/model.safetensors").values()} == {dtype}
    loaded = bertsmith.load(tmp_path / "model")
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.to(dtype).float())
        assert parameter.dtype == torch.float32


def test_weights_keep_their_precision_by_default(model: Model, tmp_path: Path) -> None:
    bertsmith.save(model.double(), tmp_path / "model")
    assert bertsmith.load(tmp_path / "model").token_table.dtype == torch.float64


def test_overflow_raises_and_writes_nothing(model: Model, tmp_path: Path) -> None:
    with torch.no_grad():
        model.encoder.blocks[0].feedforward_norm.weight[3] = -7e4
    with pytest.raises(InputError, match=r"'float16' and '.*feedforward_norm.weight' has values up to 70000, beyond"):
        bertsmith.save(model, tmp_path / "model", precision="float16")
    assert list(tmp_path.iterdir()) == []
    bertsmith.save(model, tmp_path / "model", precision="bfloat16")
    with pytest.raises(InputError, match="precision is 'float61'; did you mean 'float16'"):
        bertsmith.save(model, tmp_path / "other", precision="float61")  # type: ignore[arg-type]
