"""Deterministic mode: runs of one seed are bit-equal on the same hardware and software."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from bertsmith.errors import InputError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Values of the variable with which cuBLAS adds in a fixed order."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def enter_deterministic_mode(device: torch.device) -> Callable[[], None]:
    """Make PyTorch choose deterministic operations for the whole process; return a function that restores its settings.

    Attention, scatter and index operations get deterministic implementations, convolutions and compiled kernels are not
    selected by timing, and an operation without a deterministic implementation raises an error. Bertsmith's own kernels
    are always deterministic.
    """
    if device.type == "cuda":
        _fix_workspace()
    from torch._inductor import config as inductor  # imports torch.compile, which takes a second

    memory: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        inductor.deterministic,
    )
    torch.use_deterministic_algorithms(True)
    # no operation reads memory that was never written, so filling it would only cost time
    memory.fill_uninitialized_memory = before[0] and before[2]
    torch.backends.cudnn.benchmark = False
    inductor.deterministic = True
    if device.type == "cuda":
        _check_products(device)

    def restore() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = before[2]
        torch.backends.cudnn.benchmark = before[3]
        inductor.deterministic = before[4]

    return restore


def _fix_workspace() -> None:
    """Set the environment variable that makes cuBLAS deterministic, which it reads at the first matrix product."""
    value = os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    if value not in WORKSPACES:
        raise InputError(
            f"run.deterministic is true and {WORKSPACE} is {value!r}; allowed: {', '.join(map(repr, WORKSPACES))}"
        )


def _check_products(device: torch.device) -> None:
    try:
        torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)
    except RuntimeError as error:
        raise InputError(
            f"run.deterministic is true, but the GPU was used before {WORKSPACE} was set; "
            f"set it to {WORKSPACES[0]!r} before Python starts"
        ) from error


def explains_nondeterminism(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Turn PyTorch's error about an operation without a deterministic implementation into an InputError."""

    @wraps(function)
    def explained(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            name, mark, _ = str(error).partition(" does not have a deterministic implementation")
            if not mark:
                raise
            operation = name.rsplit(maxsplit=1)[-1]
            raise InputError(
                f"run.deterministic is true, but {operation} has no deterministic implementation on this device; "
                "set it to false"
            ) from error

    return explained
