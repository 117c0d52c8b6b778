"""The choice between the forms of one op: the first that can, or a named one, which says why if it cannot."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from bertsmith.errors import InputError, nearest

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Form(Generic[Inputs]):
    """One way to compute an op, and the reason (or None) why it cannot serve given inputs."""

    compute: Callable[[Inputs], Tensor]
    unsupported: Callable[[Inputs], str | None]


class Forms(dict[str, Form[Inputs]]):
    """The forms of one op by name, the preferred one first."""

    names: ClassVar[set[str]] = set()
    """The names of all forms of all ops."""

    def __init__(self, forms: Mapping[str, Form[Inputs]]) -> None:
        super().__init__(forms)
        self.names.update(forms)


def choose(forms: Forms[Inputs], backend: str, inputs: Inputs) -> Form[Inputs]:
    """The form that shall compute the op: for "auto" the first in the table that supports the inputs.

    A model may hold several ops, of which only some have a form of the name that was asked for; the others choose for
    themselves. A form that is there and cannot serve says why.
    """
    if backend not in forms and backend not in {"auto", *Forms.names}:
        raise InputError(f"backend is {backend!r}; {nearest(backend, ['auto', *sorted(Forms.names)])}")
    if backend not in forms:
        for form in forms.values():
            if form.unsupported(inputs) is None:
                return form
        reasons = "; ".join(f"{name}: {form.unsupported(inputs)}" for name, form in forms.items())
        raise InputError(f"no backend can compute this: {reasons}")
    reason = forms[backend].unsupported(inputs)
    if reason is not None:
        raise InputError(f"backend {backend!r} cannot compute this: {reason}")
    return forms[backend]
