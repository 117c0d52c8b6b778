"""Dropout that is fast on a CPU, where PyTorch draws random numbers one by one in a single thread."""

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout

_LEVELS = 1 << 16  # 64 random bits give four numbers


def drop(values: Tensor, rate: float) -> Tensor:
    """Set a random share of the values to 0 and scale the others up."""
    if values.device.type != "cpu" or rate == 0.0 or torch.compiler.is_compiling():
        return torch.dropout(values, rate, train=True)
    is_dropped, scale = draw_mask(values.shape, rate)
    return values * torch.where(is_dropped, 0.0, torch.tensor(scale, dtype=values.dtype))


def drop_tokens(hidden: Tensor, rate: float, layout: SequenceLayout) -> Tensor:
    """Apply dropout to real tokens; on a CPU packed and padded inputs get the same random numbers.

    On a GPU and in compiled code padding gets random numbers, too, because counting the real tokens would synchronise.
    Shape: (batch, length, …), or (tokens, …) when packed.
    """
    is_token = layout.is_token
    if is_token is None or hidden.device.type != "cpu" or rate == 0.0 or torch.compiler.is_compiling():
        return drop(hidden, rate)
    shape = hidden.shape[is_token.dim() :]
    factors = torch.zeros_like(hidden)
    factors[is_token] = drop(hidden.new_ones(int(is_token.sum()), *shape), rate)
    return hidden * factors


def draw_mask(shape: torch.Size, rate: float) -> tuple[Tensor, float]:
    """Return a CPU mask that is True for dropped values, and the scale of the others."""
    threshold = round(rate * _LEVELS)
    count = shape.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    levels = words.view(torch.int16)[:count].view(shape)
    return levels < threshold - _LEVELS // 2, _LEVELS / (_LEVELS - threshold)


def new_seed(device: torch.device) -> Tensor:
    """Draw a kernel's seed from PyTorch's generator on the device, without synchronisation: (1,), int32."""
    return torch.randint(0, 2**31 - 1, (1,), dtype=torch.int32, device=device)
