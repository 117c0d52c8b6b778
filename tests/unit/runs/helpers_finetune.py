"""A tiny task and a tiny network, for tests of fine-tuning as a command."""

import json
from pathlib import Path
from typing import Any

import bertsmith

SMALL = ["model.overrides={width=16,layers=1,heads=2,max_length=32,dropout=0.1}", "tokenizer.vocabulary=300"]
SMALL += ["sequences.length=16", "batch.examples=16", "run.log_every=1", "run.epochs=2", "optimizer.learning_rate=1e-3"]

WORDS = {"good": ["fine", "lovely", "bright", "happy"], "bad": ["awful", "broken", "sad", "dark"]}
THINGS = ["day", "smith", "river", "gate", "clock", "letter", "anvil", "lantern", "harbour", "road"]
ROWS = [(f"the {word} {thing}", label) for label, words in WORDS.items() for word in words for thing in THINGS]


def write_task(folder: Path) -> Path:
    """Write a task with 64 rows in train and 16 in dev."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": [row for i, row in enumerate(ROWS) if i % 5], "dev": ROWS[::5]}
    for part, rows in parts.items():
        lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in rows]
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def tune(data: Path, out: Path, *changes: str, model: Any = "bert-tiny", **more: Any) -> Any:
    return bertsmith.finetune(model, data=data, out=out, set=[*SMALL, *changes], device="cpu", **more)


def log(out: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]
