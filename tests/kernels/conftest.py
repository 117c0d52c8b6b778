"""Kernels that Triton's interpreter runs are watched: an address outside every tensor they were given is an error.

A GPU may answer such a read with any number, and the interpreter would too.
"""

from typing import Any

import numpy as np
import pytest

from bertsmith.ops import kernel_support as support


@pytest.fixture(autouse=True)
def _addresses_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    if support.HAS_TRITON and support.is_interpreting():
        from triton.runtime import interpreter

        _watch(interpreter, monkeypatch)


def _watch(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    take_arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    given: list[tuple[int, int]] = []

    def arguments(self: Any, args: Any, kwargs: Any) -> Any:
        taken, named = take_arguments(self, args, kwargs)
        storages = [arg.untyped_storage() for arg in (*taken, *named.values()) if hasattr(arg, "untyped_storage")]
        given[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        return taken, named

    def check(pointers: Any, mask: Any) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)].astype(np.int64)
        is_ours = np.zeros(addresses.shape, bool)
        for begin, end in given:
            is_ours |= (addresses >= begin) & (addresses < end)
        assert is_ours.all(), f"{(~is_ours).sum()} of {is_ours.size} addresses lie outside all tensors"

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(executor, "_init_args_hst", arguments)
    monkeypatch.setattr(builder, "create_masked_load", masked_load)
    monkeypatch.setattr(builder, "create_masked_store", masked_store)
