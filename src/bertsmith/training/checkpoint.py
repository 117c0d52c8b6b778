"""Checkpoints of a run: written atomically, verified when read; the last few and the best are kept."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from bertsmith.checkpoint.files import copy_tensors, read_tensors, write_tensors
from bertsmith.checkpoint.masks import restore_masks
from bertsmith.checkpoint.store import read_config, write_model
from bertsmith.errors import InputError
from bertsmith.files import NewFolder, read_json, remove_folder, seal_defects, write_json, write_seal
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.settings import Plain, check_same
from bertsmith.training.sharding import whole_model


@dataclass
class Progress:
    """State of a run besides settings, weights and optimiser: everything else that the next step depends on."""

    step: int = 0
    """Completed steps."""
    cursor: tuple[int, int, int] = (0, 0, 0)
    """Epoch, window and index of the first micro-batch of the last round of all processes."""
    skip: int = 0
    """Completed micro-batches from the cursor on."""
    phase: int = 0
    """Phase that the cursor refers to."""
    tokens: int = 0
    """Real tokens seen; with several processes, the main one's times their number."""
    flops: float = 0.0
    """Floating-point operations spent on them."""
    seconds: float = 0.0
    meter: dict[str, float] = field(default_factory=dict)
    """Sums of the meter since the last row of the log."""
    best: tuple[float, float] | None = None
    """Best evaluation so far: score (higher is better) and minus its loss."""
    best_step: int = -1
    """Step of the best evaluation."""
    since_best: int = 0
    """Evaluations since the best one."""


@dataclass(frozen=True)
class RunConditions:
    """Everything outside a checkpoint that the next step depends on; a resumed run must have the same."""

    fingerprint: str
    """Hash of the data, and the precision."""
    settings: Plain | None = None
    threads: int | None = None
    """Threads of one process on a CPU, where they determine the order of sums; None on a GPU."""

    def check(self, path: Path, earlier: Plain, *, is_branch: bool) -> list[str]:
        """Compare with the conditions in a checkpoint: raise InputError, or return warnings.

        A branch may have other settings.
        """
        if earlier["fingerprint"] != self.fingerprint:
            raise InputError(
                f"{str(path)!r} was made with another corpus or in another precision; resume with the same ones"
            )
        if not is_branch and self.settings is not None:
            check_same(earlier.get("settings") or {}, self.settings)
        threads = earlier.get("threads")
        if None in (threads, self.threads) or threads == self.threads:
            return []
        return [
            f"the run used {threads} CPU threads until now and uses {self.threads} from here on: sums are rounded in "
            f"another order, so the weights differ in the last bits from an uninterrupted run; set "
            f"OMP_NUM_THREADS={threads} to avoid it"
        ]


def save_checkpoint(
    folder: Path,
    model: Model,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    conditions: RunConditions,
    *,
    keep: int = 2,
    writes: bool = True,
) -> Path:
    """Write `step-…` into the folder, remove all but the last `keep` and the best, and return the new checkpoint.

    With a sharded model every process must call this, and one `writes`.
    """
    path = folder / f"step-{progress.step:08d}"
    whole = whole_model(model)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    if not writes:
        return path
    with NewFolder(path) as new:
        write_model(whole, new)
        moments = {f"{name}/{kind}": value for name, kinds in state["state"].items() for kind, value in kinds.items()}
        write_tensors(new / "optimizer.safetensors", moments)
        record = {**asdict(progress), "groups": state["param_groups"], "conditions": asdict(conditions)}
        write_json(new / "progress.json", record)
        write_seal(new)
    _prune(folder, progress, keep)
    return path


def load_checkpoint(
    path: Path, model: Model, optimizer: torch.optim.Optimizer, conditions: RunConditions, *, is_branch: bool = False
) -> tuple[Progress, list[str]]:
    """Restore weights and optimiser state; return the progress of the run and warnings."""
    data = read_json(path / "progress.json")
    earlier = data.pop("conditions", None) or {"fingerprint": data.pop("fingerprint")}  # checkpoints before 2026-11-18
    warnings = conditions.check(path, earlier, is_branch=is_branch)
    weights = path / "model.safetensors"
    copy_tensors(read_tensors(weights), model, str(weights))
    restore_masks(model, path)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in read_tensors(path / "optimizer.safetensors").items():
        name, _, kind = key.rpartition("/")
        moments.setdefault(name, {})[kind] = value
    state = {"state": moments, "param_groups": data.pop("groups")}
    set_optimizer_state_dict(model, optimizer, state, options=_OPTIONS)
    best = None if data["best"] is None else tuple(data["best"])
    return Progress(**{**data, "cursor": tuple(data["cursor"]), "best": best}), warnings


def load_weights(folder: Path, step: int, model: Model) -> None:
    """Load the weights of the checkpoint of a step."""
    path = folder / f"step-{step:08d}"
    check_complete(path)
    weights = path / "model.safetensors"
    copy_tensors(read_tensors(weights), model, str(weights))
    restore_masks(model, path)


def load_average(folder: Path, model: Model, count: int) -> int:
    """Load the mean of the weights of the last `count` complete checkpoints; return their number.

    Weights are float32 in a checkpoint, whatever the precision of the run; optimiser states are not touched. Buffers
    such as random projections come from the last checkpoint: a mean of random matrices has another distribution.
    """
    paths = [path for path in sorted(folder.glob("step-*"), reverse=True) if _defect(path) is None][:count]
    files = [read_tensors(path / "model.safetensors") for path in paths]
    learned = {name for name, _ in model.named_parameters()}
    mean = {
        name: torch.stack([file[name].double() for file in files]).mean(0).to(last.dtype)
        for name, last in files[0].items()
        if name in learned
    }
    copy_tensors({**files[0], **mean}, model, str(folder))
    restore_masks(model, paths[0])  # after averaging, which fills weights that only the last masks prune
    return len(files)


def find_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and a warning for each newer one that is damaged."""
    warnings: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        reason = _defect(path)
        if reason is None:
            return path, warnings
        warnings.append(f"checkpoint {path.name} is damaged ({reason}) and is skipped")
    return None, warnings


def check_complete(path: Path) -> None:
    """Raise InputError if a checkpoint is missing or damaged."""
    reason = _defect(path)
    if reason is not None:
        raise InputError(f"{str(path)!r} is not a complete checkpoint: {reason}")


def newest_network(folder: Path) -> ModelConfig | None:
    """Return the config of the newest complete checkpoint in a folder, or None."""
    path, _ = find_checkpoint(folder)
    return None if path is None else read_config(path)


# state by parameter name, unsharded and on the CPU
_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _defect(path: Path) -> str | None:
    """Return why a checkpoint cannot be used, or None."""
    try:
        defects = seal_defects(path)
    except InputError as error:
        return str(error)
    return defects[0] if defects else None


def _prune(folder: Path, progress: Progress, keep: int) -> None:
    """Remove all but the last few checkpoints and the best one."""
    paths = sorted(folder.glob("step-*"))
    names = {path.name for path in paths[-keep:]} | {f"step-{progress.best_step:08d}"}
    for path in paths:
        if path.name not in names:
            remove_folder(path)
