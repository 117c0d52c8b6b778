"""The choice between the forms of one op: the first that can, or a named one, which says why if it cannot.

A model may hold several ops and is asked for one name: `check_backend` wants some op to have it, `own_backend` is what
each op of the model is then asked for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from bertsmith.errors import InputError, nearest

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Form(Generic[Inputs]):
    """One way to compute an op, and the reason (or None) why it cannot serve given inputs."""

    compute: Callable[[Inputs], Tensor]
    unsupported: Callable[[Inputs], str | None]
    wanted: Callable[[Inputs], bool] = lambda inputs: True
    """Whether "auto" may take it where it can serve: a kernel that a CPU interprets for tests is asked for by name."""


Forms = Mapping[str, Form[Inputs]]
"""The forms of one op by name, the preferred one first."""


def choose(forms: Forms[Inputs], backend: str, inputs: Inputs) -> Form[Inputs]:
    """The form that shall compute the op: the named one, or for "auto" the first wanted one that can."""
    check_backend([forms], backend)
    if backend == "auto":
        for form in forms.values():
            if form.unsupported(inputs) is None and form.wanted(inputs):
                return form
        reasons = "; ".join(f"{name}: {form.unsupported(inputs)}" for name, form in forms.items())
        raise InputError(f"no backend can compute this: {reasons}")
    reason = forms[backend].unsupported(inputs)
    if reason is not None:
        raise InputError(f"backend {backend!r} cannot compute this: {reason}")
    return forms[backend]


def check_backend(ops: Iterable[Forms[Any]], backend: str) -> None:
    """Raises InputError if none of these ops has a form of this name."""
    if backend == "auto":
        return
    names = {"auto", *(name for forms in ops for name in forms)}
    if backend not in names:
        raise InputError(f"backend is {backend!r}; {nearest(backend, names)}")


def own_backend(forms: Forms[Any], backend: str) -> str:
    """The name a whole model was asked for, if this op of it has such a form; else "auto"."""
    return backend if backend in forms else "auto"


def is_exporting() -> bool:
    """Whether a graph is exported for another program.

    PyTorch's own answer is True in code that it compiles as well (2.11), where it would keep kernels away.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
