"""Bounds checks for kernels in Triton's interpreter: an address outside all tensor arguments is an error.

A GPU may return any number for such a read, and so would the interpreter.
"""

from typing import Any

import numpy as np
import pytest

from bertsmith.ops import kernel_support as support


@pytest.fixture(autouse=True)
def _check_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    if support.HAS_TRITON and support.is_interpreting():
        from triton.runtime import interpreter

        _watch(interpreter, monkeypatch)


def _watch(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    take_arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    ranges: list[tuple[int, int]] = []

    def arguments(self: Any, args: Any, kwargs: Any) -> Any:
        positional, named = take_arguments(self, args, kwargs)
        storages = [arg.untyped_storage() for arg in (*positional, *named.values()) if hasattr(arg, "untyped_storage")]
        ranges[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        return positional, named

    def check(pointers: Any, mask: Any) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)].astype(np.int64)
        is_inside = np.zeros(addresses.shape, bool)
        for begin, end in ranges:
            is_inside |= (addresses >= begin) & (addresses < end)
        assert is_inside.all(), f"{(~is_inside).sum()} of {is_inside.size} addresses are outside all tensors"

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(executor, "_init_args_hst", arguments)
    monkeypatch.setattr(builder, "create_masked_load", masked_load)
    monkeypatch.setattr(builder, "create_masked_store", masked_store)
