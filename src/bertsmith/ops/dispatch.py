"""Choice between the implementations of an op: the first that supports the inputs, or one requested by name.

A model has several ops and one `backend` argument: `check_backend` requires that at least one op has a backend of this
name, and `resolve_backend` returns the backend of each op.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from bertsmith.errors import InputError, nearest

Inputs = TypeVar("Inputs")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Implementation(Generic[Inputs, Result]):
    """One implementation of an op. `unsupported` returns why it cannot compute some inputs, or None if it can."""

    compute: Callable[[Inputs], Result]
    unsupported: Callable[[Inputs], str | None]
    preferred: Callable[[Inputs], bool] = lambda inputs: True
    """Whether "auto" may choose it for supported inputs; kernels in Triton's interpreter must be requested by name."""


Implementations = Mapping[str, Implementation[Inputs, Result]]
"""The implementations of one op by backend name, the preferred one first."""


def choose(backends: Implementations[Inputs, Result], backend: str, inputs: Inputs) -> Implementation[Inputs, Result]:
    """Return the requested implementation, or for "auto" the first preferred one that supports the inputs."""
    check_backend([backends], backend)
    if backend == "auto":
        for implementation in backends.values():
            if implementation.unsupported(inputs) is None and implementation.preferred(inputs):
                return implementation
        reasons = "; ".join(
            f"{name}: {implementation.unsupported(inputs)}" for name, implementation in backends.items()
        )
        raise InputError(f"no backend can compute this: {reasons}")
    reason = backends[backend].unsupported(inputs)
    if reason is not None:
        raise InputError(f"backend {backend!r} cannot compute this: {reason}")
    return backends[backend]


def check_backend(ops: Iterable[Implementations[Any, Any]], backend: str) -> None:
    """Raise InputError if none of these ops has a backend of this name."""
    if backend == "auto":
        return
    names = {"auto", *(name for backends in ops for name in backends)}
    if backend not in names:
        raise InputError(f"backend is {backend!r}; {nearest(backend, names)}")


def resolve_backend(backends: Implementations[Any, Any], backend: str) -> str:
    """Return the backend requested for a whole model if this op has it, else "auto"."""
    return backend if backend in backends else "auto"


def is_exporting() -> bool:
    """Return whether a graph is being exported for another program.

    `torch.compiler.is_exporting` alone is True in compiled code as well (PyTorch 2.11), which would disable kernels.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
