"""Inputs that all attention ops share, their checks, and the adapter that pads packed inputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Self, TypeVar

from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError


@dataclass(frozen=True)
class QueryKeyValueInputs:
    """Inputs of an attention op; the i-th sequence of queries attends to the i-th sequence of keys.

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
                f"{queries} sequences of queries cannot attend to {keys} sequences of keys; allowed: equal numbers"
            )
        if self.is_causal and not self.has_order:
            raise InputError(
                "is_causal is True, but key_layout differs from the queries' layout; allowed: self-attention"
            )

    @property
    def has_order(self) -> bool:
        """Whether the relative order of queries and keys is known."""
        return self.key_layout is self.layout

    def padded(self) -> Self:
        """Return the inputs in padded layout."""
        if not (self.layout.is_packed or self.key_layout.is_packed):
            return self
        query, layout = self.layout.pad(self.query)
        key, key_layout = self.key_layout.pad(self.key)
        value, _ = self.key_layout.pad(self.value)
        key_layout = layout if self.key_layout is self.layout else key_layout
        return replace(self, query=query, key=key, value=value, layout=layout, key_layout=key_layout)


Inputs = TypeVar("Inputs", bound=QueryKeyValueInputs)


def through_padding(compute: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    """Extend an implementation for padded rows to packed inputs: pad → compute → unpad."""

    @wraps(compute)
    def compute_any_layout(inputs: Inputs) -> Tensor:
        return inputs.layout.unpad(compute(inputs.padded()), inputs.query)

    return compute_any_layout
