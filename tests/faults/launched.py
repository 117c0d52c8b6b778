"""Several runs one after the other in the same processes, which cost more to start than the runs take.

    accelerate launch … launched.py CASES     CASES: a JSON file, a list of {"out", "changes", "is_sharded", …}
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import bertsmith
from bertsmith.training.trainer import Trainer


def carry_out(cases: list[dict[str, Any]], recipe: Path, corpus: Path) -> None:
    """Pre-trains as each case says; its figures are left in its folder."""
    for case in cases:
        os.environ["ACCELERATE_USE_FSDP"] = str(case.get("is_sharded", False)).lower()
        bertsmith.pretrain(recipe, data=corpus, out=Path(case["out"]), set=case["changes"], device="cpu")


if __name__ == "__main__":
    close, trainers = Trainer.close, []
    Trainer.close = lambda trainer: trainers.append(trainer)  # type: ignore[method-assign]
    content = json.loads(Path(sys.argv[1]).read_text())
    carry_out(content["cases"], Path(content["recipe"]), Path(content["corpus"]))
    close(trainers[-1])
