"""A tiny fine-tuning command, for tests that interrupt it."""

import json
import sys
from pathlib import Path

RECIPE = """
[model]
preset = "bert-tiny"
overrides = { width = 32, layers = 2, heads = 2, max_length = 32, dropout = 0.1 }

[tokenizer]
vocabulary = 300

[sequences]
length = 16

[batch]
examples = 8

[optimizer]
learning_rate = 1e-3

[run]
epochs = 4
log_every = 1
evaluations = 2
"""
STEPS = 32  # 8 per epoch, evaluated every 4 steps

WORDS = {"good": ["fine", "lovely", "bright", "happy"], "bad": ["awful", "broken", "sad", "dark"]}
THINGS = ["day", "smith", "river", "gate", "clock", "letter", "anvil", "lantern", "harbour", "road"]
ROWS = [(f"the {word} {thing}", label) for label, words in WORDS.items() for word in words for thing in THINGS]


def write_task(folder: Path, train: int = 64) -> Path:
    """Write a task folder with `train` training rows and 16 dev rows."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": [row for i, row in enumerate(ROWS) if i % 5][:train], "dev": ROWS[::5]}
    for split, rows in splits.items():
        lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def finetune_command(recipe: Path | None, data: Path | None, out: Path, *more: str) -> list[str]:
    """Return the command line; pass --resume in `more` instead of a recipe and data to resume."""
    arguments = [sys.executable, "-m", "bertsmith", "finetune", "--out", str(out), "--device", "cpu"]
    arguments += [] if recipe is None else ["--recipe", str(recipe)]
    return [*arguments, *([] if data is None else ["--data", str(data)]), *more]


def metrics(out: Path) -> dict:
    """Return result.json without values that depend on the machine."""
    result = json.loads((out / "result.json").read_text())
    return {name: value for name, value in result.items() if name not in ("seconds", "tokens_per_second")}
