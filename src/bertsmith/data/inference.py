"""Inference over many sequences: precision, token budget, windows that a thread prepares, and asynchronous copies.

`encode`, prediction, evaluation and augmentation share these functions. A window of rows is tokenised in the background
while the model runs on the window before it, sorted by length (`length_batches` in answers/sequences.py), and computed
in batches of a token budget. Memory depends on the size of a window, not on the number of rows.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from bertsmith.data.examples import TaskBatch
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError

InferencePrecision = Literal["auto", "float32", "bfloat16"]
"""Precision of matrix products; "auto" is bfloat16 on a GPU and float32 on a CPU. Weights and results stay float32."""

CPU_TOKENS = 1 << 10
"""Tokens of a batch on a CPU: matrix products are at full speed, and activations fit in the cache."""
MIN_GPU_TOKENS, MAX_GPU_TOKENS = 1 << 13, 1 << 16
"""Tokens of a batch on a GPU: one per MiB of its memory, within these bounds."""
FIRST_WINDOW, MAX_WINDOW = 1 << 11, 1 << 14
"""Rows of the first window, which is small so that the model starts early, and of the largest."""

Item = TypeVar("Item")
Movable = TypeVar("Movable", Tensor, SequenceLayout, TaskBatch)


def token_budget(device: torch.device) -> int:
    """Return the maximum number of tokens of a batch, padding included."""
    if device.type == "cpu":
        return CPU_TOKENS
    if device.type != "cuda":
        return MIN_GPU_TOKENS
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(MAX_GPU_TOKENS, max(MIN_GPU_TOKENS, memory >> 20))


def is_half(device: torch.device, precision: InferencePrecision) -> bool:
    """Return whether matrix products are in bfloat16; raise InputError for an unknown precision."""
    if precision not in get_args(InferencePrecision):
        raise InputError(f"precision is {precision!r}; allowed: {', '.join(get_args(InferencePrecision))}")
    return precision == "bfloat16" or (precision == "auto" and device.type != "cpu")


def inference_autocast(device: torch.device, precision: InferencePrecision) -> AbstractContextManager[None]:
    """Return a context manager in which matrix products have the precision; "auto" on a CPU changes nothing."""
    enabled = is_half(device, precision)
    if precision == "auto" and not enabled:
        return nullcontext()
    context: AbstractContextManager[None] = torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)
    return context


def windows(rows: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the rows in lists: FIRST_WINDOW rows, then twice as many each time up to MAX_WINDOW."""
    iterator, size = iter(rows), FIRST_WINDOW
    while window := list(islice(iterator, size)):
        yield window
        size = min(2 * size, MAX_WINDOW)


def in_background(items: Iterable[Item], *, ahead: int = 1) -> Iterator[Item]:
    """Yield items that a thread computes up to `ahead` items in advance; its exceptions are raised here."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        pending = deque(pool.submit(next, iterator, end) for _ in range(ahead + 1))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]


def to_device(data: Movable, device: torch.device) -> Movable:
    """Copy a tensor, layout or batch of the host to a device without waiting for the device."""
    if device.type == "cpu":
        return data
    pinned = data.pin_memory()
    return pinned.to(device, non_blocking=True) if isinstance(pinned, Tensor) else pinned.to(device)


def to_host(tensor: Tensor) -> Tensor:
    """Start to copy a tensor to pinned memory of the host; read it after `finish_copies`."""
    return tensor.to("cpu", non_blocking=True)


def finish_copies(device: torch.device) -> None:
    """Wait for the copies that `to_host` has started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
