"""The choice between the forms of one op: the first that can, or a named one, which says why if it cannot."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from bertsmith.errors import InputError, nearest

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Form(Generic[Inputs]):
    """One way to compute an op, and the reason (or None) why it cannot serve given inputs."""

    compute: Callable[[Inputs], Tensor]
    unsupported: Callable[[Inputs], str | None]


def choose(forms: Mapping[str, Form[Inputs]], backend: str, inputs: Inputs) -> Form[Inputs]:
    """The form that shall compute the op: for "auto" the first in the table that supports the inputs."""
    if backend == "auto":
        for form in forms.values():
            if form.unsupported(inputs) is None:
                return form
        reasons = "; ".join(f"{name}: {form.unsupported(inputs)}" for name, form in forms.items())
        raise InputError(f"no backend can compute this: {reasons}")
    if backend not in forms:
        raise InputError(f"backend is {backend!r}; {nearest(backend, ['auto', *forms])}")
    reason = forms[backend].unsupported(inputs)
    if reason is not None:
        raise InputError(f"backend {backend!r} cannot compute this: {reason}")
    return forms[backend]
