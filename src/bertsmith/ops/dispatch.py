"""Choice between the implementations of an op: the first that supports the inputs, or one requested by name.

A model has several ops and one `backend` argument: `check_backend` requires that some op has a backend of this name,
and `own_backend` returns the name that each op is then called with.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from bertsmith.errors import InputError, nearest

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Implementation(Generic[Inputs]):
    """One implementation of an op, and the reason (or None) why it does not support given inputs."""

    compute: Callable[[Inputs], Tensor]
    unsupported: Callable[[Inputs], str | None]
    wanted: Callable[[Inputs], bool] = lambda inputs: True
    """Whether "auto" may choose it where it is supported; interpreted kernels, for tests, must be requested by name."""


Implementations = Mapping[str, Implementation[Inputs]]
"""The implementations of one op by backend name, the preferred one first."""


def choose(backends: Implementations[Inputs], backend: str, inputs: Inputs) -> Implementation[Inputs]:
    """Return the requested implementation, or for "auto" the first wanted one that supports the inputs."""
    check_backend([backends], backend)
    if backend == "auto":
        for implementation in backends.values():
            if implementation.unsupported(inputs) is None and implementation.wanted(inputs):
                return implementation
        reasons = "; ".join(
            f"{name}: {implementation.unsupported(inputs)}" for name, implementation in backends.items()
        )
        raise InputError(f"no backend can compute this: {reasons}")
    reason = backends[backend].unsupported(inputs)
    if reason is not None:
        raise InputError(f"backend {backend!r} cannot compute this: {reason}")
    return backends[backend]


def check_backend(ops: Iterable[Implementations[Any]], backend: str) -> None:
    """Raise InputError if none of these ops has a backend of this name."""
    if backend == "auto":
        return
    names = {"auto", *(name for backends in ops for name in backends)}
    if backend not in names:
        raise InputError(f"backend is {backend!r}; {nearest(backend, names)}")


def own_backend(backends: Implementations[Any], backend: str) -> str:
    """Return the backend requested for a whole model if this op has it, else "auto"."""
    return backend if backend in backends else "auto"


def is_exporting() -> bool:
    """Return whether a graph is being exported for another program.

    PyTorch's own answer is True in code that it compiles as well (2.11), where it would keep kernels away.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
