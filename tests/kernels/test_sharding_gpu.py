"""Sharded weights on a GPU: one process is enough to meet what a CPU does not have (NCCL, bfloat16, a fused AdamW)."""

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
CONFIG = Path(__file__).parents[2] / "configs" / "accelerate" / "one-machine-fsdp2.yaml"


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_share_of_everything_is_everything(compiled: str, corpus_folder: Path, tmp_path: Path) -> None:
    from helpers_training import RECIPE, command, losses, run

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("dropout = 0.1", "dropout = 0.0").replace("layers = 2", "layers = 12"))
    words = command(recipe, corpus_folder, tmp_path / "plain", "--set", f"run.compile={compiled}")
    words = ["cuda" if word == "cpu" else word for word in words]
    run(words)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG), "--num_processes", "1"]
    said = run([*launch, *[word.replace("/plain", "/sharded") for word in words[1:]]]).stderr
    assert "recompile_limit" not in said
    assert json.loads((tmp_path / "sharded" / "result.json").read_text())["is_finished"]
    for (_, step, loss), (_, _, expected) in zip(losses(tmp_path / "sharded"), losses(tmp_path / "plain"), strict=True):
        assert loss == pytest.approx(expected, rel=0.01), step
