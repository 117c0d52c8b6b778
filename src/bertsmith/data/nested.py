"""Tensors inside dataclasses, tuples, lists and dictionaries."""

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Value = TypeVar("Value")


def map_tensors(function: Callable[[Tensor], Tensor], value: Value) -> Value:
    """Return a value with a function applied to all tensors in it."""
    result: Value = _mapped(Tensor, function, value)
    return result


def as_arrays(value: Value) -> Value:
    """Return a value with all CPU tensors in it as NumPy arrays, without copying."""
    result: Value = _mapped(Tensor, Tensor.numpy, value)
    return result


def as_tensors(value: Value) -> Value:
    """Return a value with all NumPy arrays in it as tensors, without copying: the inverse of `as_arrays`."""
    result: Value = _mapped(np.ndarray, torch.from_numpy, value)
    return result


def _mapped(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with a function applied to everything of a type in it."""

    def mapped(value: Any) -> Any:
        if isinstance(value, kind):
            return function(value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: mapped(getattr(value, field.name)) for field in fields(value)})
        if isinstance(value, tuple):
            items = [mapped(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [mapped(item) for item in value]
        if isinstance(value, dict):
            return {name: mapped(item) for name, item in value.items()}
        return value

    return mapped(value)


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in a value, in a fixed order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, value)
    return found


def signature(value: Any) -> Hashable:
    """Return a key that is equal for two values if a graph recorded with one holds for the other."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(signature(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple | list):
        return type(value), *(signature(item) for item in value)
    if isinstance(value, dict):
        return dict, *((name, signature(item)) for name, item in value.items())
    key: Hashable = value
    return key
