"""Run several pre-trainings in the same processes, because starting processes takes longer than the runs.

Started with `accelerate launch … launched.py FILE`. The JSON file contains {"recipe", "corpus", "cases"}, and each case
{"out", "changes", "is_sharded"}.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

import bertsmith
from bertsmith.training.trainer import Trainer


def run_case(case: dict[str, Any], recipe: Path, corpus: Path) -> None:
    """Pre-train with the settings of a case."""
    os.environ["ACCELERATE_USE_FSDP"] = str(case.get("is_sharded", False)).lower()
    bertsmith.pretrain(recipe, data=corpus, out=Path(case["out"]), set=case["changes"], device="cpu")


def share(trainer: Trainer) -> float:
    """Return the share of the weights that this process holds."""
    parameters = list(trainer.train_step.step_module.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return sum(p.numel() for p in local) / sum(p.numel() for p in parameters)


if __name__ == "__main__":
    close, trainers = Trainer.close, []
    Trainer.close = lambda trainer: trainers.append(trainer)  # type: ignore[method-assign]
    content = json.loads(Path(sys.argv[1]).read_text())
    for case in content["cases"]:
        run_case(case, Path(content["recipe"]), Path(content["corpus"]))
        if trainers[-1].train_step.is_main:
            (Path(case["out"]) / "share.json").write_text(json.dumps({"share": share(trainers[-1])}))
    close(trainers[-1])
