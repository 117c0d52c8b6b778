"""A small part of the fault trial; `make chaos` runs all of it."""

import os
import subprocess
import sys
from pathlib import Path

COMMANDS = ["tokenizer", "predict"]
READERS = ["model", "model without seal", "task.json", "ONNX folder without seal", "unfinished corpus", "recipe.toml"]


def test_small_trial_finds_no_fault() -> None:
    """In a process of its own, because the trial forks: threads of other tests would not survive."""
    script = Path(__file__).with_name("chaos.py")
    amounts = ["--kills", "2", "--mutations", "30", "--seed", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    trial = subprocess.run(
        [sys.executable, str(script), *amounts, "--only", *COMMANDS, *READERS],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert trial.returncode == 0, trial.stdout + trial.stderr
    assert trial.stdout.count(" 0 faults") == 3, trial.stdout
