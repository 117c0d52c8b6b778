"""A tiny pre-training command, for tests that interrupt it."""

import json
import subprocess
import sys
from pathlib import Path

RECIPE = """
[model]
preset = "bert-tiny"
overrides = { width = 32, layers = 2, heads = 2, max_length = 32, dropout = 0.1 }

[sequences]
length = 32
micro_tokens = 256

[objective]
kind = "masked_lm"
masking = { rate = 0.2, unit = "word" }

[batch]
tokens = 512

[run]
steps = 20
log_every = 1
evaluate_every = 10
checkpoint_every = 5
evaluate_batches = 3
"""


def command(recipe: Path | None, corpus: Path | None, out: Path, *more: str) -> list[str]:
    arguments = [sys.executable, "-m", "bertsmith", "pretrain", *([] if recipe is None else [str(recipe)])]
    return [
        *arguments,
        *([] if corpus is None else ["--data", str(corpus)]),
        "--out",
        str(out),
        "--device",
        "cpu",
        *more,
    ]


def run(arguments: list[str], **more: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(arguments, capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def losses(out: Path) -> list[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(row["kind"], row["step"], row["loss"]) for row in rows if "loss" in row]
