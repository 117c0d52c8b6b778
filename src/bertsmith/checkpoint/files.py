"""Files of weights."""

import math
import os
import re
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from bertsmith.errors import InputError, first_line, nearest
from bertsmith.files import read_json, verify_file
from bertsmith.models.build import assemble
from bertsmith.models.config import ModelConfig

Precision = Literal["float32", "float16", "bfloat16"]
"""Precision of written weights; half precision is widened on reading."""
SMALL_NETWORK = 10_000_000
"""Numbers of a network that is built whatever its weights are, so that errors can name the tensor that differs."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or all files that an index.json names."""
    if path.suffix == ".json":
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{str(path)!r} lists no weight files under 'weight_map'")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise InputError(f"{str(path)!r} names {name!r}; allowed: a .safetensors file in the same folder")
        tensors: dict[str, Tensor] = {}
        for name in sorted(set(weight_map.values())):
            tensors |= read_tensors(path.parent / name)
        return tensors
    verify_file(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} is not a complete safetensors file: {error}") from None


def find_weights(folder: Path) -> Path:
    """Find the weights file of a model folder; pickles are refused."""
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).exists():
            return folder / name
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt"))
    if pickles:
        raise InputError(
            f"{str(folder)!r} holds its weights only as {pickles[0]!r}, a pickle, which can run code when opened; "
            "allowed: model.safetensors (transformers writes it with save_pretrained)"
        )
    raise InputError(f"{str(folder)!r} has no model.safetensors")


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model and the buffers that do not follow from its config."""
    saved = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters())  # shared parameters appear once
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**parameters, **buffers}


def copy_tensors(tensors: dict[str, Tensor], model: torch.nn.Module, source: str) -> None:
    """Copy tensors into a model; every name and shape must match."""
    wanted = tensors_of(model)
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise InputError(f"{source} lacks {len(missing)} tensors of this model, the first is {missing[0]!r}")
    foreign = sorted(tensors.keys() - wanted.keys())
    if foreign:
        raise InputError(
            f"{source} has {len(foreign)} tensors that this model does not have, the first is {foreign[0]!r}"
        )
    for name, tensor in wanted.items():
        if tensors[name].shape != tensor.shape:
            got, want = tuple(tensors[name].shape), tuple(tensor.shape)
            raise InputError(f"{source}: {name!r} has shape {got}; the config requires {want}")
        _check_finite(tensors[name], name, source)
    # half precision is widened, which is exact; double precision stays
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors.values()) else torch.float32
    if any(tensor.dtype != dtype for tensor in wanted.values() if tensor.is_floating_point()):
        model.to(dtype)
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            tensor.copy_(_share(tensors[name], tensor))


def check_size(config: ModelConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    """Raise InputError before memory is allocated for a network that is much larger than its weights."""
    dimensions = {size for tensor in tensors.values() for size in tensor.shape}
    if len(config.encoder.layers) <= len(tensors) and _large_sizes(config.plain()) <= dimensions:
        return  # counting needs meta tensors, whose first use takes two seconds
    available = sum(tensor.numel() for tensor in tensors.values())
    try:
        with torch.device("meta"):
            model = assemble(config)
            needed = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes beyond 64 bits
        raise InputError(
            f"{str(folder / 'config.json')!r} describes a network that cannot exist: {first_line(error)}"
        ) from None
    if needed > 4 * available + SMALL_NETWORK:
        raise InputError(
            f"{str(folder / 'config.json')!r} describes a network of {needed:,} numbers, but the weights have "
            f"{available:,}; one of the two files is damaged"
        )


def _large_sizes(settings: object) -> set[int]:
    """Return all integers above 512 in plain settings."""
    if isinstance(settings, dict | list):
        values = settings.values() if isinstance(settings, dict) else settings
        return set().union(*map(_large_sizes, values))
    return {settings} if isinstance(settings, int) and settings > 512 else set()


def _check_finite(tensor: Tensor, name: str, source: str) -> None:
    """Raise InputError if a tensor of weights has NaN or infinite values."""
    # reductions propagate NaN and allocate nothing, unlike isfinite
    if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, map(float, tensor.aminmax()))):
        raise InputError(f"{source}: {name!r} has values that are not finite; use a model from an intact checkpoint")


def _share(whole: Tensor, own: Tensor) -> Tensor:
    """Return this process's shard of a tensor if the model's own is distributed, else the whole tensor."""
    if type(own) in (Tensor, Parameter):  # a single process, where the import below would cost a second
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor):
        return whole
    return distribute_tensor(whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


@torch.no_grad()
def in_precision(tensors: dict[str, Tensor], precision: Precision | None) -> dict[str, Tensor]:
    """Convert floating-point tensors to a precision, None to keep them; raise if a value would become infinite."""
    if precision is None:
        return tensors
    if precision not in get_args(Precision):
        raise InputError(f"precision is {precision!r}; {nearest(str(precision), get_args(Precision))}")
    dtype: torch.dtype = getattr(torch, precision)
    converted = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if (converted[name].isinf() & tensor.isfinite()).any():
            largest, limit = float(tensor[tensor.isfinite()].abs().max()), torch.finfo(dtype).max
            others = "bfloat16, float32" if precision == "float16" else "None, which keeps the weights as they are"
            raise InputError(
                f"precision is {precision!r} and {name!r} has values up to {largest:.6g}, beyond its largest number "
                f"{limit:.6g}; allowed here: {others}"
            )
    return converted


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; tensors that share memory are copied."""
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # follows the umask; the library makes its files private
    try:
        save_file(plain, path, metadata=metadata or {"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    os.chmod(path, mode)
