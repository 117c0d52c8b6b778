"""Counter-based random numbers: a pure function of seed and counter, so that any process can compute any of them."""

import numpy as np
import torch
from torch import Tensor

_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # constants of the splitmix64 finaliser
_STEP = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    """Return a 64-bit constant in two's complement: PyTorch has no unsigned arithmetic."""
    return value - (1 << 64) if value >= 1 << 63 else value


def key(*parts: int) -> int:
    """Return a 62-bit seed that depends on all parts.

    >>> key(1, 2) == key(1, 2), key(1, 2) == key(2, 1)
    (True, False)
    """
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in parts:
            state = _mix_numpy(state + np.uint64(part % (1 << 64)) * np.uint64(_STEP) + np.uint64(_STEP))
    return int(state >> np.uint64(2))


def _mix_numpy(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX[0])
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX[1])
    return value ^ (value >> np.uint64(31))


def bits(stream: Tensor | int, counter: Tensor) -> Tensor:
    """Return 62 random bits for every counter of a stream (splitmix64), the same on every device.

    Shape: stream and counter int64, any shapes that broadcast.
    """
    state = stream + (counter + 1) * _signed(_STEP)
    state = (state ^ _shift(state, 30)) * _signed(_MIX[0])
    state = (state ^ _shift(state, 27)) * _signed(_MIX[1])
    return _shift(state ^ _shift(state, 31), 2)


def uniform(stream: Tensor | int, counter: Tensor) -> Tensor:
    """Return a float32 number in [0, 1) for every counter of a stream."""
    return _shift(bits(stream, counter), 38).float() * 2.0**-24


def _shift(value: Tensor, positions: int) -> Tensor:
    """Logical right shift; PyTorch's operator is arithmetic."""
    return (value >> positions) & ((1 << (64 - positions)) - 1)


def shuffled(count: int, *parts: int) -> np.ndarray:
    """Return a permutation of range(count) that depends only on the parts."""
    return np.random.default_rng(key(*parts)).permutation(count)


def generator(*parts: int) -> np.random.Generator:
    """Return a NumPy generator that depends only on the parts."""
    return np.random.default_rng(key(*parts))


def seed_everything(*parts: int) -> None:
    """Seed PyTorch's generators (dropout) for one micro-batch from the parts."""
    torch.manual_seed(key(*parts))
