"""Dropout whose draws cost little on a CPU: PyTorch's own draws each number by itself, in one thread."""

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout

_LEVELS = 1 << 16  # 64 drawn bits serve four numbers


def drop(values: Tensor, rate: float) -> Tensor:
    """The values with a share of them, drawn at random, set to 0 and the others scaled up."""
    if values.device.type != "cpu" or rate == 0.0 or torch.compiler.is_compiling():
        return torch.dropout(values, rate, train=True)
    is_dropped, scale = drawn(values.shape, rate)
    return values * torch.where(is_dropped, 0.0, torch.tensor(scale, dtype=values.dtype))


def drop_tokens(hidden: Tensor, rate: float, layout: SequenceLayout) -> Tensor:
    """The same for what tokens have: on a CPU it draws nothing for pads, so that packed and padded get the same.

    On a GPU and in compiled code pads are drawn for, too: to count the real tokens would make the device wait.
    Shape: (batch, length, …), or (tokens, …) when packed.
    """
    is_token = layout.is_token
    if is_token is None or hidden.device.type != "cpu" or rate == 0.0 or torch.compiler.is_compiling():
        return drop(hidden, rate)
    shape = hidden.shape[is_token.dim() :]
    factors = torch.zeros_like(hidden)
    factors[is_token] = drop(hidden.new_ones(int(is_token.sum()), *shape), rate)
    return hidden * factors


def drawn(shape: torch.Size, rate: float) -> tuple[Tensor, float]:
    """Which numbers on a CPU are dropped, and what the others are multiplied by so that the mean stays."""
    threshold = round(rate * _LEVELS)
    count = shape.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    levels = words.view(torch.int16)[:count].view(shape)
    return levels < threshold - _LEVELS // 2, _LEVELS / (_LEVELS - threshold)


def fresh_seed(device: torch.device) -> Tensor:
    """What a kernel's draws follow from: a seed of PyTorch's generator on the device, without a wait: (1,), int32."""
    return torch.randint(0, 2**31 - 1, (1,), dtype=torch.int32, device=device)
