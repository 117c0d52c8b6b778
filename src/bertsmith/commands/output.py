"""The output folder of a command: claimed before the work, with result.json at its end."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError

RESULT = "result.json"
# what only our own commands leave (a killed pre-training or corpus run has no result yet); a folder without any of
# them is never emptied
_MARKS = (RESULT, "journal.jsonl", "recipe.toml", "train-*.shard")


def claim(out: Path, force: bool) -> Path:
    """The output folder, made and empty; one that holds something is emptied only with `force` and if it is ours."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {str(out)!r} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise InputError(f"--out {str(out)!r} is not empty; give another folder, or --force to replace its content")
        if not any(file.is_file() for mark in _MARKS for file in out.glob(mark)):
            raise InputError(
                f"--out {str(out)!r} holds files that no bertsmith command made, so --force does not empty it; "
                "give another folder"
            )
        for entry in out.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    out.mkdir(parents=True, exist_ok=True)
    return out


def write_result(out: Path, figures: dict[str, Any]) -> None:
    """Nothing; result.json in `out` holds the figures, whole or not at all."""
    temporary = out / f".{RESULT}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(out / RESULT)
