"""The file of masks beside pruned weights, masks.safetensors: one bit per weight, packed in order of memory."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bertsmith.checkpoint.files import read_tensors, write_tensors
from bertsmith.errors import InputError
from bertsmith.models.masks import masked_weights, masks_of, put_masks
from bertsmith.models.model import Model

MASKS_FILE = "masks.safetensors"


def pack(mask: Tensor) -> Tensor:
    """Return a mask as bytes of eight bits each, the first weight in the highest bit; the last byte is filled with 0.

    Shape: any -> (⌈weights / 8⌉,).
    """
    return torch.from_numpy(np.packbits(mask.cpu().numpy().ravel()))


def unpack(packed: Tensor, shape: torch.Size) -> Tensor:
    """Return the mask of a shape from its bytes: the inverse of `pack`."""
    bits = np.unpackbits(packed.numpy(), count=shape.numel())
    return torch.from_numpy(bits.astype(bool)).view(shape)


def write_masks(model: Model, folder: Path) -> None:
    """Write the masks of a model beside its weights; a model without masks writes no file."""
    masks = masks_of(model)
    if masks:
        write_tensors(folder / MASKS_FILE, {name: pack(mask) for name, mask in masks.items()})


def read_masks(model: Model, folder: Path) -> None:
    """Mask a model with the file of its folder, if there is one."""
    path = folder / MASKS_FILE
    if not path.is_file():
        return
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    masks = {}
    for name, packed in read_tensors(path).items():
        if name not in shapes:
            raise InputError(f"{str(path)!r} has a mask for {name!r}, which the model does not have")
        size = -(-shapes[name].numel() // 8)
        if packed.dtype != torch.uint8 or packed.shape != (size,):
            raise InputError(f"{str(path)!r}: the mask of {name!r} has {packed.numel()} bytes; the model needs {size}")
        masks[name] = unpack(packed, shapes[name])
    put_masks(model, masks)


def restore_masks(model: Model, folder: Path) -> None:
    """Set the masks of a model in training to those of its checkpoint."""
    path = folder / MASKS_FILE
    masks = masks_of(model)
    saved = read_tensors(path) if path.is_file() else {}
    if saved.keys() != masks.keys():
        raise InputError(
            f"{str(folder)!r} has masks for {len(saved)} matrices and the run for {len(masks)}; resume with the same "
            "settings"
        )
    for name, mask in masks.items():
        mask.copy_(unpack(saved[name], mask.shape))
    for masked in masked_weights(model):
        masked.clear()
