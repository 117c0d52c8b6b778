"""Pruning with L0 gates in two processes gives the same model as in one."""

import sys
from pathlib import Path

import pytest
from helpers_finetuning import RECIPE, write_task
from helpers_training import run

import bertsmith
from bertsmith.checkpoint.files import read_tensors

CONFIG = Path(__file__).parents[2] / "configs" / "accelerate" / "cpu-two-processes.yaml"
SETTINGS = ["prune.by=l0", "run.epochs=1.0", "batch.examples=8", "batch.micro_examples=4", "run.log_every=1"]


@pytest.mark.slow
def test_pruning_in_two_processes_equals_one(tmp_path: Path) -> None:
    data, recipe = write_task(tmp_path / "data"), tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    bertsmith.finetune(recipe=recipe, data=data, out=tmp_path / "model", epochs=1, device="cpu")
    bertsmith.shrink(
        tmp_path / "model", data=str(data), out=tmp_path / "one", method="prune", set=SETTINGS, device="cpu"
    )
    arguments = [
        "shrink",
        str(tmp_path / "model"),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "two"),
        "--device",
        "cpu",
    ]
    arguments += ["--method", "prune", *(word for setting in SETTINGS for word in ("--set", setting))]
    run(
        [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(CONFIG),
            "-m",
            "bertsmith",
            *arguments,
        ]
    )
    one, two = (read_tensors(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert weight.shape == two[name].shape
        assert (weight - two[name]).abs().max() == pytest.approx(0, abs=1e-5), name
