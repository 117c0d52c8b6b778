"""The layers of the code base, from lowest to highest: a folder imports only from itself and from earlier entries.

`python tests/architecture/layers.py` writes the table into README.md (the map) and CONTRIBUTING.md (the import order).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LAYERS: dict[str, str] = {
    "errors": "the one exception for bad input",
    "files": "files and folders: checked, atomic, locked, sealed",
    "bundled": "models that come with the package",
    "settings": "strict records for configs and recipes",
    "toml": "recipes as files",
    "text": "text → tokens: readers, tables, tokenizers",
    "answers": "scores → answers of each task, without PyTorch",
    "data": "tokens → batches: corpus shards, layouts, packing, masking, loader",
    "ops": "math across positions: reference and fast implementations, dispatch",
    "layers": "parts with weights: mixers, feed-forward, blocks",
    "models": "whole networks: configs, presets, encoder, heads",
    "checkpoint": "saving, loading, ModelSource, Hugging Face folders",
    "engines": "how a model runs: PyTorch, compiled, ONNX Runtime, int8",
    "runtime": "runs an exported ONNX folder without PyTorch; nothing imports it",
    "exporting": "models for other programs, with a model card",
    "objectives": "what to learn: losses of pre-training, tasks and distillation",
    "tasks": "what to fine-tune for: one file per task, and its metrics",
    "training": "the loop: trainer, step, optimizer, schedule, checkpoints",
    "recipes": "published hyper-parameters by name",
    "shrinking": "elastic training, pruning, exits, vocabulary, fit to a budget",
    "reproduction": "experiments as data: tables of runs, claims, statistics and verdicts",
    "report": "pages for people: templates and charts",
    "hf": "our models as classes of transformers",
    "serving": "the HTTP service",
    "runs": "one whole run = one function, behind `bertsmith NAME` and `bertsmith.NAME(...)`",
    "cli": "the command line: a table of the functions in runs/",
    "__main__": "`python -m bertsmith`",
}

_FOLDERS = [name for name in LAYERS if (ROOT / "src" / "bertsmith" / name).is_dir()]
START, END = "<!-- layers: written by tests/architecture/layers.py -->", "<!-- end of layers -->"


def folder_map() -> str:
    """Return the folders with one line each, for README.md."""
    lines = [f"  {name + '/':<14}{LAYERS[name]}" for name in _FOLDERS]
    return "\n".join([START, "```", "src/bertsmith/", *lines, "```", END])


def import_order() -> str:
    """Return the order of imports, for CONTRIBUTING.md."""
    order = " < ".join(name for name in LAYERS if name != "__main__")
    return "\n".join([START, f"`{order}`", END])


DOCUMENTS = {"README.md": folder_map, "CONTRIBUTING.md": import_order}


def updated(name: str) -> str:
    """Return a document with its generated block as it should be."""
    text = (ROOT / name).read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return before + DOCUMENTS[name]() + after


if __name__ == "__main__":
    for name in DOCUMENTS:
        (ROOT / name).write_text(updated(name), encoding="utf-8")
    sys.exit(0)
