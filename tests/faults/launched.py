"""Several runs one after the other in the same processes, which cost more to start than the runs take.

Started as `accelerate launch … launched.py FILE`; the JSON file holds {"recipe", "corpus", "cases"}, and each case
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


def carry_out(case: dict[str, Any], recipe: Path, corpus: Path) -> None:
    """Pre-trains as a case says."""
    os.environ["ACCELERATE_USE_FSDP"] = str(case.get("is_sharded", False)).lower()
    bertsmith.pretrain(recipe, data=corpus, out=Path(case["out"]), set=case["changes"], device="cpu")


def share(trainer: Trainer) -> float:
    """The share of the weights that this process holds."""
    parameters = list(trainer.engine.step_module.parameters())
    own = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return sum(p.numel() for p in own) / sum(p.numel() for p in parameters)


if __name__ == "__main__":
    close, trainers = Trainer.close, []
    Trainer.close = lambda trainer: trainers.append(trainer)  # type: ignore[method-assign]
    content = json.loads(Path(sys.argv[1]).read_text())
    for case in content["cases"]:
        carry_out(case, Path(content["recipe"]), Path(content["corpus"]))
        if trainers[-1].engine.is_main:
            (Path(case["out"]) / "share.json").write_text(json.dumps({"share": share(trainers[-1])}))
    close(trainers[-1])
