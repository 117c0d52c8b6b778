"""Checkpoints of a run: whole or not there at all, checked when read, the last few and the best kept."""

import hashlib
import shutil
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

from bertsmith.checkpoint.files import NewFolder, copy_tensors, read_json, read_tensors, write_json, write_tensors
from bertsmith.checkpoint.store import read_config, write_model
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.training.sharding import whole_model

_SEAL = "seal.json"  # written last: the hash of every other file


@dataclass
class Progress:
    """Where a run stands: with the settings and the weights, all that the next step depends on."""

    step: int = 0
    """Steps done."""
    cursor: tuple[int, int, int] = (0, 0, 0)
    """Epoch, window and index of the first micro-batch of the last round of all processes."""
    skip: int = 0
    """Micro-batches from the cursor on that are done."""
    phase: int = 0
    """The phase whose stream the cursor stands in."""
    tokens: int = 0
    """Real tokens seen; with several processes, the main one's times their number."""
    flops: float = 0.0
    """Floating-point operations spent on them."""
    seconds: float = 0.0
    meter: dict[str, float] = field(default_factory=dict)
    """What the meter had added up since the last row of the log."""
    best: tuple[float, float] | None = None
    """The best evaluation so far: its score, the higher the better, and minus its loss; the step it was made after …"""
    best_step: int = -1
    since_best: int = 0
    """… and how many there were since."""


def save_checkpoint(
    folder: Path,
    model: Model,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    fingerprint: str,
    *,
    keep: int = 2,
    writes: bool = True,
) -> Path:
    """Writes `step-…` into the folder and removes all but the last `keep` and the best; returns the new checkpoint.

    `fingerprint` stands for the data and the precision, which the next step depends on, too. Of a sharded model every
    process must call this, and one `writes`.
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
        record = {**asdict(progress), "groups": state["param_groups"], "fingerprint": fingerprint}
        write_json(new / "progress.json", record)
        write_json(new / _SEAL, {file.name: _hash(file) for file in sorted(new.iterdir())})
    _prune(folder, progress, keep)
    return path


def load_checkpoint(path: Path, model: Model, optimizer: torch.optim.Optimizer, fingerprint: str) -> Progress:
    """Puts weights and optimiser state back; returns where the run stands."""
    data = read_json(path / "progress.json")
    if data.pop("fingerprint") != fingerprint:
        raise InputError(
            f"{str(path)!r} was made with another corpus or in another precision; go on with the same ones"
        )
    weights = path / "model.safetensors"
    copy_tensors(read_tensors(weights), model, str(weights))
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in read_tensors(path / "optimizer.safetensors").items():
        name, _, kind = key.rpartition("/")
        moments.setdefault(name, {})[kind] = value
    state = {"state": moments, "param_groups": data.pop("groups")}
    set_optimizer_state_dict(model, optimizer, state, options=_OPTIONS)
    best = None if data["best"] is None else tuple(data["best"])
    return Progress(**{**data, "cursor": tuple(data["cursor"]), "best": best})


def load_weights(folder: Path, step: int, model: Model) -> None:
    """Gives the model the weights of the checkpoint after a step."""
    path = folder / f"step-{step:08d}"
    check_whole(path)
    weights = path / "model.safetensors"
    copy_tensors(read_tensors(weights), model, str(weights))


def load_average(folder: Path, model: Model, count: int) -> int:
    """Gives the model the mean of the weights of the last `count` whole checkpoints; returns how many there were.

    Weights are float32 in a checkpoint, whatever the products were computed in; optimiser states are left alone. What
    is drawn and not learned is the last one's: the mean of random matrices is no such matrix.
    """
    paths = [path for path in sorted(folder.glob("step-*"), reverse=True) if _torn(path) is None][:count]
    files = [read_tensors(path / "model.safetensors") for path in paths]
    learned = {name for name, _ in model.named_parameters()}
    mean = {
        name: torch.stack([file[name].double() for file in files]).mean(0).to(last.dtype)
        for name, last in files[0].items()
        if name in learned
    }
    copy_tensors({**files[0], **mean}, model, str(folder))
    return len(files)


def find_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence for each newer one that is not."""
    complaints: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        reason = _torn(path)
        if reason is None:
            return path, complaints
        complaints.append(f"checkpoint {path.name} is not whole ({reason}) and is passed over")
    return None, complaints


def check_whole(path: Path) -> None:
    """Raises a sentence if this is no whole checkpoint."""
    reason = _torn(path)
    if reason is not None:
        raise InputError(f"{str(path)!r} is no whole checkpoint: {reason}")


def newest_network(folder: Path) -> ModelConfig | None:
    """The config of the newest whole checkpoint in a folder; None if there is none."""
    path, _ = find_checkpoint(folder)
    return None if path is None else read_config(path)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed runs left half-written."""
    for pattern in (".step-*.partial-*", ".step-*.old-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


# state by parameter name, whole on the CPU, however the model is spread over devices
_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _torn(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    try:
        seal = read_json(path / _SEAL)
    except InputError as error:
        return str(error)
    for name, digest in seal.items():
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if _hash(file) != digest:
            return f"{name} has changed since it was written"
    return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _prune(folder: Path, progress: Progress, keep: int) -> None:
    """Keeps the last few checkpoints and the best one."""
    paths = sorted(folder.glob("step-*"))
    kept = {path.name for path in paths[-keep:]} | {f"step-{progress.best_step:08d}"}
    for path in paths:
        if path.name not in kept:
            shutil.rmtree(path)
