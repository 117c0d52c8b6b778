"""A tiny fine-tuning as a command, for tests that interrupt it."""

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
STEPS = 32  # 8 an epoch, evaluated after every 4

WORDS = {"good": ["fine", "lovely", "bright", "happy"], "bad": ["awful", "broken", "sad", "dark"]}
THINGS = ["day", "smith", "river", "gate", "clock", "letter", "anvil", "lantern", "harbour", "road"]
ROWS = [(f"the {word} {thing}", label) for label, words in WORDS.items() for word in words for thing in THINGS]


def write_task(folder: Path, train: int = 64) -> Path:
    """A folder with so many rows to learn from and 16 in dev."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": [row for i, row in enumerate(ROWS) if i % 5][:train], "dev": ROWS[::5]}
    for part, rows in parts.items():
        lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in rows]
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def tuning(recipe: Path | None, data: Path | None, out: Path, *more: str) -> list[str]:
    """The command; without a recipe and data, one that goes on."""
    words = [sys.executable, "-m", "bertsmith", "finetune", "--out", str(out), "--device", "cpu"]
    words += [] if recipe is None else ["--recipe", str(recipe)]
    return [*words, *([] if data is None else ["--data", str(data)]), *more]


def metrics(out: Path) -> dict:
    """The result without what depends on the machine."""
    result = json.loads((out / "result.json").read_text())
    return {name: value for name, value in result.items() if name not in ("seconds", "tokens_per_second")}
