"""Sharded training on one GPU, with the parts that a CPU does not have: NCCL, bfloat16, fused AdamW."""

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
CONFIG = Path(__file__).parents[2] / "configs" / "accelerate" / "one-machine-fsdp2.yaml"


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_fsdp_on_one_gpu_equals_plain_training(compiled: str, corpus_folder: Path, tmp_path: Path) -> None:
    from helpers_training import RECIPE, command, run

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("dropout = 0.1", "dropout = 0.0").replace("layers = 2", "layers = 12"))
    words = command(recipe, corpus_folder, tmp_path / "plain", "--set", f"run.compile={compiled}")
    words = ["cuda" if word == "cpu" else word for word in words]
    run(words)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG), "--num_processes", "1"]
    stderr = run([*launch, *[word.replace("/plain", "/sharded") for word in words[1:]]]).stderr
    assert "recompile_limit" not in stderr
    plain, sharded = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("plain", "sharded"))
    assert sharded["training_loss"] == pytest.approx(plain["training_loss"], rel=0.01)
    assert sharded["held_out"]["loss"] == pytest.approx(plain["held_out"]["loss"], rel=0.01)
