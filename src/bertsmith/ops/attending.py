"""Shared by all attention ops: the inputs record, its checks, and the detour through padding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Self, TypeVar

from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError


@dataclass(frozen=True)
class AttendingInputs:
    """One call; the i-th sequence of queries looks at the i-th sequence of keys.

    Shape: query (batch, length, heads, head_width), or (tokens, heads, head_width) when packed; key and value likewise
    in their own layout. The head widths of value and key may differ.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layout: SequenceLayout
    key_layout: SequenceLayout
    is_causal: bool = False

    def __post_init__(self) -> None:
        queries, keys = self.layout.batch, self.key_layout.batch
        if queries != keys:
            raise InputError(
                f"{queries} sequences of queries cannot look at {keys} sequences of keys; allowed: as many"
            )
        if self.is_causal and not self.has_order:
            raise InputError(
                "is_causal is True and the keys have a layout of their own; allowed: the queries' own keys"
            )

    @property
    def has_order(self) -> bool:
        """Whether it is known which keys stand before a query."""
        return self.key_layout is self.layout

    def padded(self) -> Self:
        """The same call in padded rows."""
        if not (self.layout.is_packed or self.key_layout.is_packed):
            return self
        query, layout = self.layout.pad(self.query)
        key, key_layout = self.key_layout.pad(self.key)
        value, _ = self.key_layout.pad(self.value)
        key_layout = layout if self.key_layout is self.layout else key_layout
        return replace(self, query=query, key=key, value=value, layout=layout, key_layout=key_layout)


Inputs = TypeVar("Inputs", bound=AttendingInputs)


def through_padding(compute: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    """Let an implementation for padded rows serve packed inputs as well: pad → compute → unpad."""

    @wraps(compute)
    def packed_too(inputs: Inputs) -> Tensor:
        return inputs.layout.unpad(compute(inputs.padded()), inputs.query)

    return packed_too
